"""The deployment's default sampling parameters, as vLLM documents `--generation-config`."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from services.model.config.json_fields import JsonFields
from services.model.config.model_config import GENERATION_FILE, GenerationDefaults
from services.runtime.errors import StartupError

AUTO, NEUTRAL = "auto", "vllm"
"""The sources that are not a directory: the model's generation_config.json, and none."""

_OVERRIDE = Path("override_generation_config")
_NAMES = tuple(field.name for field in fields(GenerationDefaults))


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """`base` replaces the model's parameters; None keeps them. `override` replaces single ones of
    the result."""

    base: GenerationDefaults | None
    override: GenerationDefaults

    @classmethod
    def read(cls, source: str, override: str | None) -> Self:
        """`source` is `auto`, `vllm`, or a directory with a generation_config.json, and `override`
        is a JSON object. Raises StartupError if one of them is wrong."""
        base = None
        if source == NEUTRAL:
            base = GenerationDefaults()
        elif source != AUTO:
            base = GenerationDefaults.from_fields(JsonFields.read(Path(source) / GENERATION_FILE))
        return cls(base, GenerationDefaults() if override is None else _parsed(override))

    def defaults(self, of_model: GenerationDefaults) -> GenerationDefaults:
        """The parameters for a model with its own ones."""
        base = of_model if self.base is None else self.base
        given = {name: value for name, value in asdict(self.override).items() if value is not None}
        return GenerationDefaults(**{**asdict(base), **given})


def _parsed(override: str) -> GenerationDefaults:
    try:
        values = json.loads(override)
    except ValueError as error:
        raise StartupError(f"{_OVERRIDE}: {override!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"{_OVERRIDE}: {override!r} is not a JSON object")
    if unknown := values.keys() - set(_NAMES):
        known = ", ".join(_NAMES)
        raise StartupError(f"{_OVERRIDE}: {min(unknown)!r} is not one of {known}")
    return GenerationDefaults.from_fields(JsonFields(_OVERRIDE, values))
