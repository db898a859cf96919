"""`deploy/nginx.conf` before a gateway: gRPC and HTTP pass, floods of one address are refused."""

import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from quire import Client, InvalidRequest, NotAllowed, QuireError, Sampling, Tls, Unavailable
from quire.certificates import write_certificates
from quire.supervisor.run_directory import free_port
from services.gateway.http.middleware.body_limits import MAX_BODY_BYTES
from tests.api_keys import ALICE, text_of
from tests.programs import ROOT
from tests.waiting import wait_until

from .deployment import Deployment, serving

NUM_CALLS = 300
"""Sent at once: more than the proxy lets one address send in a second."""
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
KEY = {"Authorization": f"Bearer {ALICE}"}


@dataclass
class Proxy:
    port: int
    tls: Tls

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self) -> Client:
        return Client(self.address, api_key=ALICE, tls=self.tls)

    def http(self, local_address: str = "127.0.0.1") -> httpx.Client:
        transport = httpx.HTTPTransport(
            verify=self.tls.context(), local_address=local_address, http2=False
        )
        return httpx.Client(
            base_url=f"https://{self.address}", headers=KEY, transport=transport, timeout=60
        )


@contextmanager
def proxying(grpc: str, http: str, folder: Path) -> Iterator[Proxy]:
    """Runs nginx with the file of `deploy/`, before these addresses, on a free port."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        pytest.skip("nginx is not installed (on Debian: apt install nginx-light)")
    tls, port = folder / "tls", free_port("127.0.0.1")
    write_certificates(tls, hosts=["127.0.0.1"])
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    for old, new in {
        "listen 443 ": f"listen 127.0.0.1:{port} ",
        "127.0.0.1:50051": grpc,
        "127.0.0.1:8000": http,
        "/etc/quire/tls/server": f"{tls}/gateway",
        "/run/nginx-quire.pid": f"{folder}/nginx.pid",
    }.items():
        assert old in text
        text = text.replace(old, new)
    config = folder / "nginx.conf"
    config.write_text(text)
    process = subprocess.Popen([program, "-c", config, "-g", "daemon off;"])
    try:
        wait_until(lambda: _listens(port), explain=lambda: str(process.poll()))
        yield Proxy(port, Tls(tls / "ca.crt"))
    finally:
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("behind-nginx")
    keys = folder / "keys.json"
    keys.write_text(text_of())
    keys.chmod(0o600)
    with serving("demo", folder, "--api-keys", str(keys)) as running:
        yield running


@pytest.fixture
def proxy(deployment: Deployment, tmp_path: Path) -> Iterator[Proxy]:
    http = deployment.http.removeprefix("http://")
    with proxying(deployment.address, http, tmp_path) as running:
        yield running


def text(client: Client) -> str:
    return "".join(delta.text for delta in client.generate("A block table", GREEDY))


def test_answers_and_errors_pass(deployment: Deployment, proxy: Proxy) -> None:
    with Client(deployment.address, api_key=ALICE) as direct, proxy.client() as client:
        expected = text(direct)
        assert text(client) == expected
        with pytest.raises(InvalidRequest, match="max_tokens"):
            list(client.generate("A block table", Sampling(max_tokens=-1)))
    stranger = Client(proxy.address, api_key="qk-" + "x" * 40, tls=proxy.tls)
    with stranger, pytest.raises(NotAllowed):
        text(stranger)
    with proxy.http() as http:
        body = {"prompt": "A block table", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected
        too_large = http.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
        assert too_large.status_code == 413
        assert "the body is larger than" in too_large.json()["error"]["message"]


def test_an_answer_is_not_held_back(proxy: Proxy) -> None:
    """Each part of a stream passes when the gateway sends it."""
    body = {"prompt": "A block table", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with proxy.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        parts = list(answer.iter_raw())
    assert len(parts) > 20


def test_one_addresss_flood_of_calls_is_refused(proxy: Proxy) -> None:
    def call(client: Client) -> str:
        try:
            client.models()
        except QuireError as error:
            return f"{type(error).__name__} {error.code}"
        return "answered"

    with proxy.client() as client, ThreadPoolExecutor(64) as pool:
        ends = Counter(pool.map(call, [client] * NUM_CALLS))
    refused = ends["Overloaded rate_limit_exceeded"]
    assert refused > 50
    assert ends["answered"] == NUM_CALLS - refused


def test_one_addresss_flood_of_requests_is_refused_and_not_anothers(proxy: Proxy) -> None:
    def models(http: httpx.Client) -> httpx.Response:
        return http.get("/v1/models")

    with proxy.http() as http, proxy.http("127.0.0.2") as another, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(models, [http] * NUM_CALLS))
        assert another.get("/v1/models").status_code == 200
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) > 50
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_an_absent_gateway_is_unavailable(tmp_path: Path) -> None:
    absent = f"127.0.0.1:{free_port('127.0.0.1')}"
    with proxying(absent, absent, tmp_path) as proxy, proxy.client() as client:
        with pytest.raises(Unavailable, match="the gateway does not answer"):
            client.models()
        with proxy.http() as http:
            assert http.get("/v1/models").status_code == 502
