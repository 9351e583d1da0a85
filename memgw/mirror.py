"""The bare mirror that all workspaces share."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from memgw import files, locks, refs
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, MirrorDamaged, StorageFull, ToolError, ToolFailed, ToolTimeout
from memgw.gitcmd import Commands, raise_remote, translate
from memgw.objects import Objects
from memgw.remote import Remote

log = logging.getLogger(__name__)

_IDENTITY = "memgw-identity"

# Bytes on disk = bytes of the blobs, whatever .gitattributes of the branch or settings of the
# operator say: info/attributes outranks both (gitattributes(5)).
_ATTRIBUTES = "* -text -ident !eol !filter !working-tree-encoding\n"

# Of objects that nothing leads to: far longer than any request lives.
_EXPIRE = "2.weeks.ago"

# A repack deletes what it copied, all of the mirror: then it is worth the wait that the copy is on the disk.
_SYNCED = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.fsync",
    "GIT_CONFIG_VALUE_0": "objects,derived-metadata",
}


class Mirror:
    """`<data>/git-mirror/repo.git`. Takes the mirror lock by itself, always inside a workspace's."""

    def __init__(self, data: Path, remote: Remote, *, lock_timeout: float) -> None:
        self.path = data / "git-mirror" / "repo.git"
        self._remote, self._lock_timeout = remote, lock_timeout
        self._lock = data / "locks" / "mirror.lock"
        self.objects = Objects(self.path, remote.env)

    @property
    def env(self) -> dict[str, str]:
        return self._remote.env

    def tip(self, branch: Branch, deadline: Deadline) -> str | None:
        """The commit last fetched for `branch`, or None. Raises MirrorDamaged."""
        if found := refs.read(os.fsencode(self.path), branch.mirror_ref):
            return found
        try:
            out: bytes = self._git(deadline).rev_parse(
                "--verify", "--quiet", "--end-of-options", f"{branch.mirror_ref}^{{commit}}"
            )
        except ToolFailed as exc:
            if exc.status == 1:
                return None
            raise MirrorDamaged("the mirror can't be read") from exc
        except ToolError as exc:
            raise translate(exc, deadline) or MirrorDamaged("the mirror can't be read") from exc
        return out.decode().strip()

    def fetch(self, branch: Branch, deadline: Deadline) -> str:
        """Fetches `branch` and returns the commit that it had, which may be newer than one asked before.

        Raises as `Remote.ask` does, and MirrorDamaged, StorageFull, WorkspaceBusy.
        """
        with self.lock(deadline) as descriptor, deadline.step("fetch"):
            git = self._git(deadline, descriptor)
            try:
                git.fetch(
                    "--quiet", "--no-tags", "--no-write-fetch-head", "--force",
                    "--", self._remote.url, f"+{branch.ref}:{branch.mirror_ref}",
                )  # fmt: skip
            except ToolFailed as exc:
                if "couldn't find remote ref" in exc.stderr:
                    raise BranchNotFound(f"the remote has no branch {branch.name!r}") from exc
                if not self._sound(deadline):
                    raise MirrorDamaged("the mirror can't take in what the remote has") from exc
                raise_remote(exc, deadline)
            except ToolError as exc:
                raise_remote(exc, deadline)
        tip = self.tip(branch, deadline)
        if tip is None:
            raise MirrorDamaged("the mirror lost what was just fetched")
        return tip

    def prepare(self, deadline: Deadline) -> None:
        """Makes the mirror when there is none, and its settings as they have to be."""
        self._remote.config.write()
        if self.identity() is None:
            with self.lock(deadline) as descriptor:
                if self.identity() is None:
                    self._make(deadline, descriptor)
        files.ensure(self.path / "info" / "attributes", _ATTRIBUTES)

    def sound(self, deadline: Deadline) -> bool:
        """Whether all that the mirror should have is there and whole. Reads all of it: for when something failed.

        Not a full fsck, which also finds fault with what is in commits and trees: that was in the remote like that.
        """
        with self.lock(deadline):  # a pack that is replaced while it is looked at is not broken
            return self._sound(deadline)

    def _sound(self, deadline: Deadline) -> bool:
        git = self._git(deadline)
        packs = [str(path) for path in (self.path / "objects" / "pack").glob("*.idx")]
        try:
            git.fsck("--connectivity-only", "--no-dangling", "--no-progress")
            if packs:
                git.verify_pack("--", *packs)
        except ToolFailed:
            return False
        except ToolError as exc:
            if late := translate(exc, deadline):
                raise late from exc
        return True

    def refs(self, deadline: Deadline) -> set[str]:
        """The refs that stand for branches. Raises MirrorDamaged."""
        if self.identity() is None:
            return set()
        try:
            out: bytes = self._git(deadline).for_each_ref("--format=%(refname)", "refs/memgw/")
        except ToolError as exc:
            raise translate(exc, deadline) or MirrorDamaged("the mirror can't be read") from exc
        return set(out.decode("ascii", "replace").split())

    def forget(self, refs: Iterable[str], deadline: Deadline, *held: int) -> int:
        """Takes away refs, and what is kept of worktrees that are gone; a later `repack` takes what only they led to.
        Returns the bytes that were freed. Raises MirrorDamaged, WorkspaceBusy."""
        if self.identity() is None:
            return 0
        with self.lock(deadline) as descriptor:
            places = self.path / "worktrees", self.path / "refs", self.path / "packed-refs"
            before = files.space(*places)
            git = self._git(deadline, descriptor, *held)
            try:
                git.worktree("prune", "--expire", "now")
                for ref in refs:
                    git.update_ref("-d", ref)
            except ToolError as exc:
                raise translate(exc, deadline) or MirrorDamaged("the mirror's refs can't be taken away") from exc
            return before - files.space(*places)

    def packs(self) -> int:
        """How many files Git has to look into for an object."""
        return len(list((self.path / "objects" / "pack").glob("*.pack")))

    def repack(self, deadline: Deadline) -> int:
        """Puts all packs into one, and drops what nothing leads to, if it is old; returns how many bytes it freed.
        Where that takes more than half of the time or the space that is free, or a ref or a worktree is damaged, it
        puts the small packs together and drops nothing.

        Readers need no lock: Git looks again for packs when an object is not where it was. What a sync uses is young,
        or a ref or a worktree leads to it. Raises MirrorDamaged, WorkspaceBusy, StorageFull, DeadlineExceeded.
        """
        if self.identity() is None:
            return 0
        with self.lock(deadline) as descriptor:
            before = files.space(self.path)
            env = self.env | _SYNCED | {"GIT_DIR": str(self.path)}
            git = Commands(self.path.parent, env, deadline, (descriptor,))
            whole = Commands(self.path.parent, env, deadline, (descriptor,), at_most=deadline.left() / 2)
            try:
                git.worktree("prune", "--expire", "now")
                try:
                    if files.free(self.path) < 2 * before:
                        raise StorageFull("a copy of the mirror would take too much of what is free")
                    whole.repack("--cruft", "-d", "-q", "-n", f"--cruft-expiration={_EXPIRE}")
                except (ToolFailed, ToolTimeout, StorageFull) as exc:
                    log.info("repacked_in_part", exc_info=exc)
                    self._remove_leftovers()
                    git.repack("--geometric=2", "-d", "-q", "-n")
            except ToolError as exc:
                raise translate(exc, deadline) or MirrorDamaged("the mirror can't be repacked") from exc
            return before - files.space(self.path)

    def identity(self) -> str | None:
        """Changes when the mirror is made again; None when there is none."""
        try:
            return (self.path / _IDENTITY).read_text("ascii")
        except (OSError, UnicodeDecodeError):
            return None

    def remake(self, seen: str | None, deadline: Deadline) -> None:
        """Throws the mirror away and makes an empty one; worktrees of it have to be made again.

        Does nothing when its identity is no longer `seen`: then somebody else has just done it.
        """
        with self.lock(deadline) as descriptor:
            if self.identity() == seen:
                self._make(deadline, descriptor)

    @contextmanager
    def lock(self, deadline: Deadline) -> Iterator[int]:
        """Holds the mirror lock, with what a killed owner left removed. Yields the lock's descriptor."""
        with locks.hold(self._lock, deadline, self._lock_timeout) as descriptor:
            if self.path.is_dir():
                self._remove_leftovers()
            yield descriptor

    def _git(self, deadline: Deadline, *keep_open: int) -> Commands:
        return Commands(self.path.parent, self.env | {"GIT_DIR": str(self.path)}, deadline, keep_open)

    def _make(self, deadline: Deadline, descriptor: int) -> None:
        files.remove(self.path)
        aside = self.path.with_name("new.git")
        files.remove(aside)
        git = Commands(self.path.parent, self.env, deadline, (descriptor,))
        try:
            git.init("--bare", "--quiet", "--initial-branch=memgw", "--", str(aside))
        except ToolError as exc:
            raise translate(exc, deadline) or MirrorDamaged("the mirror can't be made") from exc
        (aside / _IDENTITY).write_text(uuid4().hex, "ascii")
        aside.rename(self.path)

    def _remove_leftovers(self) -> None:
        """Locks and half-written packs of a killed git. Nobody else is at work: we hold the mirror lock."""
        files.remove_leftovers(self._remote.config.path)
        files.remove_leftovers(self.path / "info" / "attributes")
        for name in ("config.lock", "packed-refs.lock", "packed-refs.new", "HEAD.lock", "shallow.lock"):
            files.remove(self.path / name)
        for lock in (self.path / "refs").glob("**/*.lock"):
            files.remove(lock)
        for place in ("objects/pack/tmp_*", "objects/pack/.tmp-*", "objects/tmp_obj_*", "objects/incoming-*"):
            for leftover in self.path.glob(place):
                files.remove(leftover)
