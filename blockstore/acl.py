"""Writes an ACL file for Redis or Valkey. It allows the user `quire` exactly what Quire's services
need, and no other user anything."""

import hashlib

USER = "quire"
KEYS = "{*}*"
"""A pool's keys begin with {pool}, the registry's with {quire}."""
CHANNELS = "{*}:room"

COMMANDS = {
    "the server": ("info", "time", "ping", "select", "client|id", "client|kill", "client|setinfo"),
    "nodes of a cluster": ("cluster|myid", "cluster|slots"),
    "the library": ("function|load", "function|list", "fcall", "fcall_ro"),
    "announcements of room": ("ssubscribe", "sunsubscribe", "spublish"),
    "strings and keys": ("set", "mget", "del", "unlink", "exists", "expire"),
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
"""The commands that Python sends and those that the functions call; the server checks both against
the user's permissions."""


def acl_file(password: str) -> str:
    """Return the text of the file, which the server reads at its start (`--aclfile`). It contains
    a hash of the password, not the password."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{name}" for names in COMMANDS.values() for name in names)
    return (
        "user default off resetkeys resetchannels -@all\n"
        f"user {USER} on #{hashed} ~{KEYS} resetchannels &{CHANNELS} -@all {commands}\n"
    )
