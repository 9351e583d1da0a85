#!/usr/bin/env bash
# The eight acceptance steps, a line each; exit 1 at the first failure.
set -euo pipefail
cd "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
exec "${MEMGW_PYTHON:-.venv/bin/python}" bin/smoke.py
