#!/usr/bin/env bash
# Install into .venv if need be and describe the bundled picture, drafts on and off. Options go to `foreglance demo`.
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$VENV/bin/foreglance" demo "$@"
