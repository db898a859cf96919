"""`python -m services.credentials`: writes the credentials of a deployment without `quire serve`
(docker-compose.yml), before its services start.

RUN_DIR/secret           the deployment's secret
RUN_DIR/redis-password   the password of the Redis user `quire`
RUN_DIR/valkey.acl       defines that user, for the server (--aclfile)

A configured secret or password is written as it is; a missing one is generated once and kept.
"""

import asyncio
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from blockstore.acl import acl_file
from services.common.runtime.config import ServiceSettings
from services.common.runtime.logging import get_logger
from services.common.runtime.process import run_service
from services.common.runtime.secret import (
    FILE_NAME,
    deployment_secret,
    shared_secret,
    write_private,
)

log = get_logger(__name__)

PASSWORD_FILE = "redis-password"
ACL_FILE = "valkey.acl"


class CredentialsSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_CREDENTIALS_")
    service: ClassVar[str] = "credentials"

    redis_password: SecretStr | None = Field(
        default=None, description="of the user `quire` of Redis; none: made when missing"
    )


async def write(settings: CredentialsSettings, stop: asyncio.Event) -> None:
    """Write all three files. StartupError: a file cannot be written, or other users may read it."""
    secret = deployment_secret(settings)
    if settings.secret is not None or settings.secret_file is not None:
        write_private(settings.run_dir / FILE_NAME, secret.root)
    file = settings.run_dir / PASSWORD_FILE
    if settings.redis_password is not None:
        write_private(file, settings.redis_password.get_secret_value().encode())
    password = shared_secret(file).decode()
    write_private(settings.run_dir / ACL_FILE, acl_file(password).encode())
    log.info("credentials_written", run_dir=str(settings.run_dir))


if __name__ == "__main__":
    run_service(CredentialsSettings, write)
