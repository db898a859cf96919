"""The ACL of Quire's user: all commands that the block store sends or calls, and no others."""

import re
from pathlib import Path

import blockstore
from blockstore.acl import COMMANDS, acl_file

SOURCES = Path(blockstore.__file__).parent
PYTHONS = {
    *("INFO", "PING", "SELECT", "CLIENT|ID", "CLIENT|KILL", "CLIENT|SETINFO"),
    *("FUNCTION|LOAD", "FUNCTION|LIST", "FCALL", "FCALL_RO", "SSUBSCRIBE", "SUNSUBSCRIBE"),
    *("CLUSTER|MYID", "CLUSTER|SLOTS"),
    *("SET", "MGET", "EXPIRE", "ZINCRBY"),
}


def called_by_functions() -> set[str]:
    texts = [path.read_text() for path in sorted((SOURCES / "functions").glob("*.lua"))]
    call = r"(?:redis\.p?call|fetch|store)\(\s*'([A-Z]+)'"
    return {name for text in texts for name in re.findall(call, text)}


def test_the_user_may_do_what_functions_and_services_do_and_nothing_else() -> None:
    """A command that a function begins to call must be added to the list."""
    allowed = {name.upper() for names in COMMANDS.values() for name in names}
    assert called_by_functions() - allowed == set()
    assert allowed - called_by_functions() == PYTHONS


def test_the_file_does_not_tell_the_password() -> None:
    assert "hush-hush" not in acl_file("hush-hush")
    assert acl_file("a") != acl_file("b")
