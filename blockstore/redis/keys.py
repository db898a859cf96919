"""Names of the keys that Python code uses. functions/10_keys.lua lists the keys of the functions;
all keys of a pool begin with its `pool_tag`."""

REGISTRY = "{quire}"
"""The hash tag of the registry's keys, KEYS[1] of its function."""
MEMBERS = "{quire}:members"
ADAPTERS = "{quire}:adapters"
POOLS = "{quire}:pools"
"""SET: ids of all pools."""


def member(member_id: str) -> str:
    return f"{{quire}}:member:{member_id}"


def usage(minute: int) -> str:
    return f"{{quire}}:usage:{minute}"


def pool_tag(pool_id: str) -> str:
    """KEYS[1] of every function; as a hash tag, it puts all of a pool's keys on one cluster
    node."""
    return f"{{{pool_id}}}"


def pool_header(pool_id: str) -> str:
    """The key of the pool's header, which exists as long as the pool does."""
    return f"{pool_tag(pool_id)}:pool"


def refs(pool_id: str) -> str:
    return f"{pool_tag(pool_id)}:refs"


def hashes(pool_id: str) -> str:
    return f"{pool_tag(pool_id)}:hashes"


def cached(pool_id: str) -> str:
    return f"{pool_tag(pool_id)}:cached"


def kept(pool_id: str) -> str:
    return f"{pool_tag(pool_id)}:kept"


def held(pool_id: str, holder_id: str) -> str:
    return f"{pool_tag(pool_id)}:held:{holder_id}"


def room_channel(pool_id: str) -> str:
    """The channel on which a pool's functions announce freed blocks and ended waits."""
    return f"{pool_tag(pool_id)}:room"
