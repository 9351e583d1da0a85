"""Becoming the warm host; tests/test_host.py has what it does then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memgw.config import ROOT


def start(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "GIT_REMOTE_URL": "/nowhere", "MEMGW_DATA_DIR": str(tmp_path / "data"), **more}
    command = [sys.executable, "-m", "memgw.hostd"]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("MEMGW_THREADS", "many", "memgw: MEMGW_THREADS: must be a whole number"),
        ("MEMGW_QMD", "/usr/bin/true", "memgw: MEMGW_QMD: the warm host needs qmd's own qmd.js"),
        ("MEMGW_NODE", "/nowhere/node", "memgw: MEMGW_NODE: the warm host needs Node, which was not found"),
    ],
)
def test_what_it_can_not_start_with_is_one_clear_line(tmp_path: Path, setting: str, value: str, line: str) -> None:
    done = start(tmp_path, **{setting: value})
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
