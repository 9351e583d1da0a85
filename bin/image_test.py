"""`make image-test`: builds both targets of the Dockerfile without a Docker engine, runs them, and asks them questions.

Debian's buildah builds and runs in a chroot, on a base that debootstrap makes, as root. Package registries are reached
as this machine reaches them: pip's and npm's settings are handed over at run time and stay out of the images.
IMAGE_TEST_DIR=… keeps base and layers there for the next time; MIRROR=… names another Debian mirror; GPU=cuda builds
qmd with what a GPU needs.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stack

ROOT = stack.ROOT
SUITE = "bookworm"
UID = 10001
SETTINGS = "/run/image-test"
"""Where the builder finds this machine's settings."""

MODEL = ROOT / ".cache" / "minilm-l6-v2-q8_0.gguf"


class Failed(Exception):
    """A step did not end as it has to."""


class Builder:
    """buildah, with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def command(self, *words: str) -> list[str]:
        return [*self._begin, *words]

    def do(self, *words: str) -> str:
        """Runs buildah to its end and returns what it says."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"buildah {words[0]}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return done.stdout.strip()

    def base(self) -> str:
        """An image like debian:bookworm-slim."""
        tree = self._folder / "base"
        if not tree.exists():
            aside = self._folder / "base.new"
            shutil.rmtree(aside, ignore_errors=True)
            mirror = [os.environ["MIRROR"]] if os.environ.get("MIRROR") else []
            done = subprocess.run(
                ["debootstrap", "--variant=minbase", SUITE, str(aside), *mirror], capture_output=True, text=True
            )
            if done.returncode:
                raise Failed(f"debootstrap: {done.stdout[-2000:]}")
            for name in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(aside / name)
            for name in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"):
                (aside / name).mkdir(parents=True)
            aside.rename(tree)
        recipe = self._folder / "base.Dockerfile"
        recipe.write_text("FROM scratch\nADD . /\n")
        self.do("bud", "--isolation", "chroot", "--layers", "--tag", "localhost/base", "--file", str(recipe), str(tree))
        return "localhost/base"

    def build(self, target: str, base: str, settings: list[str]) -> str:
        """The image of a target of the Dockerfile."""
        image = f"localhost/memgw-{target}"
        more = ["--layers", "--target", target, "--tag", image, "--build-arg", f"BASE={base}"]
        if target == "qmd" and os.environ.get("GPU"):
            more += ["--build-arg", f"GPU={os.environ['GPU']}"]
        self.do("bud", "--isolation", "chroot", "--pull=never", *settings, *more, str(ROOT))
        return image

    def size(self, image: str) -> float:
        """Megabytes of all its layers, unpacked."""
        container = self.do("from", "--pull=never", image)
        try:
            tree = self.do("mount", container)
            return int(subprocess.check_output(["du", "-sxB1", tree]).split()[0]) / 1e6
        finally:
            self.do("rm", container)


def settings_of_this_machine(folder: Path) -> list[str]:
    """Mounts that let pip and npm in the builder reach what they reach here."""
    folder.mkdir(exist_ok=True)
    mounts = {folder: SETTINGS}

    def moved(value: str) -> str:
        """The value, with each path of this machine as one in the builder."""
        words = []
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                mounted = path.parent if word.startswith("file://") else path  # an index names files beside it
                place = mounts.setdefault(mounted, f"{SETTINGS}-{len(mounts)}")
                word = word.replace(str(mounted), place)
            words.append(word)
        return " ".join(words)

    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    said = re.findall(r"^(?:global|:env:)\.([\w-]+)=(['\"].*['\"])$", listed, re.MULTILINE)
    pip = {name: moved(value[1:-1].replace("\\n", " ")) for name, value in said}
    lines = ["[global]", *(f"{name} = {value}" for name, value in pip.items())]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")

    npmrc = Path("~/.npmrc").expanduser()
    lines = npmrc.read_text().splitlines() if npmrc.is_file() else []
    if registry := os.environ.get("npm_config_registry"):
        lines.append(f"registry={registry}")
    if authorities := os.environ.get("NODE_EXTRA_CA_CERTS"):
        lines.append(f"cafile={moved(authorities)}")
    (folder / "npmrc").write_text("\n".join(lines) + "\n")

    mounts[folder / "pip.conf"], mounts[folder / "npmrc"] = "/etc/pip.conf", "/root/.npmrc"
    return [word for path, place in mounts.items() for word in ("--volume", f"{path}:{place}:ro")]


class Running:
    """A container: the entrypoint of an image in a chroot, on this machine's network."""

    def __init__(self, builder: Builder, image: str, volumes: dict[Path, str], environ: dict[str, str]) -> None:
        self._builder, self._mark = builder, f"MEMGW_IMAGE_TEST={uuid4().hex}"
        self.container = builder.do("from", "--pull=never", image)
        config = json.loads(builder.do("inspect", "--type", "image", image))["OCIv1"]["config"]
        words = [word for path, place in volumes.items() for word in ("--volume", f"{path}:{place}")]
        for name, value in environ.items():
            words += ["--env", f"{name}={value}"]
        words += ["--env", self._mark, self.container, "--", *config["Entrypoint"]]
        self.process = subprocess.Popen(
            builder.command("run", "--isolation", "chroot", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def inside(self) -> list[int]:
        """The processes in it."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def users(self) -> set[int]:
        """Who they run as."""
        return {os.stat(f"/proc/{pid}").st_uid for pid in self.inside() if Path(f"/proc/{pid}").exists()}

    def stop(self) -> tuple[float, str]:
        """TERM to the first process, as an engine sends it: the seconds until none was left, and all that was said."""
        begun = monotonic()
        for pid in self.inside():
            if parent(pid) not in self.inside():
                os.kill(pid, signal.SIGTERM)
        said, _ = self.process.communicate(timeout=60)
        if not stack.until(lambda: not self.inside(), 5):
            raise Failed(f"processes are left: {self.inside()}")
        return monotonic() - begun, said

    def remove(self) -> None:
        for pid in self.inside():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self._builder.do("rm", self.container)

    def written(self, since: float) -> list[str]:
        """Files of its own that were changed: a read-only root file system would not have let them."""
        tree = Path(self._builder.do("mount", self.container))
        found = [path for path in tree.rglob("*") if path.is_file() and path.lstat().st_mtime > since]
        kept = [str(path.relative_to(tree)) for path in found]
        return [name for name in kept if not name.startswith(("tmp/", "etc/", "run/", "proc/", "sys/", "dev/"))]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@contextmanager
def running(*arguments: Any) -> Iterator[Running]:
    container = Running(*arguments)
    try:
        yield container
    finally:
        container.remove()


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


class Test:
    """What is asked of the two images. Each step returns what it saw, in a few words."""

    def __init__(self, builder: Builder, gateway: str, qmd: str, folder: Path) -> None:
        self._builder, self._gateway, self._qmd = builder, gateway, qmd
        self._folder = folder
        self._commit = make_remote(folder / "remote.git")
        self._port, self._mcp_port = free_port(), free_port()

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("gateway alone", self.alone),
            ("gateway and qmd", self.together),
            ("a volume of another user's", self.unwritable),
        ]

    def alone(self) -> str:
        begun = monotonic()
        with running(*self._arguments(self._gateway, "alone")) as gateway:
            answer = self._first_answer(gateway)
            seconds = monotonic() - begun
            check(ask(self._port, "/health")["ok"], "no health")
            check(gateway.users() == {UID}, f"runs as {gateway.users()}")
            since = (self._folder / "alone").stat().st_ctime
            ended, _ = gateway.stop()
            check(not (odd := gateway.written(since)), f"it wrote to its own file system: {odd[:5]}")
        return f"/health, and {answer['path']} by the command line, after {seconds:.1f} s; ended in {ended:.1f} s"

    def together(self) -> str:
        model = {"QMD_EMBED_MODEL_URI": "/models/model.gguf"} if MODEL.exists() else {}
        host_only = {"QMD_ENGINE": "host", **model}
        with (
            running(*self._arguments(self._qmd, "together", model)) as qmd,
            running(*self._arguments(self._gateway, "together", host_only)) as gateway,
        ):
            self._first_answer(gateway)
            tools = {"searches": [{"type": "lex", "query": "tuesdays"}], "rerank": False}
            if not stack.until(lambda: (answers(self._mcp_port, "/query", tools) or {}).get("results"), 30):
                raise Failed("qmd's MCP server does not answer")
            by_meaning = "no model here to search by meaning with"
            if model:
                question = {"query": "when do we ship?", "query_type": "vsearch", "strict": True}
                check(ask(self._port, "/query", question)["results"] != [], "nothing is found by meaning")
                by_meaning = "by meaning, too"
            check(gateway.users() | qmd.users() == {UID}, f"run as {gateway.users()}, {qmd.users()}")
            here = sorted(path.name for path in (self._folder / "together-cache").iterdir())
            check("ws-main" in here, f"/var/lib/qmd/cache has {here}")
            ended = gateway.stop()[0], qmd.stop()[0]
        return f"answered by the host, {by_meaning}; MCP answers; ended in {ended[0]:.1f} and {ended[1]:.1f} s"

    def unwritable(self) -> str:
        lines = []
        for image in (self._gateway, self._qmd):
            with running(*self._arguments(image, "unwritable", owner=0)) as container:
                said, _ = container.process.communicate(timeout=60)
                told = [line for line in said.splitlines() if line.startswith("memgw: ")]
                check(container.process.returncode != 0 and len(told) == 1, f"it said: {said}")
                lines.append(told[0])
        return f"both stop with: {lines[0]}"

    def _arguments(self, image: str, name: str, environ: dict[str, str] | None = None, owner: int = UID) -> list[Any]:
        """Of a container whose volumes are called `name`."""
        volumes = {self._folder / "remote.git": "/srv/memory.git:ro"}
        if MODEL.exists():
            volumes[MODEL] = "/models/model.gguf:ro"
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
        return [self._builder, image, volumes, variables | (environ or {})]

    def _first_answer(self, gateway: Running) -> dict[str, Any]:
        """Asks until it answers as it has to."""
        if not stack.until(lambda: answers(self._port, "/health") or gateway.process.poll() is not None, 30):
            raise Failed("nothing answers /health")
        answer: dict[str, Any] = {}

        def asked() -> bool:
            answer.update(answers(self._port, "/query", {"query": "tuesdays"}) or {})
            return bool(answer)

        if not stack.until(asked, 30):
            raise Failed(f"/query is not answered: {gateway.stop()[1][-3000:]}")
        check(answer["commit_hash"] == self._commit, "the answer is of another commit")
        return dict(answer["results"][0])


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
    with TemporaryDirectory(prefix="memgw-image-test-") as scratch:
        folder = Path(os.environ.get("IMAGE_TEST_DIR") or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        builder = Builder(folder)
        try:
            begun = monotonic()
            base = builder.base()
            print(f"image-test: base: {builder.size(base):.0f} MB, {monotonic() - begun:.0f} s", flush=True)
            settings = settings_of_this_machine(folder / "settings")
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
