#!/usr/bin/env bash
# Install into .venv if need be, then lint and run every test; what is skipped is listed with the reason (the page's tests
# need Chromium, those of replicas need Ray: EXTRAS=test,ray). Options go to pytest.
EXTRA="[${EXTRAS:-test}]" source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
exec "$VENV/bin/python" -m pytest -n auto -rs "$@"
