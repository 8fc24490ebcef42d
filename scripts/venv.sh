# Sourced by demo.sh and test.sh: make a virtual environment once and install this checkout into it.
# VENV may name another folder; EXTRA is the list of optional dependencies.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
if [ ! -x "$VENV/bin/python" ]; then
    echo "installing into $VENV; this takes a few minutes, once" >&2
    "${PYTHON:-python3}" -m venv "$VENV"
fi
"$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "foreglance needs Python 3.11 or newer; set PYTHON to one and remove $VENV" >&2
    exit 1
}
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".${EXTRA:-}"
