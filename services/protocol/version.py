"""The versions of the protocol between services. They compare them when they connect."""

from blockstore.store import FUNCTION_LIBRARY, PREVIOUS_LIBRARY

PROTOCOL_VERSION = 10
"""The version of the messages in proto/quire/v1, and of the function library of the block store. A
new library, or a change that services of the version before may notice, increments it, and puts the
commit before it into tests/previous_version.txt."""

LIBRARIES = {PROTOCOL_VERSION: FUNCTION_LIBRARY, PROTOCOL_VERSION - 1: PREVIOUS_LIBRARY}
"""The versions that this one talks to, and the function library of each: an upgrade replaces the
services one after another. Between two services the older one's version is spoken."""


def spoken_with(version: int) -> int:
    """The version to speak with a service of this version, which may be unknown."""
    return version if version in LIBRARIES else PROTOCOL_VERSION
