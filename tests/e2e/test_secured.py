"""A deployment with mTLS for clients and API keys, used through clients and commands."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.cli import main
from tests.api_keys import ALICE

from .deployment import Deployment
from .secured import secured


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with secured(tmp_path_factory.mktemp("secured"), has_client_ca=True) as running:
        yield running


def bench(deployment: Deployment, front: str, *flags: str) -> int:
    where = ["--url", deployment.http] if front == "http" else ["--address", deployment.address]
    load = ["--concurrency", "2", "--num-requests", "4", "--warmup", "1"]
    lengths = ["--prompt-len", "8", "--output-len", "8"]
    return main(["bench", *where, *load, *lengths, "--json", *flags])


def certificates(deployment: Deployment, *names: str) -> list[str]:
    assert deployment.tls
    files = {"ca": deployment.tls.ca, "cert": deployment.tls.certificate, "key": deployment.tls.key}
    return [word for name in names for word in (f"--tls-{name}", str(files[name]))]


@pytest.mark.parametrize("front", ["http", "grpc"])
def test_bench_measures_with_certificate_and_key(
    deployment: Deployment, front: str, capsys: Any
) -> None:
    shown = certificates(deployment, "ca", "cert", "key")
    assert bench(deployment, front, *shown, "--api-key", ALICE) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["num_completed"], summary["num_output_tokens"]) == (4, 32)


@pytest.mark.parametrize("front", ["http", "grpc"])
@pytest.mark.parametrize(
    ("names", "key", "told"),
    [
        (("ca", "cert", "key"), None, "key"),
        (("ca", "cert", "key"), "qk-" + "x" * 40, "key"),
        (("ca",), ALICE, ""),
        ((), ALICE, ""),
    ],
    ids=["no API key", "an unknown API key", "no certificate", "no TLS"],
)
def test_bench_without_one_of_them_says_so(
    deployment: Deployment,
    front: str,
    names: tuple[str, ...],
    key: str | None,
    told: str,
    capsys: Any,
) -> None:
    flags = [*certificates(deployment, *names), *(["--api-key", key] if key else [])]
    assert bench(deployment, front, *flags) != 0
    lines = capsys.readouterr().err.splitlines()  # of its progress, too
    (error,) = (line for line in lines if line.startswith("quire: "))
    assert told in error
