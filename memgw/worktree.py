"""One detached worktree of the mirror: the files of one commit, byte for byte."""

import os
import stat
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path

from memgw import documents, files
from memgw.deadline import Deadline
from memgw.errors import ToolError, WorktreeDamaged
from memgw.gitcmd import Commands, translate
from memgw.mirror import Mirror


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
            except ToolError as exc:
                raise translate(exc, deadline) or WorktreeDamaged("the files can't be brought to it") from exc

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
        for path, (oid, size) in self._blobs(commit, deadline, held).items():
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

    def _read(self, path: str) -> bytes:
        """A regular file's content, whatever else may be there by its name."""
        try:
            with open(self.path / path, "rb", opener=_open_plainly) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise WorktreeDamaged("a file of the commit is something else")
                return file.read(documents.MAX_BYTES + 1)
        except OSError as exc:
            raise WorktreeDamaged("a file of the commit can't be read") from exc

    def _blobs(self, commit: str, deadline: Deadline, held: int) -> dict[str, tuple[str, int]]:
        """Path (surrogate-escaped) → blob and size of each regular file whose name makes it a document."""
        try:
            listing: bytes = self._git(deadline, held).ls_tree("-r", "-z", "-l", "--full-tree", commit)
        except ToolError as exc:
            raise translate(exc, deadline) or WorktreeDamaged("the commit can't be listed") from exc
        return dict(_regular_documents(listing))

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


def _open_plainly(path: str, flags: int) -> int:
    """Follows no link and waits for nobody."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _regular_documents(listing: bytes) -> Iterator[tuple[str, tuple[str, int]]]:
    """Takes `git ls-tree -r -z -l` apart: `<mode> <type> <object> <size>\\t<path>\\0`."""
    for entry in listing.split(b"\0")[:-1]:
        meta, _, raw = entry.partition(b"\t")
        mode, _, oid, size = meta.decode("ascii").split()
        path = os.fsdecode(raw)
        *folders, name = path.split("/")
        regular = mode.startswith("100")
        if regular and documents.wanted_file(name) and all(map(documents.wanted_folder, folders)):
            yield path, (oid, int(size))
