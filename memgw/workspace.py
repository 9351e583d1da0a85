"""One branch on this disk: its worktree, its index, and the proof that the index is of a commit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from memgw import files, locks
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.engine import Engine, Place
from memgw.errors import (
    FULL,
    CommitUnusable,
    Damaged,
    EngineFailed,
    EngineMissing,
    IndexDamaged,
    MemgwError,
    MirrorDamaged,
    WorkspaceBusy,
    WorktreeDamaged,
)
from memgw.index import COLLECTION, IndexFolder
from memgw.mirror import Mirror
from memgw.state import Stamp, State, StateFile, now
from memgw.worktree import Worktree

log = logging.getLogger(__name__)


_FOLDERS = (
    "git-mirror",
    "workspaces",
    "qmd-cache",
    "qmd-config",
    "qmd-config/home",
    "state",
    "state/notes",
    "locks",
    "locks/workspaces",
)


class UpdateOn(StrEnum):
    """QMD_UPDATE_ON_LATEST_QUERY: what a query that wants the latest does when the commit did not move."""

    PROOF = "true"
    ALWAYS = "always"
    MOVED = "false"  # looks at the file's identity and no further


@dataclass(frozen=True)
class Held:
    """The workspace lock in one's hands. `descriptor` is what child processes inherit."""

    descriptor: int
    deadline: Deadline


@dataclass(frozen=True)
class Layout:
    """Where things are, and what makes an index good; the same for all workspaces of a gateway."""

    data: Path
    prefix: str
    update_on: UpdateOn
    embed_model: str
    lock_timeout: float

    @property
    def states(self) -> Path:
        return self.data / "state"

    def make_folders(self) -> None:
        """All that has to be there before anything is done (DESIGN.md §4). `data` itself is the operator's."""
        for name in _FOLDERS:
            files.make_folder(self.data / name)


class Workspace:
    """Reading takes no lock: a reader takes the stamp, searches, and looks whether the stamp `still` holds.
    Writing needs `hold`; a writer takes the stamp back before it changes anything."""

    def __init__(self, branch: Branch, layout: Layout, mirror: Mirror, engine: Engine) -> None:
        self.branch, self.name = branch, branch.workspace
        self._layout, self._mirror, self._engine = layout, mirror, engine
        self.collection = f"{layout.prefix}-{self.name}"
        self.record = StateFile(layout.states, self.name)
        self.index = IndexFolder(layout.data / "qmd-cache" / self.collection)
        self._lock = layout.data / "locks" / "workspaces" / f"{self.name}.lock"
        self._worktree = Worktree(layout.data / "workspaces" / self.name, mirror)

    def state(self) -> State:
        """What is known, or the state of a workspace that does not exist yet."""
        known = self.record.load()
        return known if known and known.branch == self.branch.name else State(self.branch.name)

    def proven(self, commit: str | None = None) -> Stamp | None:
        """The stamp, if the index on disk is what was stamped, and of `commit` (of any commit when None).

        The proof is the stamp, the engine's version, the identity of the file, and the number of its documents.
        """
        stamp = self.state().stamp
        if not stamp or (commit and stamp.commit != commit):
            return None
        if not self._readable(stamp) or stamp.embed_model != self._layout.embed_model:
            return None
        return stamp if self._sound(stamp) else None

    def still(self, stamp: Stamp) -> bool:
        """Whether nothing was changed since `stamp` was read: then what was searched meanwhile is whole."""
        return self.state().stamp == stamp and self.index.identity(stamp.identity.file) == stamp.identity

    def synced_at(self) -> str | None:
        """When the remote was last known to have the stamped commit, else the one in the worktree."""
        state, notes = self.state(), self.record.notes()
        commit = state.stamp.commit if state.stamp else state.worktree_commit
        return notes.asked_at if commit and notes.asked_commit == commit else state.synced_at

    def place(self, stamp: Stamp) -> Place:
        """Where the engine finds the stamped index."""
        return self._place(stamp.identity.file)

    @contextmanager
    def hold(self, deadline: Deadline, already: Held | None = None) -> Iterator[Held]:
        """Holds the workspace lock: one writer. Does nothing when it is held `already`. Raises WorkspaceBusy."""
        if already:
            yield already
            return
        with locks.hold(self._lock, deadline, self._layout.lock_timeout) as descriptor:
            self.record.remove_leftovers()
            yield Held(descriptor, deadline)

    def bring(self, commit: str, asked_at: str, held: Held) -> tuple[Stamp, str]:
        """Brings the workspace to `commit`, or to a newer one if the remote moves meanwhile: fetch, align, index.

        Returns the stamp, and when the remote had its commit. What is found damaged is thrown away and made again.
        """
        seen = self._mirror.identity()
        try:
            return self._bring(commit, asked_at, held)
        except WorktreeDamaged as exc:
            self._report(exc)
        except MirrorDamaged as exc:
            self._report(exc)
            self._mirror.remake(seen, held.deadline)
        self._worktree.remove()
        seen = self._mirror.identity()
        try:
            return self._bring(commit, asked_at, held)
        except WorktreeDamaged as exc:
            self._report(exc)
            if self._mirror.sound(held.deadline):
                raise CommitUnusable("the newest commit of the branch can't be laid out as files") from exc
        except MirrorDamaged as exc:  # or it was made again by another request, and lacks our branch
            self._report(exc)
        self._mirror.remake(seen, held.deadline)
        self._worktree.remove()
        return self._bring(commit, asked_at, held)

    def distrust(self, stamp: Stamp, held: Held) -> bool:
        """After a search that failed: takes the stamp back if the index is broken, and says whether it is."""
        state = self.state()
        if state.stamp != stamp:
            return True
        try:
            wanted = self._worktree.documents(stamp.commit, held.deadline, held.descriptor)
            self.index.check(stamp.identity.file, wanted, deep=True)
        except Damaged as exc:
            self._report(exc)
            self._save(state.but(stamp=None), held)
            return True
        return False

    def _bring(self, commit: str, asked_at: str, held: Held) -> tuple[Stamp, str]:
        deadline = held.deadline
        self._mirror.prepare(deadline)
        if self._mirror.tip(self.branch, deadline) != commit:
            asked_at = now()
            commit = self._mirror.fetch(self.branch, deadline)
        try:
            self._worktree.align(commit, deadline, held.descriptor)
            with deadline.step("index"):
                stamp = self._index(commit, asked_at, held)
            self._save(self.state().but(stamp=stamp, worktree_bytes=files.size(self._worktree.path)), held)
            self.index.keep_only(stamp.identity.file)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            raise WorktreeDamaged("its files can't be used") from exc
        log.info("synced", extra={"branch": self.branch.name, "commit": commit, "documents": stamp.documents})
        return stamp, asked_at

    def _index(self, commit: str, asked_at: str, held: Held) -> Stamp:
        """Updates the index in place if it is the one that was stamped; builds a new one in any other case."""
        wanted = self._worktree.documents(commit, held.deadline, held.descriptor)
        state = self.state()
        old = state.stamp if state.stamp and self._readable(state.stamp) and self._sound(state.stamp) else None
        self._save(state.but(worktree_commit=commit, stamp=None, synced_at=asked_at), held)
        if old:
            try:
                return self._updated(old.identity.file, commit, wanted, held)
            except EngineMissing:
                raise
            except (IndexDamaged, EngineFailed) as exc:
                self._report(exc)
        try:
            return self._updated(self.index.new_file(), commit, wanted, held, new=True)
        except IndexDamaged as exc:
            raise EngineFailed("the search engine built an index that is not the commit's") from exc

    def _updated(
        self,
        file: str,
        commit: str,
        wanted: dict[str, str],
        held: Held,
        *,
        new: bool = False,
    ) -> Stamp:
        """Has the engine update `file`, believes nothing, and stamps what stands the comparison with `wanted`.

        A new index may lack documents that the engine can't take in, and the answers then say so; one that was
        updated may lack only those with unreadable names.
        """
        self._engine.update(self._place(file), held.deadline, held.descriptor)
        self.index.settle(file)
        identity = self.index.identity(file)
        lacking = self.index.check(file, wanted)
        if not new and any(wanted[path] for path in lacking):
            raise IndexDamaged("the index lacks documents of the commit")
        if identity is None or self.index.identity(file) != identity:
            raise IndexDamaged("another process writes to the index")
        return Stamp(
            serial=uuid4().hex,
            commit=commit,
            qmd=self._engine.version(),
            collection=COLLECTION,
            embed_model=self._layout.embed_model,
            identity=identity,
            documents=len(wanted) - len(lacking),
            skipped=len(lacking),
        )

    def _readable(self, stamp: Stamp) -> bool:
        """Whether this engine can go on with the stamped index."""
        return (stamp.qmd, stamp.collection) == (self._engine.version(), COLLECTION)

    def _sound(self, stamp: Stamp) -> bool:
        """Whether the file is the one that was stamped, and untouched since."""
        file = stamp.identity.file
        if self.index.identity(file) != stamp.identity:
            return False
        if self._layout.update_on is UpdateOn.MOVED:
            return True
        try:
            return self.index.documents(file) == stamp.documents
        except IndexDamaged:
            return False

    def _save(self, state: State, held: Held) -> None:
        """Only in the possession of the lock: its file may have been deleted under us."""
        if not locks.is_held(self._lock, held.descriptor):
            raise WorkspaceBusy("the lock of the branch was taken away", locks.RETRY_AFTER_SECONDS)
        self.record.save(state)

    def _place(self, file: str) -> Place:
        return Place(self.collection, self._worktree.path, self.index.path, file)

    def _report(self, exc: MemgwError) -> None:
        log.warning("healing", extra={"branch": self.branch.name, "reason": exc.detail}, exc_info=exc)
