"""A deployment with mTLS for clients and API keys, used through clients and commands."""

import json
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.cli import main
from tests.api_keys import ALICE

from .deployment import Deployment
from .secured import secured


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with secured(tmp_path_factory.mktemp("secured"), has_client_ca=True) as running:
        yield running


def certificates(deployment: Deployment, *names: str) -> list[str]:
    assert deployment.tls
    assert deployment.tls.certificate
    files = {"ca": deployment.tls.ca, "cert": deployment.tls.certificate, "key": deployment.tls.key}
    return [word for name in names for word in (f"--tls-{name}", str(files[name]))]


def test_generate_with_certificate_and_key(deployment: Deployment, capsys: Any) -> None:
    flags = [*certificates(deployment, "ca", "cert", "key"), "--api-key", ALICE]
    assert main(["generate", "--address", deployment.address, "--json", *flags, "hello"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events


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
def test_generate_without_one_of_them_says_so(
    deployment: Deployment, names: tuple[str, ...], key: str | None, told: str, capsys: Any
) -> None:
    flags = [*certificates(deployment, *names), *(["--api-key", key] if key else [])]
    assert main(["generate", "--address", deployment.address, *flags, "hello"]) != 0
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("quire: ")
    assert told in error


def test_http_needs_certificate_and_key(deployment: Deployment) -> None:
    assert deployment.tls
    assert deployment.tls.certificate
    context = ssl.create_default_context(cafile=str(deployment.tls.ca))
    with pytest.raises(httpx.TransportError):  # no certificate
        httpx.get(f"{deployment.http}/v1/models", verify=context)
    context.load_cert_chain(deployment.tls.certificate, deployment.tls.key)
    with httpx.Client(base_url=deployment.http, verify=context) as client:
        assert client.get("/v1/models").status_code == 401
        keyed = client.get("/v1/models", headers={"authorization": f"Bearer {ALICE}"})
        assert keyed.status_code == 200
