"""`python -m memgw.mcp`: qmd's own MCP server (HTTP) over the index of the default branch.

It serves what the gateway indexed last and asks no remote: a convenience for tools that speak MCP, outside of memgw's
promise. It waits for the first index, and starts qmd again when the gateway has built a new one.
"""

import os
import signal
import sys
from collections.abc import Mapping
from threading import Event

from memgw import proc
from memgw.app import create_cli, create_gateway
from memgw.branch import Branch
from memgw.config import Config, load_or_exit

LOOK_EVERY_SECONDS = 1.0


def serve(config: Config, environ: Mapping[str, str], stopped: Event) -> int:
    """Runs until `stopped` is set or the parent is gone (0), or until qmd ends by itself (its status)."""
    gateway = create_gateway(config, environ)
    workspace = gateway.workspace(Branch.parse(config.default_branch))
    engine = create_cli(config, environ)
    child: proc.Process | None = None
    served: tuple[str, int] | None = None
    try:
        parent = os.getppid()
        while not stopped.is_set() and os.getppid() == parent:  # a killed supervisor leaves no server behind
            stamp = workspace.state().stamp
            if child and child.poll() is not None:
                return child.returncode
            if stamp and (stamp.identity.file, stamp.identity.inode) != served:
                if child:
                    _stop(child)
                child = engine.serve_mcp(workspace.place(stamp), config.mcp_host, config.mcp_port)
                served = (stamp.identity.file, stamp.identity.inode)
            stopped.wait(LOOK_EVERY_SECONDS)
        return 0
    finally:
        if child:
            _stop(child)


def _stop(child: proc.Process) -> None:
    child.terminate()
    if proc.wait(child, 5) is None:
        child.kill()
        child.wait()


def main() -> int:
    stopped = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    config = load_or_exit(os.environ)
    return serve(config, os.environ, stopped)


if __name__ == "__main__":
    sys.exit(main())
