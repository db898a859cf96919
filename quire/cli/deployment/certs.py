"""`quire certs`: makes a private CA and certificates for TLS."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from quire.certificates import write_certificates


def certs(
    directory: Annotated[Path, Argument(metavar="DIR", help="where the files are written")],
    host: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="name or address of a gateway for clients; may be repeated"),
    ] = None,
    client: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="make a client's certificate too; may be repeated"),
    ] = None,
    days: Annotated[
        int, Option(metavar="N", min=1, max=3650, help="how long certificates are valid")
    ] = 365,
) -> None:
    """Make a private CA and certificates of services and gateways, or renew them.

    An existing CA in DIR is kept. Services that run read changed files again.
    """
    for name in write_certificates(directory, host or (), client or (), days):
        print(directory / name)
