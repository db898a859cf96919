"""A deployment whose clients need TLS and an API key."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.certificates import write_certificates
from quire.connections import Tls
from tests.api_keys import text_of

from .deployment import Deployment, serving


@contextmanager
def secured(directory: Path, *args: str, has_client_ca: bool = False) -> Iterator[Deployment]:
    """Serve the embedded model with the keys of `tests.api_keys`. `has_client_ca`: clients must
    also show a certificate, which the deployment's `tls` has."""
    tls, keys = directory / "tls", directory / "keys.json"
    write_certificates(tls, hosts=["127.0.0.1"], clients=["client"])
    keys.write_text(text_of())
    keys.chmod(0o600)
    flags = ["--tls-cert", f"{tls}/gateway.crt", "--tls-key", f"{tls}/gateway.key"]
    shown = Tls(tls / "ca.crt")
    if has_client_ca:
        flags += ["--tls-client-ca", f"{tls}/ca.crt"]
        shown = Tls(tls / "ca.crt", tls / "client.crt", tls / "client.key")
    flags += ["--api-keys", str(keys), *args]
    with serving("demo", directory, *flags, tls=shown) as deployment:
        yield deployment
