"""A client's address, which tells clients without keys apart and stands in the log of refusals.

A proxy on the gateway's own host (127.0.0.0/8, ::1) names the client in `X-Forwarded-For`. The
header counts for nothing if any other peer sends it. HTTP and gRPC have this one rule.
"""

import ipaddress
from collections.abc import Sequence

Address = tuple[str, int]
"""A host and a port, which is 0 if it is not known."""


def client_address(peer: Address, forwarded_for: Sequence[str]) -> Address:
    """Return the address of the client on a connection from `peer`, with these values of the header
    X-Forwarded-For.

    Behind a proxy on this host, it is the last address in the header that is not of this host,
    since each proxy adds the address of its own client at the end."""
    peer = _unmapped(peer[0]), peer[1]
    if is_loopback(peer[0]):
        named = [_without_port(each) for value in forwarded_for for each in value.split(",")]
        for host in reversed(named):
            if host and not is_loopback(host):
                return host, 0
    return peer


def is_loopback(host: str) -> bool:
    """Whether an address is of this host. A name is none, not even `localhost`."""
    try:
        return ipaddress.ip_address(_unmapped(host)).is_loopback
    except ValueError:
        return False


def _unmapped(host: str) -> str:
    """Return the IPv4 address in `::ffff:192.0.2.7`, as a socket for both families names a peer."""
    return host.removeprefix("::ffff:") if "." in host else host


def _without_port(text: str) -> str:
    """The address in `192.0.2.7`, `192.0.2.7:80`, `2001:db8::7`, `[2001:db8::7]:80`."""
    text = text.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    host, colon, port = text.partition(":")
    return host if colon and port.isdecimal() else text
