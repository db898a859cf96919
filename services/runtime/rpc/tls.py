"""TLS of servers and channels: reads the files, checks them, and reads them again when they change.

Services prove who they are with certificates of the deployment's own CA that contain the name
`SERVICE_NAME`. Running connections keep the certificate that they began with.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from quire.certificates import SERVICE_NAME
from quire.files import version_of
from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one end."""

    certificate: Path
    key: Path
    ca: Path | None = None
    """The CAs that must have signed the other end's certificate. Without them a server asks its
    clients for no certificate."""

    @property
    def version(self) -> tuple[tuple[int, int, int], ...] | None:
        """Changes whenever a file does; None if a file is missing."""
        return version_of(self.certificate, self.key, *([] if self.ca is None else [self.ca]))

    def check(self) -> None:
        """Raises StartupError if a file is missing or broken, the key is another certificate's, or
        the certificate has expired."""
        for what, file in (("certificate", self.certificate), ("key", self.key), ("CA", self.ca)):
            try:
                if file is not None:
                    file.read_bytes()
            except OSError as error:
                raise StartupError(
                    f"TLS: cannot read the {what} {file}: {error.strerror}"
                ) from error
        self.server_context()
        self._check_dates()

    def _check_dates(self) -> None:
        from cryptography import x509  # takes 50 ms, which deployments without TLS need not wait

        (leaf, *_) = x509.load_pem_x509_certificates(self.certificate.read_bytes())
        now = datetime.now(UTC)
        for name, wrong, at in (
            ("expired at", leaf.not_valid_after_utc < now, leaf.not_valid_after_utc),
            ("is not valid before", leaf.not_valid_before_utc > now, leaf.not_valid_before_utc),
        ):
            if wrong:
                raise StartupError(
                    f"TLS: the certificate {self.certificate} {name} {at:%Y-%m-%d %H:%M} UTC"
                )

    def server_context(self) -> ssl.SSLContext:
        """For servers other than gRPC's. Raises StartupError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                text = f"TLS: {self.key} is not the key of the certificate {self.certificate}"
                raise StartupError(text) from error
            text = f"TLS: no certificate and key in PEM format: {self.certificate}, {self.key}"
            raise StartupError(f"{text} ({error})") from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise StartupError(f"TLS: {self.ca} has no CA in PEM format: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session shows no certificate: a client would outlive its own, and its CA.
            # With TLS 1.2, sessions cannot be turned off.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context

    def grpc_server(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server; each handshake has the newest files."""
        newest = Newest(self, self._server_configuration)
        return grpc.dynamic_ssl_server_credentials(
            newest.get(), newest.get, require_client_authentication=self.ca is not None
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        ca = None if self.ca is None else self.ca.read_bytes()
        pairs = [(self.key.read_bytes(), self.certificate.read_bytes())]
        return grpc.ssl_server_certificate_configuration(pairs, ca)

    def grpc_channel(self) -> grpc.ChannelCredentials:
        """Credentials of a channel to another service, which a channel keeps for its life."""
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(
            ca, self.key.read_bytes(), self.certificate.read_bytes()
        )


def service_tls(settings: ServiceSettings) -> TlsFiles | None:
    """The files for connections between services; None if those are not encrypted. Raises
    StartupError."""
    files = {name: getattr(settings, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    return given_files(env_prefix(type(settings)), files, "tls_ca")


def given_files(
    prefix: str, settings: Mapping[str, Path | None], ca: str, *, needs_ca: bool = True
) -> TlsFiles | None:
    """The files that three settings name: certificate, key, and `ca`. Raises StartupError if only
    some of the necessary files are set."""
    needed = [name for name in settings if needs_ca or name != ca]
    missing = [prefix + name.upper() for name in needed if settings[name] is None]
    if missing and any(settings.values()):
        raise StartupError(f"TLS needs also {', '.join(missing)}")
    if missing:
        return None
    certificate, key, authority = settings.values()
    assert certificate is not None
    assert key is not None
    return TlsFiles(certificate, key, authority)


SERVICE_OPTIONS = (("grpc.ssl_target_name_override", SERVICE_NAME),)
"""Options of a channel to another service: its certificate has this name, whatever its address."""


class Newest(Generic[T]):
    """Keeps the result of `make` for the newest usable files. Unusable files change nothing."""

    def __init__(self, files: TlsFiles, make: Callable[[], T]) -> None:
        files.check()
        self._files = files
        self._make = make
        self._version = files.version
        self._made = make()

    def get(self) -> T:
        """Called for each handshake, by any thread."""
        version = self._files.version
        if version != self._version:
            self._version = version
            try:
                self._files.check()
                self._made = self._make()
                log.info("certificate_reloaded", certificate=str(self._files.certificate))
            except (OSError, ValueError, StartupError) as error:
                log.error("certificate_refused", reason=str(error))
        return self._made
