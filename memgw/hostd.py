"""`python -m memgw.hostd`: becomes the warm host, qmd in one Node process for all workspaces (`qmd/host.js`)."""

import os
import sys
from shutil import which

from memgw import files, proc
from memgw.app import create_cli
from memgw.config import ROOT, load_or_exit
from memgw.errors import ToolMissing

HEAP_MEGABYTES = 512


def main() -> int:
    """Does not return, unless it can't start."""
    config = load_or_exit(os.environ)
    if config.qmd.suffix != ".js":
        sys.exit("memgw: MEMGW_QMD: the warm host needs qmd's own qmd.js")
    folder = config.host_socket.parent
    files.make_folder(folder)
    if not which(config.launcher[0]):
        sys.exit("memgw: MEMGW_NODE: the warm host needs Node, which was not found")
    node = [config.launcher[0], f"--max-old-space-size={HEAP_MEGABYTES}", str(ROOT / "qmd" / "host.js")]
    try:
        proc.become([*node, str(config.host_socket)], cwd=folder, env=create_cli(config, os.environ).host_env())
    except ToolMissing as exc:
        sys.exit(f"memgw: {exc}")


if __name__ == "__main__":
    sys.exit(main())
