#!/bin/sh
# Makes .venv by the Python given, unless there is one that will do. usage: venv.sh PYTHON
set -eu
python="$1"

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if is_new_enough .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null; then
  exit 0
fi
if ! is_new_enough "$python"; then
  found="$("$python" --version 2>&1)" || found="not there"
  echo "Quire needs Python 3.11 or later; $python is $found." >&2
  echo "Name another one: make setup PYTHON=python3.11" >&2
  exit 1
fi
echo "Creating .venv ..."
"$python" -m venv --clear .venv || {
  rm -rf .venv
  exit 1
}
