#!/usr/bin/env -S python3 -IS
"""A health check for containers: exits with 0 if `/health` of a local port answers 200.

    usage: probe.py PORT

PORT is a service's port for metrics, or the HTTP port of a gateway without TLS. The script imports
only sockets, and none of the environment's packages (-IS): a check runs every few seconds.
"""

import sys

# `socket` imports enum and selectors, which would double the time of this script.
from _socket import AF_INET, SOCK_STREAM, socket

_LIMIT_S = 4.0
_REQUEST = b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"


def main() -> int:
    connection = socket(AF_INET, SOCK_STREAM)
    connection.settimeout(_LIMIT_S)
    try:
        connection.connect(("127.0.0.1", int(sys.argv[1])))
        connection.sendall(_REQUEST)
        line = connection.recv(64).partition(b"\r\n")[0]
    except OSError as error:
        print(f"no answer at port {sys.argv[1]}: {error}")
        return 1
    is_well = line.split(b" ")[1:2] == [b"200"]
    print("ready" if is_well else "not ready")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
