#!/usr/bin/env bash
# What qmd's container begins with: the warm host, what is done outside of requests, and qmd's MCP server, under one
# supervisor. Another command in place of it may follow.
set -euo pipefail
cd "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
. bin/volumes.sh
export MEMGW_PYTHON=${MEMGW_PYTHON:-.venv/bin/python} TMPDIR=${TMPDIR:-/tmp}
if ((!$#)); then
  # Wrong settings stop the container at once, not each of its processes again and again.
  "$MEMGW_PYTHON" -c 'import os; from memgw.config import load_or_exit; load_or_exit(os.environ)'
  # The supervisor opens /dev/fd/1 anew, which a pipe allows its owner only; that of the container may be root's.
  exec > >(exec cat) 2>&1
  set -- "$MEMGW_PYTHON" -m supervisor.supervisord -c bin/qmd-supervisord.conf
fi
exec "$@"
