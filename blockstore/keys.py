"""Names of the keys that Python touches; those of the functions stand at the head of
functions/*.lua, and all derive from `pool_tag`."""

MEMBERS = "{quire}:members"
ARRIVALS = "{quire}:arrivals"
POOLS = "{quire}:pools"
"""SET: ids of all pools."""


def member(member_id: str) -> str:
    return f"{{quire}}:member:{member_id}"


def pool_tag(pool_id: str) -> str:
    """KEYS[1] of every function: what places all of a pool's keys on one node of a cluster."""
    return f"{{{pool_id}}}"


def pool_header(pool_id: str) -> str:
    """Is there as long as the pool is."""
    return f"{pool_tag(pool_id)}:pool"


def room_channel(pool_id: str) -> str:
    """Where a pool's functions announce freed blocks."""
    return f"{pool_tag(pool_id)}:room"
