#!/usr/bin/env -S python3 -IS
"""A gRPC health check for containers: exits with 0 if the server at a local port answers SERVING.

    usage: probe.py PORT [DIR]

With DIR, which has service.crt and service.key, it asks over TLS, and without TLS if the server has
none. It checks no certificate of the server, which is at this host.

`quire health` does the same, but importing gRPC takes 0.3 s of CPU, too much for a check that runs
every few seconds. This script sends one grpc.health.v1.Health/Check as HTTP/2 frames (RFC 9113). It
imports only sockets, and none of the environment's packages (-IS).
"""

import sys

# `socket` imports enum and selectors, which would double the time of this script.
from _socket import AF_INET, SOCK_STREAM, socket

TYPE_CHECKING = False  # like `typing`'s, which would take as long to import
if TYPE_CHECKING:
    import ssl

_LIMIT_S = 4.0
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_STREAM = 1

SERVING = b"\0\0\0\0\2\x08\x01"
"""The expected gRPC message: not compressed, 2 bytes long, field 1 (`status`) is 1 (SERVING)."""


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def _text(text: bytes) -> bytes:
    return bytes((len(text),)) + text


# HPACK static table (RFC 7541): 3 is `:method: POST`, 6 `:scheme: http`,
# 4 `:path`, 1 `:authority`, 31 `content-type`.
_REQUEST_HEADERS = (
    b"\x83\x86"
    + (b"\x04" + _text(b"/grpc.health.v1.Health/Check"))
    + (b"\x01" + _text(b"localhost"))
    + (b"\x0f\x10" + _text(b"application/grpc"))
    + (b"\x00" + _text(b"te") + _text(b"trailers"))
)
_EMPTY_MESSAGE = bytes(5)
_REQUEST = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_SETTINGS, 0, 0)
    + _frame(_HEADERS, _END_HEADERS, _STREAM, _REQUEST_HEADERS)
    + _frame(_DATA, _END_STREAM, _STREAM, _EMPTY_MESSAGE)
)


def connect(port: int) -> socket:
    """A connection to 127.0.0.1:`port`. OSError: there is no server."""
    connection = socket(AF_INET, SOCK_STREAM)
    connection.settimeout(_LIMIT_S)
    connection.connect(("127.0.0.1", port))
    return connection


def connect_with_tls(port: int, directory: str) -> "ssl.SSLSocket":
    """`connect`, with TLS. OSError: also if the server has no TLS."""
    import ssl
    from socket import create_connection

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(f"{directory}/service.crt", f"{directory}/service.key")
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(create_connection(("127.0.0.1", port), _LIMIT_S))


def answer(connection: "socket | ssl.SSLSocket") -> bytes:
    """The gRPC message that the server sends; empty if it refuses the call. OSError: it hung up."""
    connection.sendall(_REQUEST)
    message = b""
    while True:
        head = _read(connection, 9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        payload = _read(connection, int.from_bytes(head[:3], "big"))
        if kind == _DATA and stream == _STREAM:
            message += payload
        ends_call = kind in (_DATA, _HEADERS) and flags & _END_STREAM
        if kind == _GOAWAY or (stream == _STREAM and (kind == _RST_STREAM or ends_call)):
            return message


def _read(connection: "socket | ssl.SSLSocket", num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if not (piece := connection.recv(num_bytes - len(data))):
            raise OSError("the connection was closed")
        data += piece
    return data


def _asked(port: int, directory: str = "") -> bytes:
    if directory:
        try:
            return answer(connect_with_tls(port, directory))
        except OSError:  # no TLS at this port, or no server
            pass
    return answer(connect(port))


def main() -> int:
    port, *directory = int(sys.argv[1]), *sys.argv[2:]
    try:
        is_serving = _asked(port, *directory) == SERVING
    except OSError as error:
        print(f"no answer at port {port}: {error}")
        return 1
    print("ready" if is_serving else "not ready")
    return 0 if is_serving else 1


if __name__ == "__main__":
    sys.exit(main())
