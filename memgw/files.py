"""Files that are replaced whole, or not at all; folders that are removed whatever is in them."""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import ENOENT, ENOTEMPTY
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import time

_TRIES = 5


def replace(path: Path, text: str) -> None:
    """Writes `text` beside `path` and renames it over. Raises OSError; then `path` is as it was."""
    make_folder(path.parent)
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as aside:
        try:
            aside.write(text)
            aside.flush()
            try:
                os.replace(aside.name, path)
            except IsADirectoryError:
                remove(path)
                os.replace(aside.name, path)
        except BaseException:
            os.unlink(aside.name)
            raise


def remove_leftovers(path: Path) -> None:
    """Removes what killed `replace`s of `path` left; one at work takes no ten minutes."""
    leftover = re.compile(rf"\.{re.escape(path.name)}\.\w+")
    for name in os.listdir(path.parent) if path.parent.is_dir() else ():
        if leftover.fullmatch(name):
            with suppress(FileNotFoundError):  # its writer has just renamed it
                if (path.parent / name).lstat().st_mtime < time() - 600:
                    remove(path.parent / name)


def ensure(path: Path, text: str) -> None:
    """Makes `path` hold exactly `text`; writes only when it does not."""
    try:
        if path.read_text("utf-8") == text:
            return
    except (OSError, UnicodeDecodeError):
        pass  # whatever it is, it is not what it has to be
    replace(path, text)


def remove(path: Path) -> None:
    """Removes a file or a whole folder, folders without write permission too; no error when there is none."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return

    os.chmod(path, stat.S_IRWXU)  # before each listing: a damaged permission must not stop a repair
    for folder, below, _ in os.walk(path):
        for name in below:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                with suppress(FileNotFoundError):
                    os.chmod(inner, stat.S_IRWXU)
    for left in reversed(range(_TRIES)):
        try:
            return shutil.rmtree(path)
        except OSError as exc:  # others still put something in, or take it out: a reader that makes what he lacks
            if exc.errno not in (ENOTEMPTY, ENOENT) or not left:
                raise
            if not path.exists():
                return


def make_folder(path: Path) -> None:
    """Makes `path` a folder that we can use. A file of its name is thrown away, a folder never."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        with suppress(IsADirectoryError, PermissionError, FileNotFoundError):  # another request was first
            path.unlink()
        path.mkdir(exist_ok=True)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(path, stat.S_IRWXU)


def is_full(path: Path) -> bool:
    """Whether next to nothing more can be written where `path` is; some programs fail there without saying why."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize < 1024 * 1024 or (space.f_files > 0 and space.f_favail < 16)


def free(path: Path) -> int:
    """Bytes that we can still write where `path` is."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def space(*paths: Path, freed: bool = False) -> int:
    """Bytes that `paths` and all below them take on disk: blocks, each file once however many names it has.

    `freed`: what removing them would give back, since a file that has a name elsewhere stays.
    """
    names: dict[tuple[int, int], int] = {}
    total = 0
    for found in _entries(paths):
        file = found.st_dev, found.st_ino
        names[file] = names.get(file, 0) + 1
        if stat.S_ISDIR(found.st_mode) or names[file] == (found.st_nlink if freed else 1):
            total += found.st_blocks * 512
    return total


def _entries(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Of all files and folders; those that vanish meanwhile are left out."""
    for path in paths:
        with suppress(FileNotFoundError):
            yield path.lstat()
        if path.is_symlink():
            continue
        for folder, folders, names in os.walk(path):
            for name in folders + names:
                with suppress(FileNotFoundError):
                    yield os.lstat(os.path.join(folder, name))


def size(path: Path) -> int:
    """Bytes of all files below `path`; those that vanish meanwhile do not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
