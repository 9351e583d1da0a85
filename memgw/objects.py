"""What the mirror's object store tells: how two commits differ, and what blobs hold. Read only; takes no lock."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from memgw import documents
from memgw.deadline import Deadline
from memgw.errors import MirrorDamaged, ToolError, ToolFailed, ToolOutputTooLarge
from memgw.gitcmd import Commands, translate

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
"""Git knows this object without having it: the tree of a commit with no files."""

SUBMODULE = "160000"

CHUNK_BYTES = 2 * 1024 * 1024
CHUNK_BLOBS = 200


@dataclass(frozen=True)
class Side:
    """A file in a commit. `mode` as Git writes it: 100644, 100755, 120000 (symlink), 160000 (submodule)."""

    mode: str
    blob: str

    @property
    def is_regular(self) -> bool:
        return self.mode.startswith("100")


@dataclass(frozen=True)
class Difference:
    """One path (surrogate-escaped) of two commits; a side where it is not there is None."""

    path: str
    old: Side | None
    new: Side | None


class Objects:
    """The object store of the bare repository at `git_dir`."""

    def __init__(self, git_dir: Path, env: Mapping[str, str]) -> None:
        self._cwd, self._env = git_dir.parent, {**env, "GIT_DIR": str(git_dir)}

    def differences(self, old: str | None, new: str, deadline: Deadline) -> list[Difference] | None:
        """Every path that differs; from nothing when `old` is None. A rename is two paths. None when that can't be
        told: `old` is not there any more, or a tree has two entries of one name. Raises MirrorDamaged."""
        try:
            out: bytes = self._git(deadline).diff_tree(
                "-r", "-z", "--raw", "--no-renames", "--no-abbrev", "--end-of-options", old or EMPTY_TREE, new
            )
        except ToolError as exc:
            if old is not None and isinstance(exc, ToolFailed):
                return None
            raise translate(exc, deadline) or MirrorDamaged("the mirror can't compare commits") from exc
        fields = out.split(b"\0")[:-1]
        if len(set(fields[1::2])) < len(fields) // 2:
            return None
        return [_difference(meta, path) for meta, path in zip(fields[::2], fields[1::2], strict=True)]

    def documents(self, commit: str, deadline: Deadline) -> dict[str, tuple[str, int]]:
        """Path (surrogate-escaped) → blob and bytes of each regular file whose name makes it a document."""
        try:
            listing: bytes = self._git(deadline).ls_tree("-r", "-z", "-l", "--full-tree", commit)
        except ToolError as exc:
            raise translate(exc, deadline) or MirrorDamaged("the commit can't be listed") from exc
        found = {}
        for entry in listing.split(b"\0")[:-1]:
            meta, _, raw = entry.partition(b"\t")
            mode, _, blob, size = meta.decode("ascii").split()
            path = os.fsdecode(raw)
            if Side(mode, blob).is_regular and documents.wanted(path):
                found[path] = (blob, int(size))
        return found

    def newest_of(self, commits: Collection[str], start: str, deadline: Deadline) -> str | None:
        """The first of `commits` in the history of `start`, which is looked at a thousand commits back; or None."""
        try:
            out: bytes = self._git(deadline).rev_list("--max-count=1000", "--end-of-options", start)
        except ToolError as exc:
            raise translate(exc, deadline) or MirrorDamaged("the mirror can't list a history") from exc
        return next((commit for commit in out.decode("ascii").split() if commit in commits), None)

    def blobs(self, deadline: Deadline) -> "Blobs":
        return Blobs(self._cwd, self._env, deadline)

    def _git(self, deadline: Deadline) -> Commands:
        return Commands(self._cwd, self._env, deadline, harmless=True)


class Blobs:
    """Reads blobs for one request. All methods raise MirrorDamaged when one is missing."""

    def __init__(self, cwd: Path, env: Mapping[str, str], deadline: Deadline) -> None:
        self._cwd, self._env, self._deadline = cwd, env, deadline
        self._kept: dict[str, bytes] = {}

    def keep(self, blobs: Sequence[str]) -> None:
        """Reads `blobs` now, if they are few and small, so that two steps need them read but once."""
        if 0 < len(blobs) <= CHUNK_BLOBS:
            with suppress(ToolOutputTooLarge):
                self._kept = self._read(list(dict.fromkeys(blobs)), CHUNK_BYTES)

    def sizes(self, blobs: Sequence[str]) -> dict[str, int]:
        """Blob → its bytes."""
        if not blobs or self._kept.keys() >= set(blobs):
            return {blob: len(self._kept[blob]) for blob in blobs}
        out = self._cat(blobs, "--batch-check")
        lines = [line.split() for line in out.decode("ascii").splitlines()]
        if any(len(line) != 3 or line[1] != "blob" for line in lines):
            raise MirrorDamaged("the mirror lacks a blob")
        return {blob: int(size) for blob, _, size in lines}

    def contents(self, blobs: Sequence[str]) -> Iterator[dict[str, bytes]]:
        """The blobs' bytes, some at a time so that memory stays small, in the order given."""
        if self._kept.keys() >= set(blobs):
            if blobs:
                yield {blob: self._kept[blob] for blob in blobs}
            return
        sizes = self.sizes(blobs)
        chunk: list[str] = []
        left = CHUNK_BYTES
        for blob in dict.fromkeys(blobs):
            if chunk and (len(chunk) == CHUNK_BLOBS or sizes[blob] > left):
                yield self._read(chunk)
                chunk, left = [], CHUNK_BYTES
            chunk.append(blob)
            left -= sizes[blob]
        if chunk:
            yield self._read(chunk)

    def _read(self, blobs: Sequence[str], at_most: int | None = None) -> dict[str, bytes]:
        out = self._cat(blobs, "--batch", at_most)
        found, at = {}, 0
        for blob in blobs:
            end = out.index(b"\n", at)
            name, kind, *size = out[at:end].decode("ascii").split()
            if (name, kind) != (blob, "blob"):
                raise MirrorDamaged("the mirror lacks a blob")
            at = end + 1 + int(size[0]) + 1
            found[blob] = out[end + 1 : at - 1]
        return found

    def _cat(self, blobs: Sequence[str], how: str, at_most: int | None = None) -> bytes:
        git = Commands(self._cwd, self._env, self._deadline, max_output=at_most, harmless=True)
        try:
            out: bytes = git.cat_file(how, istream="".join(f"{blob}\n" for blob in blobs).encode())
        except ToolOutputTooLarge:
            raise
        except ToolError as exc:
            raise translate(exc, self._deadline) or MirrorDamaged("the mirror's blobs can't be read") from exc
        return out


def _difference(meta: bytes, path: bytes) -> Difference:
    """Takes `:<old mode> <new mode> <old blob> <new blob> <status>` apart."""
    old_mode, new_mode, old, new, _ = meta[1:].decode("ascii").split()
    return Difference(os.fsdecode(path), _side(old_mode, old), _side(new_mode, new))


def _side(mode: str, blob: str) -> Side | None:
    return None if mode == "000000" else Side(mode, blob)
