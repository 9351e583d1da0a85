"""One detached worktree of the mirror: the files of one commit, byte for byte."""

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha1
from pathlib import Path

from memgw import documents, files
from memgw.deadline import Deadline
from memgw.errors import FULL, StorageFull, ToolError, WorktreeDamaged
from memgw.gitcmd import Commands, translate
from memgw.mirror import Mirror
from memgw.objects import SUBMODULE, Blobs, Difference, Side

_FEW = 500
"""Above that Git is as fast."""

_EXECUTABLE, _SYMLINK = "100755", "120000"

_NOT_PLAIN = re.compile(r"(^|/)(\.{0,2}|\.git|git~\d+)(/|$)|\\", re.IGNORECASE)


class Worktree:
    """`<data>/workspaces/<workspace>`. Every method but `head` needs the workspace lock, and is given its
    descriptor as `held` so that no orphan of ours works on after the lock is free."""

    def __init__(self, path: Path, mirror: Mirror) -> None:
        self.path = path
        self._mirror = mirror

    def head(self) -> str | None:
        """The commit checked out here, or None when there is no sound worktree. Starts no process."""
        admin = self._admin()
        try:
            return (admin / "HEAD").read_text("ascii").strip() if admin else None
        except (OSError, UnicodeDecodeError):
            return None

    def align(self, commit: str, deadline: Deadline, held: int) -> None:
        """Makes the files those of `commit`; nothing else is left. Raises WorktreeDamaged, StorageFull."""
        with deadline.step("align"):
            if self.head() is None:
                self._add(commit, deadline, held)
            self._remove_locks()
            git = self._git(deadline, held)
            try:
                git.checkout("--force", "--detach", "--quiet", commit, "--")
                git.clean("-ffdxq")
                self._empty_submodules(git.ls_files("--stage", "-z"))
            except ToolError as exc:
                if files.is_full(self.path):
                    raise StorageFull("no space is left where memgw keeps its data") from exc
                raise translate(exc, deadline) or WorktreeDamaged("the files can't be brought to it") from exc

    def apply(self, differences: Sequence[Difference], blobs: Blobs, old: str, new: str, deadline: Deadline) -> int:
        """Brings the files from `old` to `new` at the cost of the differences alone; returns how many bytes they grew.

        For a worktree that `align` made: what else may be wrong in it stays as it is, and Git's own index stays behind;
        the next `align` sees to both. Raises WorktreeDamaged when only that can do it.
        """
        with deadline.step("align"):
            admin = self._admin()
            if admin is None or self.head() != old or len(differences) > _FEW:
                raise WorktreeDamaged("it is not as it was left")
            if any(side and side.mode == SUBMODULE for item in differences for side in (item.old, item.new)):
                raise WorktreeDamaged("submodules are Git's own matter")
            if any(_NOT_PLAIN.search(item.path) for item in differences):
                raise WorktreeDamaged("a name that is Git's to judge")
            sides = {item.path: item.new for item in differences if item.new}
            names = [side.blob for side in sides.values()]
            if any(size > documents.MAX_BYTES for size in blobs.sizes(names).values()):
                raise WorktreeDamaged("a file that is too large to be held in memory")
            try:
                grown = -sum(self._take_away(item.path) for item in differences if item.old)
                for contents in blobs.contents(names):
                    for path, side in sides.items():
                        if side.blob in contents:
                            grown += self._put(path, side, contents[side.blob])
                files.replace(admin / "HEAD", f"{new}\n")
            except OSError as exc:
                if exc.errno in FULL:
                    raise
                raise WorktreeDamaged("the files can't be brought to it") from exc
            return grown

    def resemble(self, other: "Worktree", commit: str, deadline: Deadline, held: int) -> None:
        """Makes this the worktree of `commit` that `other` is, out of the same files: nothing of ours writes into one,
        but puts another in its place. Raises WorktreeDamaged, when `align` can still do it."""
        with deadline.step("align"):
            if other.head() != commit:
                raise WorktreeDamaged("the one to start from is of another commit")
            self._add(commit, deadline, held)
            try:
                _link(other.path, self.path)
            except OSError as exc:
                if exc.errno in FULL:
                    raise
                raise WorktreeDamaged("its files can't be shared") from exc

    def remove(self) -> None:
        """Throws the worktree away; the next `align` makes it again."""
        files.remove(self.path)

    def documents(self, commit: str, deadline: Deadline, held: int) -> dict[str, str]:
        """Path → qmd's content hash of every file of `commit` that is a document.

        Each file read is compared with its blob in Git. Files that qmd can't take in are taken away, so that they bring
        nothing in by another's name; their hash here is "", which no document has.
        Raises WorktreeDamaged when a file differs or is missing.
        """
        found: dict[str, str] = {}
        for path, (oid, size) in self._mirror.objects.documents(commit, deadline).items():
            deadline.left()
            if size > documents.MAX_BYTES or not documents.readable(path):
                (self.path / path).unlink(missing_ok=True)
                found[path] = ""
                continue
            content = self._read(path)
            blob = b"blob %d\0" % len(content)
            if sha1(blob + content, usedforsecurity=False).hexdigest() != oid:
                raise WorktreeDamaged("a file differs from the commit")
            content_hash = documents.content_hash(content)
            if content_hash:
                found[path] = content_hash
        return found

    def _take_away(self, path: str) -> int:
        """Removes a file, and the folders that it leaves empty; returns how many bytes it had."""
        file = self.path / path
        self._must_be_inside(file)
        size = file.lstat().st_size
        file.unlink()
        for folder in file.relative_to(self.path).parents[:-1]:
            with suppress(OSError):
                (self.path / folder).rmdir()
        return size

    def _put(self, path: str, side: Side, content: bytes) -> int:
        file = self.path / path
        self._must_be_inside(file)
        file.parent.mkdir(parents=True, exist_ok=True)
        if side.mode == _SYMLINK:
            if b"\0" in content:
                raise WorktreeDamaged("a link that can't be")
            os.symlink(content, os.fsencode(file))
        else:
            mode = 0o777 if side.mode == _EXECUTABLE else 0o666
            with open(file, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode)) as out:
                out.write(content)
        return len(content)

    def _must_be_inside(self, file: Path) -> None:
        """A link where a folder should be could lead anywhere."""
        if any((self.path / folder).is_symlink() for folder in file.relative_to(self.path).parents[:-1]):
            raise WorktreeDamaged("a link in the place of a folder")

    def _empty_submodules(self, index: bytes) -> None:
        """`git clean` leaves alone what lies in them, though none of ours is ever filled."""
        for entry in index.split(b"\0"):
            if entry.startswith(SUBMODULE.encode()):
                folder = self.path / os.fsdecode(entry.partition(b"\t")[2])
                self._must_be_inside(folder)
                if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
                    files.remove(folder)
                    folder.mkdir(parents=True)

    def _read(self, path: str) -> bytes:
        """A regular file's content, whatever else may be there by its name."""
        try:
            with open(self.path / path, "rb", opener=_open_plainly) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise WorktreeDamaged("a file of the commit is something else")
                return file.read(documents.MAX_BYTES + 1)
        except OSError as exc:
            raise WorktreeDamaged("a file of the commit can't be read") from exc

    def _add(self, commit: str, deadline: Deadline, held: int) -> None:
        files.remove(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._mirror.lock(deadline) as mirror_held:
            git = Commands(
                self.path.parent,
                self._mirror.env | {"GIT_DIR": str(self._mirror.path)},
                deadline,
                (held, mirror_held),
            )
            try:
                git.worktree("prune", "--expire", "now")
                git.worktree("add", "--force", "--detach", "--no-checkout", "--", str(self.path), commit)
            except ToolError as exc:
                raise translate(exc, deadline) or WorktreeDamaged("it can't be made") from exc

    def _admin(self) -> Path | None:
        """The worktree's folder in our mirror; None when there is none, or the pointer leads elsewhere."""
        try:
            pointer = (self.path / ".git").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        admin = Path(pointer.removeprefix("gitdir: ").strip())
        ours = admin.parent.resolve() == (self._mirror.path / "worktrees").resolve()
        return admin if pointer.startswith("gitdir: ") and ours and os.access(admin / "HEAD", os.R_OK) else None

    def _git(self, deadline: Deadline, held: int) -> Commands:
        """Bound to this worktree by name: Git must never go looking for another repository."""
        admin = self._admin()
        if admin is None:
            raise WorktreeDamaged("it is gone")
        env = self._mirror.env | {"GIT_DIR": str(admin), "GIT_WORK_TREE": str(self.path)}
        return Commands(self.path, env, deadline, (held,))

    def _remove_locks(self) -> None:
        """Locks of a killed git. Nobody else is at work: we hold the workspace lock."""
        admin = self._admin()
        if admin:
            for lock in admin.glob("*.lock"):
                files.remove(lock)


def _link(source: Path, target: Path) -> None:
    """Makes the folders of `source` in `target`, and a second name there for each file but Git's pointer."""
    for folder, folders, names in os.walk(source):
        place = os.path.join(target, os.path.relpath(folder, source))
        links = {name for name in folders if os.path.islink(os.path.join(folder, name))}
        for name in set(folders) - links:
            os.mkdir(os.path.join(place, name))
        for name in links.union(names):
            if name != ".git" or folder != str(source):
                os.link(os.path.join(folder, name), os.path.join(place, name), follow_symlinks=False)


def _open_plainly(path: str, flags: int) -> int:
    """Follows no link and waits for nobody."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
