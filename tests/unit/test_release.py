"""What `make wheels` and `make images` build."""

import re
import tomllib

import yaml  # type: ignore[import-untyped]

from tests.programs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BAKE = (ROOT / "docker-bake.hcl").read_text()


def test_version_is_one_for_wheels_images_and_chart() -> None:
    version = PROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "quire" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    assert re.findall(r'^variable "VERSION" \{ default = "(.+)" \}$', BAKE, re.MULTILINE) == [
        version
    ]
