"""Settings of the block manager."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.runtime.config import PoolServiceSettings


class BlockManagerSettings(PoolServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_BLOCK_MANAGER_")

    service: ClassVar[str] = "block_manager"

    scan_interval_s: float = Field(
        0.25,
        gt=0,
        description="time between two scans for pools and workers, 8 times as long while no request"
        " runs; deaths are noticed without a scan",
    )
    audit_interval_s: float = Field(10.0, gt=0, description="time between two audits of all pools")
    fence_after_s: float = Field(
        2.0, gt=0, description="how long a living worker may be missing in the registry"
    )
    pool_grace_s: float = Field(
        3.0, ge=0, description="how long a pool without workers, or without a directory, stays"
    )
    drain_timeout_s: float = Field(
        5.0, gt=0, description="how long a worker may take to answer a drain"
    )
