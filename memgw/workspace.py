"""One branch on this disk: its worktree, its index, and the proof that the index is of a commit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from memgw import documents, files, locks
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.engine import Engine, Place
from memgw.errors import (
    Damaged,
    EngineFailed,
    EngineMissing,
    IndexDamaged,
    MemgwError,
    MirrorDamaged,
    WorktreeDamaged,
    storage_full_translated,
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
    MOVED = "false"


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
        if self._layout.update_on is UpdateOn.MOVED:
            return stamp if (self.index.path / stamp.identity.file).is_file() else None
        return stamp if self._sound(stamp) else None

    def still(self, stamp: Stamp) -> bool:
        """Whether nothing was changed since `stamp` was read: then what was searched meanwhile is whole."""
        return self.state().stamp == stamp and (
            self._layout.update_on is UpdateOn.MOVED or self.index.identity(stamp.identity.file) == stamp.identity
        )

    def place(self, stamp: Stamp) -> Place:
        """Where the engine finds the stamped index."""
        return self._place(stamp.identity.file)

    @contextmanager
    def hold(self, deadline: Deadline, already: Held | None = None) -> Iterator[Held]:
        """Holds the workspace lock: one writer. Does nothing when it is held `already`. Raises WorkspaceBusy."""
        if already:
            yield already
            return
        path = self._layout.data / "locks" / "workspaces" / f"{self.name}.lock"
        with locks.hold(path, deadline, self._layout.lock_timeout) as descriptor:
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
            self._worktree.remove()
        except MirrorDamaged as exc:
            self._report(exc)
            self._mirror.remake(seen, held.deadline)
        try:
            return self._bring(commit, asked_at, held)
        except (WorktreeDamaged, MirrorDamaged) as exc:
            # a worktree that can't be made: the mirror lacks objects of it, or was made anew by another request
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
            self.record.save(state.but(stamp=None))
            return True
        return False

    def _bring(self, commit: str, asked_at: str, held: Held) -> tuple[Stamp, str]:
        deadline = held.deadline
        self._mirror.prepare(deadline)
        if self._mirror.tip(self.branch, deadline) != commit:
            asked_at = now()
            commit = self._mirror.fetch(self.branch, deadline)
        state = self.state()
        with storage_full_translated():
            self._worktree.align(commit, deadline, held.descriptor)
            with deadline.step("index"):
                stamp = self._index(commit, state, held)
            size = files.size(self._worktree.path)
            self.record.save(state.but(worktree_commit=commit, stamp=stamp, synced_at=asked_at, worktree_bytes=size))
            self.index.keep_only(stamp.identity.file)
        log.info("synced", extra={"branch": self.branch.name, "commit": commit, "documents": stamp.documents})
        return stamp, asked_at

    def _index(self, commit: str, state: State, held: Held) -> Stamp:
        """Updates the index in place if it was whole; builds a new one from nothing in any other case."""
        wanted = self._worktree.documents(commit, held.deadline, held.descriptor)
        self.record.save(state.but(worktree_commit=commit, stamp=None))
        old = state.stamp
        if old and self._readable(old):
            try:
                return self._updated(old.identity.file, commit, wanted, held, suspect=not self._sound(old))
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
        suspect: bool = False,
    ) -> Stamp:
        """Has the engine update `file`, believes nothing, and stamps what stands the comparison with `wanted`.

        A new index may lack documents that the engine can't take in, and the answers then say so; one that was
        updated may lack only those with unreadable names.
        """
        self._engine.update(self._place(file), held.deadline, held.descriptor)
        lacking = self.index.check(file, wanted, deep=suspect)
        if not new and any(map(documents.readable, lacking)):
            raise IndexDamaged("the index lacks documents of the commit")
        self.index.settle(file)
        identity = self.index.identity(file)
        if identity is None:
            raise IndexDamaged("another process keeps the index from being settled")
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
        try:
            return self.index.identity(file) == stamp.identity and self.index.documents(file) == stamp.documents
        except IndexDamaged:
            return False

    def _place(self, file: str) -> Place:
        return Place(self.collection, self._worktree.path, self.index.path, file)

    def _report(self, exc: MemgwError) -> None:
        log.warning("healing", extra={"branch": self.branch.name, "reason": exc.detail}, exc_info=exc)
