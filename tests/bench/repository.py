"""The remotes: made once from the seed, copied for each run, so that its pushes do not stay."""

import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

from tests.actors import Upstream
from tests.bench import corpus


def upstream(cache: Path, files: int, path: Path) -> Upstream:
    """A bare repository at `path` with a corpus of so many files on main."""
    remote = Upstream(path)
    subprocess.run(["cp", "-a", f"{_made(cache, files)}/.", str(path)], check=True)
    return remote


def _made(cache: Path, files: int) -> Path:
    digest = sha256("".join(map(str, corpus.notes(20))).encode()).hexdigest()[:8]
    ready = cache / f"corpus-{files}-{digest}.git"
    if not ready.exists():
        aside = cache / f"{ready.name}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        Upstream(aside).commit("main", dict(corpus.notes(files)))
        aside.rename(ready)
    return ready


def add_branches(remote: Upstream, count: int) -> None:
    """So many branches `task/B-…` beside main, on twenty commits, packed as after a `git gc`."""
    main = remote.tip("main")
    tips = [remote.commit("seed", dict([corpus.note(n, n + 1)]), parent=main) for n in range(min(count, 20))]
    refs = "".join(f"create refs/heads/task/B-{number:05} {tips[number % len(tips)]}\n" for number in range(count))
    remote.delete("seed")
    _git(remote.path, "update-ref", "--stdin", stdin=refs)
    _git(remote.path, "pack-refs", "--all")


def _git(path: Path, *arguments: str, stdin: str = "") -> None:
    subprocess.run(["git", f"--git-dir={path}", *arguments], input=stdin.encode(), check=True)
