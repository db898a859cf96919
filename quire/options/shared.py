"""Options that workers and gateways have."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from quire.options.flag import Flag


def split_by_commas(value: object) -> object:
    """The value of an option that is a list, before its check."""
    if not isinstance(value, str):
        return () if value is None else value
    return tuple(item.strip() for item in value.split(",") if item.strip())


SeveralTexts = Annotated[tuple[str, ...], BeforeValidator(split_by_commas)]
"""An option that is a list, written with commas."""


class Options(BaseModel):
    """The options that workers and gateways have."""

    otlp_endpoint: Annotated[str | None, Flag("URL", panel="Network")] = Field(
        default=None,
        description="collector of [traces](observing.md#traces), OTLP over gRPC: http://HOST:4317, "
        "or https://; none: no traces",
    )
    max_loras: Annotated[int, Flag("N")] = Field(
        default=8, ge=0, description="most [LoRA adapters](../lora.md) at a time; 0: none"
    )
    max_lora_rank: Annotated[int, Flag("N")] = Field(
        default=64, ge=1, le=512, description="largest rank of a LoRA adapter"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        scheme, _, address = (url or "").partition("://")
        if url is not None and (scheme not in ("http", "https") or not address.strip("/")):
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:4317")
        return url
