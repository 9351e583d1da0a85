"""One branch on this disk: its worktree, its index, and the proof that the index is of a commit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from memgw import files, locks
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.engine import Engine, Place
from memgw.errors import Damaged, IndexDamaged, MemgwError, WorkspaceBusy
from memgw.index import COLLECTION, IndexFolder
from memgw.layout import Layout, UpdateOn
from memgw.mirror import Mirror
from memgw.state import Stamp, State, StateFile
from memgw.worktree import Worktree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """The workspace lock in one's hands. `descriptor` is what child processes inherit."""

    descriptor: int
    deadline: Deadline


class Workspace:
    """Reading takes no lock: a reader takes the stamp, searches, and looks whether the stamp `still` holds.
    Writing needs `hold`; a writer takes the stamp back before it changes anything."""

    def __init__(self, branch: Branch, layout: Layout, mirror: Mirror, engine: Engine) -> None:
        self.branch, self.name = branch, branch.workspace
        self.layout, self.mirror, self.engine = layout, mirror, engine
        self.collection = f"{layout.prefix}-{self.name}"
        self.record = StateFile(layout.states, self.name)
        self.index = IndexFolder(layout.index(self.name))
        self._lock = layout.lock(self.name)
        self.worktree = Worktree(layout.worktree(self.name), mirror)

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
        ours = self.readable(stamp) and stamp.embed_model == self.layout.embed_model
        return stamp if ours and self.sound(stamp) else None

    def still(self, stamp: Stamp) -> bool:
        """Whether nothing was changed since `stamp` was read: then what was searched meanwhile is whole."""
        return self.state().stamp == stamp and self.index.identity(stamp.identity.file) == stamp.identity

    def pending_embeddings(self, stamp: Stamp) -> int:
        """How many different contents of the stamped index have no vector yet. Raises IndexDamaged."""
        return self.layout.counts.pending_embeddings(self.index, stamp.identity, self.layout.embed_model)

    def has_vectors(self, stamp: Stamp) -> bool:
        """Whether any content of the stamped index has its vectors, or there is no content. Raises IndexDamaged."""
        contents = self.layout.counts.contents(self.index, stamp.identity)
        return contents == 0 or self.pending_embeddings(stamp) < contents

    def synced_at(self) -> str | None:
        """When the remote was last known to have the stamped commit, else the one in the worktree."""
        state, notes = self.state(), self.record.notes()
        commit = state.stamp.commit if state.stamp else state.worktree_commit
        return notes.asked_at if commit and notes.asked_commit == commit else state.synced_at

    def place(self, stamp: Stamp) -> Place:
        """Where the engine finds the stamped index."""
        return self.place_of(stamp.identity.file)

    @contextmanager
    def hold(self, deadline: Deadline, already: Held | None = None, at_most: float | None = None) -> Iterator[Held]:
        """Holds the workspace lock: one writer. Does nothing when it is held `already`. `at_most`: seconds to wait for
        it, if less than others do. Raises WorkspaceBusy."""
        if already:
            yield already
            return
        self.layout.make_folders()
        patience = self.layout.lock_timeout if at_most is None else min(at_most, self.layout.lock_timeout)
        with locks.hold(self._lock, deadline, patience) as descriptor:
            self.record.remove_leftovers()
            yield Held(descriptor, deadline)

    def distrust(self, stamp: Stamp, held: Held) -> bool:
        """After a search that failed: takes the stamp back if the index is broken, and says whether it is."""
        state = self.state()
        if state.stamp != stamp:
            return True
        try:
            wanted = self.worktree.documents(stamp.commit, held.deadline, held.descriptor)
            self.index.check(stamp.identity.file, wanted, deep=True)
        except Damaged as exc:
            self.report(exc)
            self.save(state.but(stamp=None), held)
            return True
        return False

    def readable(self, stamp: Stamp) -> bool:
        """Whether this engine can go on with the stamped index."""
        return (stamp.qmd, stamp.collection) == (self.engine.version(), COLLECTION)

    def sound(self, stamp: Stamp) -> bool:
        """Whether the file is the one that was stamped, and untouched since."""
        file = stamp.identity.file
        if self.index.identity(file) != stamp.identity:
            return False
        if self.layout.update_on is UpdateOn.MOVED:
            return True
        try:
            return self.layout.counts.documents(self.index, stamp.identity) == stamp.documents
        except IndexDamaged:
            return False

    def save(self, state: State, held: Held) -> None:
        """Keeps the state. Only in the possession of the lock: its file may have been deleted under us."""
        self._must_be_held(held)
        self.record.save(state)

    def remove(self, held: Held) -> None:
        """Takes away all of it but the lock and its ref in the mirror. Killed in the middle, it leaves a workspace
        without a state: the next query makes it again."""
        self._must_be_held(held)
        for place in self.layout.places(self.name):
            files.remove(place)

    def _must_be_held(self, held: Held) -> None:
        if not locks.is_held(self._lock, held.descriptor):
            raise WorkspaceBusy("the lock of the branch was taken away", locks.RETRY_AFTER_SECONDS)

    def place_of(self, file: str) -> Place:
        """Where the engine finds or makes an index file of this workspace."""
        return Place(self.collection, self.worktree.path, self.index.path, file)

    def report(self, exc: MemgwError) -> None:
        """Logs what was found damaged and is about to be made again."""
        log.warning("healing", extra={"branch": self.branch.name, "reason": exc.detail}, exc_info=exc)
