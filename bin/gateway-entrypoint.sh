#!/usr/bin/env bash
# What the gateway's container begins with; another command in place of gunicorn may follow.
set -euo pipefail
cd "$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
. bin/volumes.sh
(($#)) || set -- "${MEMGW_PYTHON:-.venv/bin/python}" -m gunicorn -c python:memgw.gunicorn_conf memgw.wsgi:app
exec "$@"
