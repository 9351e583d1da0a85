"""`python bin/health.py gateway|qmd`: exit 0 when that container does its work; for compose.yaml's health checks.

qmd is healthy when its warm host answers. Its MCP server may be away: it waits for the default branch's first index.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stack

from memgw.config import load_or_exit
from memgw.deadline import Deadline
from memgw.errors import MemgwError
from memgw.host import Host

SECONDS = 5.0


def main(arguments: list[str]) -> int:
    if arguments not in (["gateway"], ["qmd"]):
        print(__doc__, file=sys.stderr)
        return 2
    config = load_or_exit(os.environ)
    if arguments == ["gateway"]:
        return 0 if stack.health(config) else 1
    try:
        Host(config.host_socket).call({"op": "status"}, Deadline(SECONDS))
    except MemgwError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
