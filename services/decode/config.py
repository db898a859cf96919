"""Settings of the decode worker."""

from typing import ClassVar, Literal

from pydantic_settings import SettingsConfigDict

from services.worker.config import WorkerSettings


class DecodeSettings(WorkerSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_DECODE_")
    service: ClassVar[Literal["prefill", "decode"]] = "decode"
