"""The benchmark of the gateway plays both workers, and must keep up with the gateway."""

from pathlib import Path

import pytest

from bench.gateway_relay import Clients, Front, byte_model, measure
from quire.certificates import write_certificates
from services.common.rpc.tls import TlsFiles


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("over", "guard", "connections"), [("grpc", "none", "new"), ("http", "both", "kept")]
)
def test_the_bench_of_the_gateway_relays_every_token(
    tmp_path: Path, over: str, guard: str, connections: str
) -> None:
    write_certificates(tmp_path)
    files = TlsFiles(tmp_path / "gateway.crt", tmp_path / "gateway.key")
    front = Front(over, guard, files if guard == "both" else None)
    model_dir = byte_model(tmp_path)
    clients = Clients(num_streams=2, num_requests=2, num_tokens=16, connections=connections)
    row = measure(clients, step_s=0.001, model_dir=model_dir, front=front)
    assert row.startswith(f"| {over} | {guard} | {connections} | 2 | 2 | 16 | 1 |")
