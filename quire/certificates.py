"""Makes the certificates of a deployment: a private CA, and what the CA signs (`quire certs`).

DIR/ca.crt, DIR/ca.key             the CA; only `quire certs` needs ca.key
DIR/service.crt, DIR/service.key   what services show each other; the name SERVICE_NAME in it says
                                   that its owner is a service of this deployment
DIR/gateway.crt, DIR/gateway.key   what gateways show their clients, with the names of the hosts
DIR/NAME.crt, DIR/NAME.key         a client's, where gateways ask clients for certificates

The library `cryptography` is imported when certificates are made, not with this module.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import BadTls
from quire.files import replace_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SERVICE_NAME = "service.quire.internal"
"""A name in the certificate of every service; addresses of services change, this name does not."""
CA_DAYS = 3650
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class _Pair:
    certificate: "x509.Certificate"
    key: "EllipticCurvePrivateKey"


def write_certificates(
    directory: Path,
    hosts: Sequence[str] = (),
    clients: Sequence[str] = (),
    days: float = 365,
    *,
    service_hosts: Sequence[str] = (),
    ca_key: Path | None = None,
) -> list[str]:
    """Write the certificates of services and gateways, and one for each of `clients`; returns the
    names of the written files.

    An existing CA is kept, so that certificates can be renewed while services run: they read
    changed files again. `hosts` are names and addresses by which clients reach the gateways, and
    `service_hosts` further names of services, such as a Valkey's with the same certificate. The
    CA's key may be kept elsewhere than in `directory` (`ca_key`). Raises BadTls.
    """
    wanted: dict[str, tuple[tuple[str, ...], str]] = {
        "service": ((SERVICE_NAME, *service_hosts), "both"),
        "gateway": ((*hosts, *LOCAL_HOSTS), "server"),
        **{client: ((client,), "client") for client in clients},
    }
    for name in clients:
        if name in ("ca", "service", "gateway") or not name.replace("-", "").isalnum():
            raise BadTls(f"{name!r} cannot be a client's name: letters, digits, hyphens")
    for host in (*hosts, *service_hosts):
        if not _is_host(host):
            raise BadTls(f"{host!r} is neither a host's name nor an address")
    try:
        directory.mkdir(exist_ok=True)
        ca, written = _authority(directory / "ca.crt", ca_key or directory / "ca.key")
        for name, (names, use) in wanted.items():
            signed = _signed(ca, name, names, use, days)
            _write(directory / f"{name}.crt", directory / f"{name}.key", signed)
            written += [f"{name}.crt", f"{name}.key"]
    except OSError as error:
        raise BadTls(f"cannot write to {directory}: {error.strerror}") from error
    return written


def _authority(certificate: Path, key: Path) -> tuple[_Pair, list[str]]:
    """Return the CA in these files, made if there is none, and the names of the files written."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if certificate.exists() != key.exists():
        raise BadTls(f"one of {certificate} and {key} is missing; both are needed")
    if not certificate.exists():
        ca = _signed(None, "ca", (), "ca", CA_DAYS)
        _write(certificate, key, ca)
        return ca, [certificate.name, key.name]
    try:
        loaded = load_pem_private_key(key.read_bytes(), None)
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except ValueError as error:
        raise BadTls(f"the CA {certificate} cannot be read: {error}") from error
    if not isinstance(loaded, EllipticCurvePrivateKey):
        raise BadTls(f"{key} was not made by `quire certs`: it is no EC key")
    if found.not_valid_after_utc < datetime.now(UTC):
        raise BadTls(f"{certificate} expired at {found.not_valid_after_utc:%Y-%m-%d}")
    return _Pair(found, loaded), []


def _signed(ca: _Pair | None, name: str, names: Sequence[str], use: str, days: float) -> _Pair:
    """Make a certificate, signed by `ca` or by itself. `use` is ca, server, client, or both."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"quire {name}")])
    now = datetime.now(UTC)
    issuer = key if ca is None else ca.key
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=ca is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority, critical=False)
    )
    if names:
        alternatives = x509.SubjectAlternativeName([_general_name(each) for each in names])
        builder = builder.add_extension(alternatives, critical=False)
    if use != "ca":
        server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
        uses = {"server": [server], "client": [client], "both": [server, client]}[use]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return _Pair(builder.sign(issuer, hashes.SHA256()), key)


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    """Return the key usage, without which Python 3.13 and later accept no CA."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9*_.-]{1,253}", text) is not None
    return True


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(certificate: Path, key: Path, pair: _Pair) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = pair.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    replace_file(key, secret)
    replace_file(certificate, pair.certificate.public_bytes(Encoding.PEM), 0o644)
