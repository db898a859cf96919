"""The function library in the server: builds its text and loads it. A library with the same name
and another text is never replaced."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from blockstore.errors import StoreUnsuitable
from blockstore.redis.connection import ask, translate_errors
from blockstore.store import FUNCTION_LIBRARY

FUNCTIONS = Path(__file__).parents[1] / "functions"


def library_text() -> str:
    """Return all files of functions/, in the order of their names, as one library."""
    files = sorted(FUNCTIONS.glob("*.lua"))
    return "\n".join([f"#!lua name={FUNCTION_LIBRARY}", *(file.read_text() for file in files)])


async def load_functions(url: str, connection: AbstractConnection) -> None:
    """Load the library unless the server has it. StoreUnsuitable: the server has a library with
    this name and another text."""
    with translate_errors(url):
        await _load(url, connection)


async def _load(url: str, connection: AbstractConnection) -> None:
    text = library_text()
    while (loaded := await _loaded_text(connection)) is None:  # again after a FUNCTION FLUSH
        try:
            await ask(connection, "FUNCTION", "LOAD", text)
        except ResponseError as error:
            if "already exists" not in str(error):  # another process loaded it first
                raise
    if loaded != text.encode():
        raise StoreUnsuitable(
            f"{url} has other functions named {FUNCTION_LIBRARY}: another version of Quire uses"
            " this server. Use another server, or stop that one and FUNCTION DELETE them"
        )


async def _loaded_text(connection: AbstractConnection) -> bytes | None:
    libraries = await ask(
        connection, "FUNCTION", "LIST", "LIBRARYNAME", FUNCTION_LIBRARY, "WITHCODE"
    )
    fields: list[Mapping[bytes, Any]] = [
        dict(zip(library[::2], library[1::2], strict=True)) for library in libraries
    ]
    return fields[0][b"library_code"] if fields else None
