#!/usr/bin/env bash
# Steady light questions, so that branches are at hand when agents ask; TERM ends it at once.
set -euo pipefail
cd "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
exec "${MEMGW_PYTHON:-.venv/bin/python}" bin/warmup.py
