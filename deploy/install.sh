#!/bin/sh
# pip install with PyTorch's CPU build where pip's indexes have one, else with the default build.
set -eu
cd "$(dirname "$0")/.."
pip="${PIP:-pip}"

if "$pip" download --quiet --no-deps --dest "$(mktemp -d)" \
  --requirement deploy/constraints-cpu.txt 2>/dev/null; then
  exec "$pip" install --quiet --constraint deploy/constraints-cpu.txt "$@"
fi
cat deploy/no-cpu-torch.txt
exec "$pip" install --quiet "$@"
