#!/usr/bin/env bash
# A Docker engine for one run of tests, on a Debian where none runs; needs root.
#
# usage: engine.sh DIR BRIDGE     prints `ready` when the engine answers at DIR/docker.sock, or one
#                                 line that says why there is none, and fails. BRIDGE: the name of
#                                 the link of the network that containers will have; another network
#                                 may have BRIDGEh
#
# The engine serves until standard input closes, however the parent ended. Then everything goes: the
# engine and all containers live in PID and mount namespaces that end with the first process in
# them; the network's link, the control groups and DIR are removed. Of Debian's packages, docker.io,
# iptables and debootstrap are installed where they are missing.
set -euo pipefail
dir="$1" name="$2"
export DOCKER_HOST="unix://$dir/docker.sock" DOCKER_CONFIG="$dir/client"

fail() {
  echo "$*"
  exit 1
}

clean() {
  set +e
  trap '' INT TERM HUP
  if [ -n "${engine:-}" ]; then
    kill -TERM "$engine" 2>/dev/null # ends containers first; the mounts of volumes with them
    for _ in $(seq 100); do [ -d "/proc/$engine" ] || break; sleep 0.1; done
    kill -KILL "$unshared" 2>/dev/null
    wait "$unshared" 2>/dev/null
    find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} \;
  fi 2>/dev/null
  iptables -D FORWARD -i "$name+" -o "$name+" -j ACCEPT 2>/dev/null
  for link in "$name" "${name}h" "${name}d"; do ip link delete "$link" 2>/dev/null; done
  rm -rf "$dir"
}

install_missing() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v iptables >/dev/null || missing+=(iptables)
  command -v ip >/dev/null || missing+=(iproute2)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  [ ${#missing[@]} -gt 0 ] || return 0
  # Under systemd the package's own engine would start, and stay.
  [ ! -d /run/systemd/system ] || fail "install first: ${missing[*]}"
  apt-get update -qq >"$dir/apt.log" 2>&1 \
    && apt-get install -qq --no-install-recommends --yes "${missing[@]}" >>"$dir/apt.log" 2>&1 \
    || fail "cannot install ${missing[*]}: $(tail -1 "$dir/apt.log")"
}

# Compose 2 and buildx, from the release after Debian 12: static programs, put below DIR.
get_plugins() {
  if docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; then
    return 0
  fi
  local mirror apt="$dir/apt"
  mirror="$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^#' \
    | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 || true)"
  mirror="${mirror:-http://deb.debian.org/debian}"
  mkdir -p "$apt"/{lists/partial,cache/archives/partial,root} "$dir/client/cli-plugins"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" \
    >"$apt/sources.list"
  local options=(-qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$apt/sources.list"
    -o Dir::Etc::sourceparts=- -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache")
  (
    cd "$apt/root"
    apt-get "${options[@]}" update && apt-get "${options[@]}" download docker-compose docker-buildx
    for package in ./*.deb; do dpkg-deb -x "$package" .; done
    find . -path '*cli-plugins*' -type f -exec mv {} "$dir/client/cli-plugins" \;
  ) >"$dir/apt.log" 2>&1 || fail "no Compose 2 from Debian: $(tail -1 "$dir/apt.log")"
  rm -rf "$apt"
}

trap clean EXIT
trap 'exit 1' INT TERM HUP
mkdir -p "$dir/client"
[ "$(id -u)" -eq 0 ] || fail "an engine needs root"
[ -e /etc/debian_version ] || fail "an engine is started on Debian only"
install_missing
get_plugins

# Nothing of the host's network is changed but for bridges, and one rule that lets containers
# reach each other: builds use the host's own network, and containers need no other. No container is
# on the default bridge; without one of its own, dockerd would delete another engine's docker0.
ip link add "${name}d" type bridge && ip address add 192.0.2.1/28 dev "${name}d" \
  || fail "cannot add a bridge: a container without NET_ADMIN?"
iptables -I FORWARD -i "$name+" -o "$name+" -j ACCEPT 2>/dev/null || true
unshare --mount --pid --fork --mount-proc --kill-child=KILL \
  dockerd --host "$DOCKER_HOST" --data-root "$dir/data" --exec-root "$dir/exec" \
  --pidfile "$dir/engine.pid" --bridge "${name}d" --iptables=false --ip6tables=false \
  --ip-forward=false --cgroup-parent "/$name" >"$dir/engine.log" 2>&1 </dev/null &
unshared=$! engine=$!
for _ in $(seq 150); do
  docker info >/dev/null 2>&1 && break
  [ -d "/proc/$unshared" ] || break
  sleep 0.2
done
docker info >/dev/null 2>&1 || fail "dockerd does not start: $(tail -1 "$dir/engine.log")"
engine="$(cat "/proc/$unshared/task/$unshared/children" | tr -d ' ')"
echo ready
cat >/dev/null
