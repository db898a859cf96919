#!/usr/bin/env bash
# All that only a GPU can tell, in under 10 minutes: the kernels' tests on it, a model's tokens
# against the CPU's, and how fast attention reads. The exit status tells.
#
#   bench/gpu_check.sh                     PYTHON: what makes the environment (python3)
#
# Makes .venvs/gpu, which sees what PYTHON has. What is missing comes by pip; where pip reaches no
# index, the check goes on with what is there and names what it could not do.
set -uo pipefail
cd "$(dirname "$0")/.."

venv=.venvs/gpu
python="$venv/bin/python"
summary=()
status=0

note() { summary+=("$(printf '%-8s %5ss  %s' "$2" "$3" "$1")"); }

step() { # name, seconds that it may take, command
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $name"
  if timeout "$limit" "$@"; then
    note "$name" ok $((SECONDS - began))
  else
    note "$name" FAILED $((SECONDS - began))
    status=1
  fi
}

finish() {
  echo "== summary"
  printf '%s\n' "${summary[@]}"
  exit $status
}

install() {
  local base=${PYTHON:-python3}
  "$base" -m venv "$venv"
  # Not --system-site-packages: the base may be a virtual environment itself.
  "$base" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
    >"$("$python" -c 'import site; print(site.getsitepackages()[0])')/base.pth"
  # PyTorch's default build for Linux is the one for CUDA. flash-attn is never installed: where
  # there is no wheel for this PyTorch, compiling it takes an hour.
  "$venv/bin/pip" install --quiet --retries 1 --timeout 15 --editable '.[worker]' \
    triton==3.7.1 pytest ||
    "$venv/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
}

suite() { # pytest as it is everywhere, without the plugins and fixtures that services need
  QUIRE_KERNEL_DEVICE=cuda "$python" -m pytest -c /dev/null --rootdir=. --confcutdir=tests/kernels \
    --import-mode=importlib --quiet -p no:cacheprovider "$@"
}
export -f install suite
export venv python

command -v nvidia-smi >/dev/null || { echo "no GPU here: there is no nvidia-smi" >&2; exit 1; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step "set-up" 200 bash -c install
step "PyTorch and Triton see a GPU" 30 "$python" -c '
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name())'
[ $status -eq 0 ] || finish

step "Triton's kernels" 180 bash -c 'suite tests/kernels/triton_suite.py'
step "tokens, Triton" 40 "$python" -m bench.gpu_check tokens
step "bandwidth, Triton" 30 "$python" -m bench.gpu_check bandwidth
if "$python" -c "import flash_attn" 2>/dev/null; then
  step "flash-attn's calls" 40 bash -c 'suite tests/kernels/test_flash.py'
  step "logits, flash-attn" 40 "$python" -m bench.gpu_check tokens --backend flash
  step "bandwidth, flash-attn" 30 "$python" -m bench.gpu_check bandwidth --backend flash
else
  note "flash-attn: not installed" "not run" 0
fi
finish
