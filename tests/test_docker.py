"""RUNTIME=docker and auto: what Docker Compose is asked for. The `docker` here only notes what it is told."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from memgw.config import ROOT
from tests.actors import Server, Upstream
from tests.test_stack import Stack, stack  # noqa: F401  the fixture

BEGIN = ["compose", "--env-file", "/dev/null"]
REMOTE = {"GIT_REMOTE_URL": "https://git.example.com/memory.git"}
HANDED_ON = ("GIT_REMOTE_URL", "QMD_EMBED_MODEL_URI", "MEMGW_STOP_SECONDS", "MEMGW_BIND", "MEMGW_LOG_LEVEL")


class Docker:
    """Takes the place of `docker`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        note = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
        program = folder / "docker"
        program.write_text(
            f"#!/bin/sh\n'{sys.executable}' -c '{note}' \"$@\" >> '{folder}/calls'\n"
            f"for word; do [ ! -e '{folder}/fails-'$word ] || exit 1; done\n"
        )
        program.chmod(0o755)

    def fails(self, word: str) -> None:
        (self.folder / f"fails-{word}").touch()

    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        """Environment and arguments of each call for Compose, but for those that are always the same."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        noted = [json.loads(line) for line in lines]
        return [(words[3:], environ) for words, environ in noted if words[:3] == BEGIN]

    def asked(self) -> list[list[str]]:
        return [words for words, _ in self.calls()]


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path / "docker")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Enough of this one to run the scripts, with an .env of its own."""
    folder = tmp_path / "checkout"
    for name in ("bin", "memgw"):  # these look for .env above themselves, through links too
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data").mkdir()
    return folder


def run(
    docker: Docker, program: str, environ: Mapping[str, str], *, checkout: Path = ROOT, runtime: str = "docker"
) -> "subprocess.CompletedProcess[str]":
    """A program of bin/ with its words."""
    return subprocess.run(
        [sys.executable, *program.split()],
        cwd=checkout,
        env={**os.environ, **environ, "PATH": f"{docker.folder}:{os.environ['PATH']}", "RUNTIME": runtime},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_up_builds_and_starts_and_ends_with_an_answer(docker: Docker, server: Server, upstream: Upstream) -> None:
    upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Tuesdays.\n"})
    remote = "https://me:pa$$word@git.example.com/memory.git"
    environ = {**server.environ, "GIT_REMOTE_URL": remote, "QMD_TIMEOUT_SECONDS": "900"}
    done = run(docker, "bin/stack.py up", environ)
    assert done.returncode == 0, done.stderr
    assert str(upstream.tip("main")) in done.stdout
    [(words, handed_on)] = docker.calls()
    assert words == ["up", "--detach", "--build"]
    assert handed_on["GIT_REMOTE_URL"] == remote
    assert handed_on["MEMGW_STOP_SECONDS"] == "920"


def test_gpu_adds_the_override_and_that_of_the_operator_wins(docker: Docker, checkout: Path) -> None:
    environ = REMOTE | {"GPU": "1"}
    run(docker, "bin/stack.py logs", environ, checkout=checkout)
    (checkout / "compose.override.yaml").touch()
    run(docker, "bin/stack.py logs", environ, checkout=checkout)
    run(docker, "bin/stack.py logs", environ | {"GPU": "0"}, checkout=checkout)
    files = ["--file", "compose.yaml", "--file", "compose.gpu.yaml"]
    logs = ["logs", "--follow", "--tail", "40"]
    assert docker.asked() == [
        [*files, *logs],
        [*files, "--file", "compose.override.yaml", *logs],
        [*logs],  # Compose finds the override by itself
    ]


def test_down_takes_warmup_along(docker: Docker) -> None:
    assert run(docker, "bin/stack.py down", REMOTE).returncode == 0
    assert docker.asked() == [["--profile", "warmup", "down"]]


def test_paths_below_data_are_the_same_in_the_containers(docker: Docker, checkout: Path) -> None:
    model = checkout / "data" / "models" / "m.gguf"
    (checkout / ".env").write_text(
        f"GIT_REMOTE_URL=file://{checkout}/data/remote-memory.git\nQMD_EMBED_MODEL_URI={model}\nMEMGW_BIND=localhost:8080\n"
        "MEMGW_LOG_LEVEL=DEBUG\n"
    )
    assert run(docker, "bin/stack.py serve", {}, checkout=checkout).returncode == 0
    [(words, handed_on)] = docker.calls()
    assert words == ["up", "--build"]
    assert [handed_on[name] for name in HANDED_ON] == [
        "data/remote-memory.git",
        "data/models/m.gguf",
        "320",
        "127.0.0.1:8080",
        "DEBUG",
    ]


@pytest.mark.parametrize(
    "setting",
    [
        {"GIT_REMOTE_URL": "/srv/git/memory.git"},
        {"GIT_REMOTE_URL": "file:///srv/git/memory.git"},
        {"GIT_REMOTE_URL": "../memory.git"},
        {"QMD_EMBED_MODEL_URI": "/srv/m.gguf"},
    ],
)
def test_a_path_that_no_container_sees_is_told(docker: Docker, checkout: Path, setting: dict[str, str]) -> None:
    environ = REMOTE | setting
    told = run(docker, "bin/stack.py up", environ, checkout=checkout)
    assert told.returncode == 2
    [name] = setting
    assert told.stderr.startswith(f"memgw: {name}: /")
    assert "is in no container: mount it in compose.override.yaml" in told.stderr
    assert docker.calls() == []
    assert run(docker, "bin/stack.py down", environ, checkout=checkout).returncode == 0
    (checkout / "compose.override.yaml").touch()
    docker.fails("up")
    assert run(docker, "bin/stack.py up", environ, checkout=checkout).returncode == 1
    assert ["up", "--detach", "--build"] in docker.asked()


def test_auto_takes_docker_where_its_engine_answers(docker: Docker) -> None:
    done = run(docker, "bin/stack.py down", REMOTE, runtime="auto")
    assert (done.returncode, done.stdout) == (0, "memgw: runtime docker\n")
    assert docker.asked() == [["--profile", "warmup", "down"]]


@pytest.mark.parametrize("missing", ["info", "version"])
def test_auto_is_local_without_an_engine_or_without_compose(docker: Docker, missing: str, tmp_path: Path) -> None:
    docker.fails(missing)
    environ = REMOTE | {"MEMGW_DATA_DIR": str(tmp_path / "none")}
    done = run(docker, "bin/stack.py down", environ, runtime="auto")
    assert (done.returncode, done.stdout) == (0, "memgw: runtime local\nmemgw: was not running\n")
    assert docker.calls() == []


def test_auto_stays_local_while_the_local_stack_runs(docker: Docker, stack: Stack) -> None:  # noqa: F811
    assert stack.do("up").returncode == 0
    done = run(docker, "bin/stack.py down", stack.environ, runtime="auto")
    assert (done.returncode, done.stdout) == (0, "memgw: runtime local\nmemgw: stopped\n")
    assert docker.calls() == []


def test_another_runtime_is_refused(docker: Docker) -> None:
    done = run(docker, "bin/stack.py up", REMOTE, runtime="podman")
    refused = (2, "memgw: RUNTIME: must be auto, docker or local, not podman\n")
    assert (done.returncode, done.stderr) == refused
    environ = {**os.environ, "RUNTIME": "podman"}
    command = ["bash", "bin/install.sh", "--to-run"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == refused


def test_without_docker_that_is_told(docker: Docker) -> None:
    (docker.folder / "docker").unlink()
    (docker.folder / "bash").symlink_to(str(shutil.which("bash")))
    environ = {**os.environ, **REMOTE, "PATH": str(docker.folder), "RUNTIME": "docker"}
    command = [sys.executable, "bin/stack.py", "up"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "memgw: RUNTIME: there is no docker here\n")


def test_smoke_restarts_the_gateways_container(docker: Docker, server: Server, upstream: Upstream) -> None:
    upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Tuesdays.\n"})
    done = run(docker, "bin/smoke.py", server.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8" in done.stdout
    assert docker.asked() == [["restart", "gateway"]]


@pytest.mark.parametrize(("runtime", "installs"), [("docker", False), ("local", True)])
def test_containers_need_no_qmd_on_this_machine(
    runtime: str, installs: bool, docker: Docker, checkout: Path, tmp_path: Path
) -> None:
    """With everything installed but Node and qmd, and an npm that only notes that it was asked."""
    for name in ("requirements", "qmd"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("node_modules"), symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    (checkout / "qmd" / "node_modules").mkdir()
    subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
    digest = subprocess.check_output(["sha256sum", ROOT / "requirements" / "runtime.txt"], text=True).split()[0]
    (checkout / ".venv" / ".installed-runtime").write_text(digest)
    for name, does in (("npm", f"touch {tmp_path}/npm-was-asked"), ("node", "exit 0")):
        (docker.folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (docker.folder / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{docker.folder}:{os.environ['PATH']}", "RUNTIME": runtime}
    command = ["bash", "bin/install.sh", "--to-run"]
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "npm-was-asked").exists() == installs
