#!/bin/sh
# Makes the virtual environment, and says what to install where Python or its venv module is missing.
set -eu
python=$1
venv=$2
if ! command -v "$python" >/dev/null 2>&1; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -q >/dev/null && apt-get install -y -q python3 python3-venv >/dev/null
  else
    echo "Servoscope needs Python 3.11 or newer. Install it:  sudo apt-get install python3 python3-venv" >&2
    exit 1
  fi
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "Servoscope needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1)." >&2
  echo "Name another:  make up PYTHON=python3.12" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -q >/dev/null && apt-get install -y -q python3-venv >/dev/null
  else
    echo "Python's venv module is missing. Install it:  sudo apt-get install python3-venv" >&2
    exit 1
  fi
fi
"$python" -m venv "$venv"
