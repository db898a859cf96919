"""What Quire's services may do at a server that they share with others: an ACL file for Redis or
Valkey, for a user `quire` and nobody else."""

import hashlib

USER = "quire"
KEYS = "{*}*"
"""Pools' keys begin with {pool}, the registry's with {quire}."""
CHANNELS = "{*}:room"

COMMANDS = {
    "the server": ("info", "time", "ping", "select", "client|id", "client|kill", "client|setinfo"),
    "the library": ("function|load", "function|list", "fcall", "fcall_ro"),
    "announcements of room": ("subscribe", "unsubscribe", "publish"),
    "strings": ("set", "mget", "del", "unlink", "exists"),
    "hashes": (
        *("hget", "hmget", "hgetall", "hkeys", "hlen", "hexists"),
        *("hset", "hsetnx", "hdel", "hincrby"),
    ),
    "lists": ("lindex", "llen", "lrange", "lpop", "rpop", "rpush"),
    "sets": ("sadd", "srem", "smembers", "sismember", "scard"),
    "sorted sets": (
        *("zadd", "zincrby", "zrem", "zpopmin", "zcard", "zscore", "zmscore"),
        *("zrange", "zrangebyscore", "zrevrange"),
    ),
}
"""Commands that Python sends, and those that the functions call: both count against the user."""


def acl_file(password: str) -> str:
    """The server reads it at its start (`--aclfile`); it holds a hash of the password."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{name}" for names in COMMANDS.values() for name in names)
    return (
        "user default off resetkeys resetchannels -@all\n"
        f"user {USER} on #{hashed} ~{KEYS} resetchannels &{CHANNELS} -@all {commands}\n"
    )
