#!/bin/sh
# pip install with PyTorch's CPU build: from pip's own indexes where they have it, else from PyTorch's
# public index; with PyTorch's default build where neither has it, or cannot be reached.
set -eu
cd "$(dirname "$0")/.."
pip="${PIP:-pip}"
# On a terminal pip shows each package and how far its download is.
quiet=--quiet
if [ -t 1 ]; then quiet=--progress-bar=on; fi
index=https://download.pytorch.org/whl/cpu

# What PyTorch itself needs comes with the rest, from pip's own indexes.
cpu_torch() {
  "$pip" install "$quiet" --no-deps --requirement deploy/constraints-cpu.txt "$@"
}

echo "Installing PyTorch's CPU build (200 MB) ..."
if cpu_torch 2>/dev/null || cpu_torch --index-url "$index" --timeout 5 --retries 1; then
  echo "Installing all other packages (500 MB, a few minutes) ..."
  exec "$pip" install "$quiet" --constraint deploy/constraints-cpu.txt "$@"
fi
cat deploy/no-cpu-torch.txt
exec "$pip" install "$quiet" "$@"
