"""Every service accepts the settings that the supervisor gives it."""

import os
from pathlib import Path

import pytest

from quire.options.worker import WorkerOptions
from quire.supervisor import topology
from quire.supervisor.models import ModelOptions
from quire.supervisor.options import ServeOptions
from services.block_manager.config import BlockManagerSettings
from services.gateway.config import GatewaySettings
from services.runtime.config import ServiceSettings, load_settings, resolved
from services.worker.config import DecodeSettings, PrefillSettings, WorkerSettings

RUN = Path("/dev/shm/quire-1000/50051-a1b2c3d4")
CLASSES: dict[str, type[ServiceSettings]] = {
    "block-manager": BlockManagerSettings,
    "prefill-1": PrefillSettings,
    "decode-1": DecodeSettings,
    "gateway": GatewaySettings,
}


def test_every_service_understands_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every flag set: each name is a setting, and each value is valid and arrives."""
    asked = ServeOptions(
        pool_memory="2GiB",
        swap_memory="1GiB",
        allowed_hosts="quire.example, *.example.com",
        preemption="swap",
        block_size=32,
        dtype="float32",
        backend="cpu",
        threads=3,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    settings_of_workers = asked.settings(WorkerOptions)
    model = ModelOptions("tiny", Path("/models/tiny"), 1, 1, ("a", "b"), settings_of_workers)
    for spec in topology.services(asked, [model], RUN):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("QUIRE_")]:
                patch.delenv(name)
            for name, value in spec.environment.items():
                patch.setenv(name, value)
            settings = load_settings(CLASSES[spec.name])
        assert settings.run_dir == RUN
        assert settings.redis_url == f"unix://{RUN}/redis.sock"
        if isinstance(settings, GatewaySettings):
            assert settings.model_aliases == ("a=tiny", "b=tiny")
            assert settings.allowed_hosts == ("quire.example", "*.example.com")
            (shown,) = (v for k, v in resolved(settings).items() if k.endswith("ALLOWED_HOSTS"))
            assert shown == "quire.example,*.example.com"
        if isinstance(settings, WorkerSettings):
            assert (settings.model, settings.model_name) == (Path("/models/tiny"), "tiny")
            assert (settings.block_size, settings.threads, settings.max_num_seqs) == (32, 3, 8)
            assert (settings.swap_memory, settings.preemption) == ("1GiB", "swap")
