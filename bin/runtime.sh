#!/usr/bin/env bash
# Prints what `make up` runs memgw in: as RUNTIME says, docker or local; with auto docker where there is Docker Compose
# and an engine that answers, else local.
set -euo pipefail
case ${RUNTIME:-auto} in
  docker | local) echo "$RUNTIME" ;;
  auto)
    if docker compose version && timeout 10 docker info; then runtime=docker; else runtime=local; fi >/dev/null 2>&1
    echo "$runtime"
    ;;
  *)
    echo "memgw: RUNTIME: must be auto, docker or local, not $RUNTIME" >&2
    exit 2
    ;;
esac
