"""The files of the dashboard's page."""

from pathlib import Path

PAGE = Path(__file__).parents[1] / "dashboard" / "page"
