"""`make image-test`: builds both targets of the Dockerfile without a Docker engine, runs them, and asks them questions.

Needs root, Debian's buildah and debootstrap. Package registries are reached as this machine reaches them.
IMAGE_TEST_DIR=… keeps base and layers there for the next time; MIRROR=… names another Debian mirror; GPU=1 builds qmd
with what a GPU needs.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stack
from images import UID, Builder, Confined, Failed, Running, settings_of_this_machine

MODEL = stack.ROOT / ".cache" / "minilm-l6-v2-q8_0.gguf"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, body: object = None) -> Any:
    """The JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def answers(port: int, path: str, body: object = None) -> Any:
    try:
        return ask(port, path, body)
    except OSError:
        return None


def make_remote(path: Path) -> str:
    """A bare repository of one document; its commit."""
    document = "# Deploy\n\nThe deploy window is on Tuesdays.\n"
    stream = (
        "commit refs/heads/main\ncommitter t <t@example.com> now\ndata 1\nm\n"
        f"M 644 inline deploy.md\ndata {len(document)}\n{document}\ndone\n"
    )
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", str(path)], check=True)
    git = ["git", f"--git-dir={path}"]
    subprocess.run([*git, "fast-import", "--quiet", "--date-format=now"], input=stream.encode(), check=True)
    return subprocess.check_output([*git, "rev-parse", "main"], text=True).strip()


C = TypeVar("C", bound=Running)


class Test:
    """What is asked of the two images. Each step returns what it saw, in a few words."""

    def __init__(self, builder: Builder, gateway: str, qmd: str, folder: Path) -> None:
        self._builder, self._gateway, self._qmd = builder, gateway, qmd
        self._folder = folder
        self._commit = make_remote(folder / "remote.git")
        shutil.copyfile(MODEL, folder / "model.gguf")
        self._port, self._mcp_port = free_port(), free_port()

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("gateway alone", self.alone),
            ("gateway and qmd", self.together),
            ("as compose.yaml confines them", self.confined),
            ("a volume of another user's", self.unwritable),
        ]

    def alone(self) -> str:
        begun = monotonic()
        with self._running(Running, self._gateway, "alone") as gateway:
            path = self._answered(gateway)
            seconds = monotonic() - begun
            check(ask(self._port, "/health")["ok"], "no health")
            check(gateway.users() == {UID}, f"runs as {gateway.users()}")
            ended = gateway.stop()
        return f"/health, and {path} by the command line, after {seconds:.1f} s; ended in {ended:.1f} s"

    def together(self) -> str:
        model = {"QMD_EMBED_MODEL_URI": "/models/model.gguf"}
        with (
            self._running(Running, self._qmd, "together", model) as qmd,
            self._running(Running, self._gateway, "together", {"QMD_ENGINE": "host", **model}) as gateway,
        ):
            self._answered(gateway)
            question = {"query": "when do we ship?", "query_type": "vsearch", "strict": True}
            found = stack.until(lambda: (answers(self._port, "/query", question) or {}).get("results"), 60)
            check(found, f"nothing is found by meaning: {qmd.said()[-3000:]}")
            check(gateway.users() | qmd.users() == {UID}, f"run as {gateway.users()}, {qmd.users()}")
            here = sorted(path.name for path in (self._folder / "together-cache").iterdir())
            check("ws-main" in here, f"/var/lib/qmd/cache has {here}")
            ended = gateway.stop(), qmd.stop()
        return f"answered by the host, by meaning too; ended in {ended[0]:.1f} and {ended[1]:.1f} s"

    def confined(self) -> str:
        with (
            self._running(Confined, self._qmd, "confined") as qmd,
            self._running(Confined, self._gateway, "confined", {"QMD_ENGINE": "host"}) as gateway,
        ):
            self._answered(gateway)
            question = {"searches": [{"type": "lex", "query": "tuesdays"}], "rerank": False}
            found = stack.until(lambda: (answers(self._mcp_port, "/query", question) or {}).get("results"), 30)
            check(found, "qmd's MCP server does not answer")
            for name, container in (("gateway", gateway), ("qmd", qmd)):
                health = container.do("python", "bin/health.py", name)
                check(health.returncode == 0, f"{name} is not healthy: {health.stderr}")
                check(container.do("touch", "/opt/memgw/x").returncode != 0, f"{name} can be written to")
                tools = container.do("sh", "-c", "for tool in cc gcc make pip npm; do command -v $tool; done")
                check(not tools.stdout, f"{name} has {tools.stdout}")
            with self._running(Confined, self._gateway, "warmup", {}, "/opt/memgw/bin/warmup.sh") as warmup:
                check(stack.until(lambda: '"status": 200' in warmup.said(), 30), f"warmup says {warmup.said()}")
                ended = [warmup.stop(), gateway.stop(), qmd.stop()]
        times = ", ".join(f"{seconds:.1f}" for seconds in ended)
        return f"answered by the host, MCP answers, healthy, warmed up; ended in {times} s"

    def unwritable(self) -> str:
        lines = []
        for image in (self._gateway, self._qmd):
            with self._running(Running, image, "unwritable", owner=0) as container:
                status = container.process.wait(60)
                told = [line for line in container.said().splitlines() if line.startswith("memgw: ")]
                check(status != 0 and len(told) == 1, f"it said: {container.said()}")
                lines.append(told[0])
        return f"both stop with: {lines[0]}"

    @contextmanager
    def _running(
        self,
        kind: type[C],
        image: str,
        name: str,
        environ: dict[str, str] | None = None,
        *command: str,
        owner: int = UID,
    ) -> Iterator[C]:
        """A container whose volumes are called `name`, for as long as this lasts."""
        volumes = {
            self._folder / "remote.git": "/srv/memory.git:ro",
            self._folder / "model.gguf": "/models/model.gguf:ro",
        }
        for suffix, place in (("", "/data"), ("-cache", "/var/lib/qmd/cache"), ("-config", "/var/lib/qmd/config")):
            path = self._folder / (name + suffix)
            path.mkdir(exist_ok=True)
            os.chown(path, owner, owner)
            volumes[path] = place
        variables = {
            "GIT_REMOTE_URL": "/srv/memory.git",
            "MEMGW_BIND": f"127.0.0.1:{self._port}",
            "MEMGW_MCP_HOST": "127.0.0.1",
            "MEMGW_MCP_PORT": str(self._mcp_port),
        }
        log = self._folder / f"{name}-{image.rpartition('/')[2]}.log"
        container = kind(self._builder, image, volumes, variables | (environ or {}), log, *command)
        try:
            yield container
        finally:
            container.remove()

    def _answered(self, gateway: Running) -> str:
        """The path of the first result, once it answers as it has to."""
        answer: dict[str, Any] = {}

        def asked() -> bool:
            answer.update(answers(self._port, "/query", {"query": "tuesdays"}) or {})
            return bool(answer) or gateway.process.poll() is not None

        check(stack.until(asked, 60) and bool(answer), f"/query is not answered: {gateway.said()[-3000:]}")
        check(answer["commit_hash"] == self._commit, "the answer is of another commit")
        return str(answer["results"][0]["path"])


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def main() -> int:
    for tool in ("buildah", "debootstrap", "git"):
        if not shutil.which(tool):
            print(f"image-test: there is no {tool}: apt install buildah debootstrap git", file=sys.stderr)
            return 1
    if os.geteuid():
        print("image-test: has to run as root, for debootstrap and the chroot", file=sys.stderr)
        return 1
    os.umask(0o022)  # the containers' user reads what we make
    with TemporaryDirectory(prefix="memgw-image-test-") as scratch:
        folder = Path(os.environ.get("IMAGE_TEST_DIR") or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        builder = Builder(folder)
        try:
            subprocess.run([sys.executable, str(stack.ROOT / "bin" / "minilm.py"), str(MODEL)], check=True)
            begun = monotonic()
            base = builder.base()
            print(f"image-test: base: {builder.size(base):.0f} MB, {monotonic() - begun:.0f} s", flush=True)
            settings = settings_of_this_machine(Path(scratch) / "settings")
            images = {}
            for target in ("gateway", "qmd"):
                begun = monotonic()
                images[target] = builder.build(target, base, settings)
                seconds, size = monotonic() - begun, builder.size(images[target])
                print(f"image-test: {target}: {size:.0f} MB, built in {seconds:.0f} s", flush=True)
            place = Path(scratch) / "containers"
            place.mkdir()
            os.chmod(scratch, 0o755)  # noqa: S103  the containers' user has to get to the volumes in there
            for name, step in Test(builder, images["gateway"], images["qmd"], place).steps():
                print(f"image-test: {name}: ok: {step()}", flush=True)
        except (Failed, OSError, subprocess.SubprocessError) as exc:
            print(f"image-test: FAILED: {exc}", file=sys.stderr)
            return 1
        finally:
            if folder == Path(scratch).resolve():
                subprocess.run(builder.command("rm", "--all"), capture_output=True)
                subprocess.run(builder.command("rmi", "--all", "--force"), capture_output=True)
    print("image-test: all steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
