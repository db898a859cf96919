#!/usr/bin/env bash
# Checks a GPU: kernels, arena, sharing, speed, steps of a model, a deployment. Under 10 minutes.
#
#   bench/gpu_check.sh               one line for each check; results in gpu_check.json, of $OUT if that is set
#   bench/gpu_check.sh --dry-run     the same checks, tiny, in Triton's interpreter on the CPU
#   bench/gpu_check.sh --only loads  one group of them, with all the time
#   bench/gpu_check.sh --json FILE   another file for the results
#
# Needs Python with PyTorch, NumPy and Triton (PYTHON: which Python; default python3), installs
# nothing, and compiles no C++. The checks of shared memory need cuda-bindings and nvidia-ml-py too:
# where the machine has no package index, bring them along for its version of Python, in build/gpu-check:
#
#   pip install --target build/gpu-check cuda-bindings nvidia-ml-py
# Exit status: 0 all passed, 1 a check failed, 2 nothing can run here.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="kernels:.:build/gpu-check${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Quire needs Python 3.11 or later, $python is $("$python" -V): name another in PYTHON" >&2
  exit 2
}
exec "$python" -m bench.gpu "$@"
