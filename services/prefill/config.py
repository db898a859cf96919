"""Settings of the prefill worker."""

from typing import ClassVar, Literal

from pydantic_settings import SettingsConfigDict

from services.worker.config import WorkerSettings


class PrefillSettings(WorkerSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_PREFILL_")
    service: ClassVar[Literal["prefill", "decode"]] = "prefill"
