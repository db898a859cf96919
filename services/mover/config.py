"""Settings of the mover."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from quire.sizes import parse_size
from services.runtime.config import PoolServiceSettings


class MoverSettings(PoolServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_MOVER_")

    service: ClassVar[str] = "mover"

    model_name: str = Field(
        "", description="the model whose pool this mover serves; default: the only one of the host"
    )
    lease_s: float = Field(
        10.0,
        ge=1,
        description="how long another pool keeps blocks for this mover without a renewal",
    )
    pull_timeout_s: float = Field(
        20.0,
        gt=0,
        description="how long 64 MiB of a copy may take before it is given up; if it still writes "
        "after half as long again, the process ends",
    )
    min_bandwidth: Annotated[int, BeforeValidator(parse_size)] = Field(
        "100MiB",  # type: ignore[assignment]  # read as any other value
        description="bytes a second below which another pool counts as slow",
    )
