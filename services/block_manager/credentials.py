"""`python -m services.block_manager.credentials` writes the credentials of a deployment without
`quire serve` (docker-compose.yml), before its services start.

RUN_DIR/secret           the deployment's secret
RUN_DIR/redis-password   the password of the Redis user `quire`
RUN_DIR/valkey.acl       defines that user, for the server (--aclfile)
RUN_DIR/tls/             the CA and the certificates of services and gateways (`quire.certificates`)

A configured secret or password is written as it is; a missing one is generated once and kept. So is
the CA; certificates are made anew each time, and services read them again.
"""

import asyncio
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from blockstore.acl import acl_file
from quire.certificates import write_certificates
from quire.errors import BadTls
from quire.options.shared import SeveralTexts
from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.logging import get_logger
from services.runtime.process import run_service
from services.runtime.secret import FILE_NAME, deployment_secret, shared_secret, write_private

log = get_logger(__name__)

PASSWORD_FILE = "redis-password"
ACL_FILE = "valkey.acl"
TLS_DIR = "tls"


class CredentialsSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_CREDENTIALS_")
    service: ClassVar[str] = "credentials"

    redis_password: SecretStr | None = Field(
        default=None, description="of the user `quire` of Redis; none: made when missing"
    )
    gateway_hosts: SeveralTexts = Field(
        default=(), description="names and addresses, by commas, of the gateways for clients"
    )
    redis_host: str = Field(default="redis", description="name of the server of Redis")
    ca_key: Path | None = Field(
        default=None, description="file with the CA's key; default: RUN_DIR/tls/ca.key"
    )


async def write(settings: CredentialsSettings, stop: asyncio.Event) -> None:
    """Write all files. Raises StartupError if one cannot be written, or others may read it."""
    secret = deployment_secret(settings)
    if settings.secret is not None or settings.secret_file is not None:
        write_private(settings.run_dir / FILE_NAME, secret.root)
    file = settings.run_dir / PASSWORD_FILE
    if settings.redis_password is not None:
        write_private(file, settings.redis_password.get_secret_value().encode())
    password = shared_secret(file).decode()
    write_private(settings.run_dir / ACL_FILE, acl_file(password).encode())
    try:
        write_certificates(
            settings.run_dir / TLS_DIR,
            settings.gateway_hosts,
            service_hosts=[settings.redis_host],
            ca_key=settings.ca_key,
        )
    except BadTls as error:
        raise StartupError(str(error)) from error
    log.info("credentials_written", run_dir=str(settings.run_dir))


if __name__ == "__main__":
    run_service(CredentialsSettings, write)
