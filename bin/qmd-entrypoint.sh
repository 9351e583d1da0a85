#!/usr/bin/env bash
# qmd's MCP server over the default branch's index, started again whenever that index is replaced.
set -euo pipefail
cd "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
exec "${MEMGW_PYTHON:-.venv/bin/python}" -m memgw.mcp
