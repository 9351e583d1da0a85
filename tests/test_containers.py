"""What the containers are made of and begin with. `make image-test` builds and runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from memgw.config import ROOT, Config
from tests.actors import Server, processes_with, until
from tests.test_stack import free_port

US = 65534
"""A user without rights of its own, for where these tests run as root, whom no permission stops."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that another user can get to; pytest's own are closed."""
    with TemporaryDirectory(prefix="memgw") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def begin(name: str, data: Path, *command: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """An entrypoint as US, with another command than its own."""
    drop = ["setpriv", f"--reuid={US}", f"--regid={US}", "--clear-groups"] if os.getuid() == 0 else []
    return subprocess.run(
        [*drop, "bash", f"bin/{name}-entrypoint.sh", *command],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "MEMGW_DATA_DIR": str(data), **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )


def made(path: Path, mode: int, owner: int = US) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        os.chown(path, owner, owner)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("name", ["gateway", "qmd"])
def test_a_folder_that_can_be_written_to_is_gone_on_with(name: str, folder: Path) -> None:
    data = made(folder / "data", 0o700)
    made(data / "state", 0o700)
    made(data / "lost+found", 0o000, owner=0)  # a file system's own
    made(data / "remote-memory.git", 0o555, owner=0)  # a remote may be anybody's
    done = begin(name, data, "echo", "two words", "$x")
    assert (done.returncode, done.stdout, done.stderr) == (0, "two words $x\n", "")


@pytest.mark.parametrize("name", ["gateway", "qmd"])
@pytest.mark.parametrize(("odd", "mode"), [("", 0o555), ("state", 0o555), ("qmd-cache", 0o000)])
def test_one_that_can_not_is_told_in_one_line_with_what_to_do(name: str, odd: str, mode: int, folder: Path) -> None:
    data = made(folder / "data", 0o700)
    made(data / odd, mode, owner=0)
    us, owner = (f"{US}:{US}", "0:0") if os.getuid() == 0 else (f"{os.getuid()}:{os.getgid()}",) * 2
    assert told(begin(name, data, "echo", "started")) == (
        f"memgw: {data / odd}: user {us} can't write there, it is {owner}'s: chown -R {us} what is mounted on {data},"
        " or set MEMGW_UID and MEMGW_GID in .env to its owner and build again"
    )


def test_one_that_is_not_there_is_told_too(folder: Path) -> None:
    assert f"memgw: {folder}/none: user " in told(begin("gateway", folder / "none", "echo", "started"))


def told(done: "subprocess.CompletedProcess[str]") -> str:
    """The only line of an entrypoint that did not go on."""
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line


def test_wrong_settings_stop_qmd_at_once(folder: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "MEMGW_DATA_DIR": str(folder), "MEMGW_PYTHON": sys.executable}
    wrong = {"GIT_REMOTE_URL": "ext::x", "MEMGW_WORKERS": "0"}
    command = ["bash", "bin/qmd-entrypoint.sh"]
    done = subprocess.run(command, cwd=ROOT, env=environ | wrong, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" GIT_REMOTE_URL", " MEMGW_WORKERS"]


def healthy(name: str, environ: dict[str, str]) -> bool:
    return subprocess.run([sys.executable, "bin/health.py", name], cwd=ROOT, env=environ).returncode == 0


def test_qmds_container_serves_the_gateway_and_mcp_and_ends_with_term(environ: dict[str, str], tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="memgw") as data:
        port = free_port()
        environ = {
            **environ,
            "MEMGW_DATA_DIR": data,
            "MEMGW_MCP_PORT": str(port),
            "MEMGW_PYTHON": sys.executable,
            "QMD_ENGINE": "host",
        }
        assert not healthy("qmd", environ)
        log = tmp_path / "log"
        with log.open("wb") as file:
            qmd = subprocess.Popen(["bash", "bin/qmd-entrypoint.sh"], cwd=ROOT, env=environ, stdout=file, stderr=file)
        try:
            assert until(lambda: healthy("qmd", environ), 30), log.read_text()
            server = Server(environ, tmp_path, measured=False)
            try:
                assert healthy("gateway", server.environ)
                assert server.post("/query", {"query": "x"})[1]["code"] == "branch_not_found"
                commit(environ, "# A\n\nTuesdays.\n")
                assert len(server.query("tuesdays")["results"]) == 1
            finally:
                server.stop()
            assert not healthy("gateway", server.environ)
            assert until(lambda: found_by_mcp(port), 30), log.read_text()
        finally:
            qmd.send_signal(signal.SIGTERM)
            assert qmd.wait(30) == 0
        assert until(lambda: not processes_with(data)), "processes are left"
    assert "Traceback" not in log.read_text()


def commit(environ: dict[str, str], text: str) -> None:
    git = ["git", f"--git-dir={environ['GIT_REMOTE_URL'].removeprefix('file://')}", "fast-import", "--quiet"]
    stream = (
        f"commit refs/heads/main\ncommitter t <t@example.com> 1 +0000\ndata 1\nmM 644 inline a.md\ndata {len(text)}\n"
    )
    subprocess.run(git, input=f"{stream}{text}".encode(), check=True)


def found_by_mcp(port: int) -> Any:
    question = json.dumps({"searches": [{"type": "lex", "query": "tuesdays"}], "rerank": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/query", question, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)["results"]
    except OSError:
        return []


def recipe() -> str:
    return (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")


def test_all_that_is_installed_is_locked() -> None:
    installs = re.findall(r"(?:pip |npm )[^&;]*?(?:install|ci)\b[^&;\n]*", recipe())
    assert len(installs) == 4
    for line in installs:
        if line.startswith("npm"):
            assert line.startswith("npm ci ")
        else:
            assert "--require-hashes --only-binary :all:" in line
            [name] = re.findall(r"requirements/\w+\.txt", line)
            pins = [pin for pin in (ROOT / name).read_text("utf-8").splitlines() if re.match(r"\w", pin)]
            assert pins
            assert all(re.fullmatch(r"[\w.-]+==[\w.]+ \\", pin) for pin in pins)


def test_the_images_run_as_no_root_and_have_no_tool_to_build_with() -> None:
    text = recipe()
    before, *stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    assert "ARG BASE=debian:bookworm-slim" in before
    named = {re.search(r"AS (\w+)", stage)[1]: stage for stage in stages}  # type: ignore[index]
    assert list(named) == ["base", "build", "runtime", "qmd", "gateway"]
    assert re.search(r"^USER \$\{UID\}:\$\{GID\}$", named["runtime"], re.MULTILINE)
    for target in ("qmd", "gateway"):
        assert named[target].startswith("runtime AS")
        assert "USER" not in named[target]
        [entrypoint] = re.findall(r'^ENTRYPOINT \["/opt/memgw/(\S+)"\]$', named[target], re.MULTILINE)
        assert os.access(ROOT / entrypoint, os.X_OK)
    assert not re.search(r"pip|npm|build-essential|gcc|make\b", named["base"] + named["qmd"] + named["gateway"])
    assert re.findall(r"ARG (UID|GID)=(\d+)", named["runtime"]) == [("UID", "10001"), ("GID", "10001")]


def test_what_is_copied_reaches_the_builder_and_secrets_do_not() -> None:
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert "*" in rules
    sources = [
        source for line in re.findall(r"^COPY (?!--from)(.*)$", recipe(), re.MULTILINE) for source in line.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(Path(source).match(rule) for rule in allowed), source
    assert not [rule for rule in allowed if rule.startswith((".env", "data", ".git", ".cache"))]


def test_what_the_image_test_lacks_is_told(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "bin/image_test.py"], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "image-test: there is no buildah: apt install buildah debootstrap git\n"


@pytest.mark.parametrize("gpu", [[], ["cuda"]])
def test_the_lock_of_an_image_has_the_builds_that_it_uses(gpu: list[str], tmp_path: Path) -> None:
    text = (ROOT / "qmd" / "package-lock.json").read_text("utf-8")
    (tmp_path / "package-lock.json").write_text(text)
    node = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher[0]
    subprocess.run([node, ROOT / "qmd" / "lean.mjs", *gpu], cwd=tmp_path, check=True)
    machine = subprocess.check_output([node, "-p", "`linux-${process.arch}`"], text=True).strip()
    kept = {f"@node-llama-cpp/{name}" for name in (machine, *(f"{machine}-{kind}" for kind in gpu))}

    whole, lean = json.loads(text)["packages"], json.loads((tmp_path / "package-lock.json").read_text())["packages"]
    assert {name for name in whole if "@node-llama-cpp/" in name} > {f"node_modules/{name}" for name in kept}
    assert set(lean) == {name for name in whole if "@node-llama-cpp/" not in name} | {
        f"node_modules/{name}" for name in kept
    }
    for name, entry in lean.items():
        if name == "node_modules/node-llama-cpp":
            asked = entry["optionalDependencies"]
            assert {optional for optional in asked if optional.startswith("@node-llama-cpp/")} == kept
            entry["optionalDependencies"] = whole[name]["optionalDependencies"]
        assert entry == whole[name]  # as locked as before
