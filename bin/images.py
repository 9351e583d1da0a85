"""Images and containers without an engine, for bin/image_test.py: built by Debian's buildah on a base of debootstrap's,
run in a chroot."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from time import monotonic
from uuid import uuid4

import stack

SUITE = "bookworm"
UID = 10001
SETTINGS = "/run/image-test"
"""Where the builder finds this machine's settings."""

CONFINE = """
set -e
tree=$1; shift
mount --make-rprivate /
mount --bind "$tree" "$tree"
mount -o remount,bind,ro "$tree"
mount -t tmpfs -o mode=1777,size=1g,noexec,nosuid,nodev tmpfs "$tree/tmp"
mount -t proc proc "$tree/proc"
mount --bind /dev "$tree/dev"
while [ "$1" != -- ]; do mount --bind "$1" "$tree$2"; shift 2; done; shift
exec setpriv --no-new-privs chroot --userspec=%(uid)d:%(uid)d "$tree" "$@"
"""
"""As compose.yaml has an engine do it: read-only but for volumes and /tmp, processes of its own, no way to be root."""


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
        if target == "qmd" and os.environ.get("GPU") == "1":
            more += ["--build-arg", "GPU=cuda"]
        self.do("bud", "--isolation", "chroot", "--pull=never", *settings, *more, str(stack.ROOT))
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
    folder.mkdir(mode=0o700)  # a registry's password may be among them
    mounts: dict[Path, str] = {}

    def moved(value: str) -> str:
        """The value, with each path of this machine as one in the builder."""
        words = []
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                mounted = path.parent if word.startswith("file://") else path  # an index names files beside it
                # Layers that are kept have the mount points in them: a name is always that of one path.
                place = mounts.setdefault(mounted, f"{SETTINGS}-{sha256(bytes(mounted)).hexdigest()[:12]}")
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
    """A container on this machine's network: an image's entrypoint, or another command. `volumes`: what lies where."""

    def __init__(
        self, builder: Builder, image: str, volumes: dict[Path, str], environ: dict[str, str], log: Path, *command: str
    ) -> None:
        self._builder, self._mark, self._log = builder, f"MEMGW_IMAGE_TEST={uuid4().hex}", log
        self._container = builder.do("from", "--pull=never", image)
        config = json.loads(builder.do("inspect", "--type", "image", image))["OCIv1"]["config"]
        self._words, self._volumes = list(command) or config["Entrypoint"], volumes
        self._environ = [*config["Env"], *(f"{name}={value}" for name, value in environ.items()), self._mark]
        with log.open("wb") as file:
            self.process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def _command(self) -> list[str]:
        options = [word for path, place in self._volumes.items() for word in ("--volume", f"{path}:{place}")]
        options += [word for variable in self._environ for word in ("--env", variable)]
        return self._builder.command("run", "--isolation", "chroot", *options, self._container, "--", *self._words)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def inside(self) -> list[int]:
        """The processes in it."""
        return sorted(int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._is_inside(folder))

    def _is_inside(self, folder: Path) -> bool:
        try:
            return self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def first(self) -> int:
        """The process that an engine sends its signals to."""
        here = self.inside()
        return next(pid for pid in here if parent(pid) not in here)

    def users(self) -> set[int]:
        """Who its processes run as."""
        return {os.stat(f"/proc/{pid}").st_uid for pid in self.inside()}

    def stop(self) -> float:
        """The seconds from TERM until nothing is left."""
        begun = monotonic()
        os.kill(self.first(), signal.SIGTERM)
        self.process.wait(60)
        if not stack.until(lambda: not self.inside(), 5):
            raise Failed(f"processes are left: {self.inside()}")
        return monotonic() - begun

    def remove(self) -> None:
        for pid in self.inside():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self._builder.do("rm", self._container)


class Confined(Running):
    """One that may do no more than compose.yaml allows."""

    def _command(self) -> list[str]:
        tree = Path(self._builder.do("mount", self._container))
        words = []
        for path, place in self._volumes.items():
            there = tree / place.split(":")[0].lstrip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                there.mkdir(exist_ok=True)
            else:
                there.touch()
            words += [str(path), place.split(":")[0]]
        script = ["bash", "-c", CONFINE % {"uid": UID}, "confine", str(tree), *words, "--"]
        own = ["/usr/bin/env", "-i", *self._environ]
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", *script, *own, *self._words]

    def do(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Another command in there, as an engine runs health checks."""
        into = ["nsenter", "--target", str(self.first()), "--mount", "--pid", "--root", "--wd"]
        return subprocess.run(
            [*into, f"--setuid={UID}", f"--setgid={UID}", "/usr/bin/env", "-i", *self._environ, *words],
            capture_output=True,
            text=True,
        )


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
