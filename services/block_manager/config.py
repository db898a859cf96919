"""Settings of the block manager."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.runtime.config import PoolServiceSettings


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the loops, which are the same in every deployment. Tests shorten them."""

    scan_interval_s: float = 0.25
    """Time between two scans for pools and workers, 8 times as long while no request runs. Deaths
    are noticed without a scan."""
    audit_interval_s: float = 10.0
    """Time between two audits of all pools, which each hold Redis for milliseconds."""


class BlockManagerSettings(PoolServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_BLOCK_MANAGER_")

    service: ClassVar[str] = "block_manager"

    fence_after_s: float = Field(
        2.0, gt=0, description="how long a living worker may be missing in the registry"
    )
    pool_grace_s: float = Field(
        3.0, ge=0, description="how long a pool without workers, or without a directory, stays"
    )
