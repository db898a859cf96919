"""Writes the tables of docs/operations/settings.md from the settings of the services.

python -m tools.settings_page
"""

import re
from pathlib import Path

from pydantic.fields import FieldInfo

from quire.options.flag import flag_name
from quire.options.gateway import GatewayOptions
from quire.options.worker import WorkerOptions
from services.block_manager.config import BlockManagerSettings
from services.gateway.config import GatewaySettings
from services.mover.config import MoverSettings
from services.runtime.config import ServiceSettings
from services.worker.config import WorkerSettings

PAGE = Path(__file__).parents[1] / "docs/operations/settings.md"
SECTIONS: dict[str, type[ServiceSettings]] = {
    "Every service": ServiceSettings,
    "Gateway": GatewaySettings,
    "Prefill and decode workers": WorkerSettings,
    "Block manager": BlockManagerSettings,
    "Mover": MoverSettings,
}
_HEAD = "| name | default | `quire serve` | meaning |\n|---|---|---|---|\n"
_FLAGS = WorkerOptions.model_fields | GatewayOptions.model_fields


def page() -> str:
    """The page as it is, with new tables."""
    text = PAGE.read_text()
    for title, settings in SECTIONS.items():
        own = {
            name: field
            for name, field in settings.model_fields.items()
            if settings is ServiceSettings or name not in ServiceSettings.model_fields
        }
        rows = "".join(_row(name, own[name]) for name in sorted(own))
        table = re.compile(rf"(?<=^### {title}\n\n)(\|.*\n)+", re.MULTILINE)
        text = table.sub((_HEAD + rows).replace("\\", r"\\"), text)
    return text


def _row(name: str, field: FieldInfo) -> str:
    flag = f"`{flag_name(name, field)}`" if name in _FLAGS else ""
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{name.upper()}` | {_default(field)} | {flag} | {meaning} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None or "default: " in (field.description or ""):
        return ""
    if field.default in (None, "", ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
