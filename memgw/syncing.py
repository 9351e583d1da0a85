"""Brings a workspace to a commit: fetch, align, index, stamp. What is found damaged is thrown away and made again."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from memgw import files, metrics
from memgw.branch import Branch
from memgw.errors import (
    FULL,
    CommitUnusable,
    EngineBadOutput,
    EngineFailed,
    EngineMissing,
    HostAway,
    IndexDamaged,
    InvalidBranch,
    MirrorDamaged,
    WorktreeDamaged,
)
from memgw.index import COLLECTION
from memgw.indexer import Base, Built, Indexer
from memgw.layout import UpdateOn
from memgw.objects import SUBMODULE, Blobs, Difference
from memgw.state import Stamp, all_states, now
from memgw.workspace import Held, Workspace

log = logging.getLogger(__name__)

_MANY = 200
"""So many changed files are brought in one by one, whatever they are of; above that, up to half of a branch."""


@dataclass(frozen=True)
class _Start:
    """An index to go on from, from nothing when `base` is None. `take` brings it here and returns its name. `other`:
    whose it is, if not our own."""

    base: Base | None
    take: Callable[[], str]
    other: Workspace | None = None


class Syncer:
    """Does it for one workspace, in the possession of its lock; for one request."""

    def __init__(self, workspace: Workspace, held: Held) -> None:
        self._workspace, self._held, self._deadline = workspace, held, held.deadline
        self._mirror, self._worktree, self._engine = workspace.mirror, workspace.worktree, workspace.engine
        self._indexer = Indexer(workspace.index, self._engine, self._mirror.objects)
        self._asked_at = ""
        self._way = ""

    def bring(self, commit: str, asked_at: str) -> tuple[Stamp, str]:
        """Brings the workspace to `commit`, or to a newer one if the remote moves meanwhile.

        Returns the stamp, and when the remote had its commit (`asked_at`: when it had `commit`).
        """
        with metrics.syncing() as ways:
            brought = self._heal(commit, asked_at)
            ways.append(self._way)
        return brought

    def _heal(self, commit: str, asked_at: str) -> tuple[Stamp, str]:
        seen = self._mirror.identity()
        try:
            return self._bring(commit, asked_at)
        except WorktreeDamaged as exc:
            self._workspace.report(exc)
        except MirrorDamaged as exc:
            self._workspace.report(exc)
            self._mirror.remake(seen, self._deadline)
        self._worktree.remove()
        seen = self._mirror.identity()
        try:
            return self._bring(commit, asked_at)
        except (WorktreeDamaged, MirrorDamaged) as exc:
            self._workspace.report(exc)
            remade = self._mirror.identity() != seen  # by another request: it lacks our branch
            if not remade and self._mirror.sound(self._deadline):
                raise CommitUnusable("the newest commit of the branch can't be laid out as files") from exc
        self._mirror.remake(seen, self._deadline)
        self._worktree.remove()
        return self._bring(commit, asked_at)

    def _bring(self, commit: str, asked_at: str) -> tuple[Stamp, str]:
        self._mirror.prepare(self._deadline)
        if self._mirror.tip(self._workspace.branch, self._deadline) != commit:
            asked_at = now()
            commit = self._mirror.fetch(self._workspace.branch, self._deadline)
        self._asked_at = asked_at
        try:
            stamp = self._index(commit)
            self._workspace.index.keep_only(stamp.identity.file)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            raise WorktreeDamaged("its files can't be used") from exc
        facts = {"branch": self._workspace.branch.name, "commit": commit, "documents": stamp.documents}
        log.info("synced", extra=facts)
        return stamp, asked_at

    def _index(self, commit: str) -> Stamp:
        """Goes on from the index that was stamped, or from another branch's; builds a new one in any other case."""
        old = self._workspace.state().stamp
        if old and not (self._workspace.readable(old) and self._workspace.sound(old)):
            old = None
        thorough = self._workspace.layout.update_on is UpdateOn.ALWAYS and old and old.commit == commit
        if self._engine.incremental and not thorough:
            for start in self._starts(old, commit):
                try:
                    stamp = self._by_difference(start, commit)
                except EngineMissing:
                    raise
                except HostAway as exc:
                    self._workspace.report(exc)
                    break
                except (IndexDamaged, EngineFailed, EngineBadOutput) as exc:
                    self._workspace.report(exc)
                else:
                    if stamp:
                        self._way = "changes"
                        return stamp
        self._way = "whole"
        return self._by_reading(commit)

    def _starts(self, old: Stamp | None, commit: str) -> Iterator[_Start]:
        """Indexes to go on from, the best first; the last one is none."""
        if old:
            yield _Start(_base(old), lambda: old.identity.file)
        if relative := self._relative(commit):  # asked for only when there is none of our own, or it is no help
            other, stamp = relative
            yield _Start(_base(stamp), lambda: self._adopted(other, stamp), other)
        yield _Start(None, self._workspace.index.new_file)

    def _relative(self, commit: str) -> tuple[Workspace, Stamp] | None:
        """The branch whose index is nearest: of the newest commit in our history, else the default branch."""
        ours = self._workspace
        found = {}
        for file in all_states(ours.layout.states):
            state = file.load()
            if state and state.stamp and state.branch != ours.branch.name and ours.readable(state.stamp):
                with suppress(InvalidBranch):  # a damaged state
                    other = Workspace(Branch.parse(state.branch), ours.layout, ours.mirror, ours.engine)
                    found[state.stamp.commit] = other, state.stamp
        near = self._mirror.objects.newest_of(found, commit, self._deadline) if found else None
        if near:
            return found[near]
        default = ours.layout.default_branch
        return next((item for item in found.values() if item[0].branch.name == default), None)

    def _adopted(self, other: Workspace, stamp: Stamp) -> str:
        """A copy of another branch's index. Raises IndexDamaged when it is not, or no longer, what was stamped."""
        if not other.sound(stamp):
            raise IndexDamaged("the index to start from is not what was stamped")
        file = self._workspace.index.adopt(other.index.path / stamp.identity.file)
        if not other.still(stamp):
            raise IndexDamaged("the index to start from was changed meanwhile")
        return file

    def _by_difference(self, start: _Start, commit: str) -> Stamp | None:
        """None when so much differs that it is no help."""
        base = start.base
        with self._deadline.step("index"):
            old = base.commit if base else None
            differences = self._mirror.objects.differences(old, commit, self._deadline)
            if differences is None or (base and len(differences) > max(_MANY, base.documents // 2)):
                return None
            blobs = self._mirror.objects.blobs(self._deadline)
            blobs.keep([item.new.blob for item in differences if item.new and item.new.mode != SUBMODULE])
        size = self._align(start, differences, blobs, commit)
        with self._deadline.step("index"):
            place = self._workspace.place_of(start.take())
            self._take_back(commit)
            built = self._indexer.by_difference(base, place, commit, differences, blobs, self._deadline)
            return self._stamped(built, commit, size)

    def _by_reading(self, commit: str) -> Stamp:
        size = self._aligned(commit)
        with self._deadline.step("index"):
            held = self._held.descriptor
            wanted = self._worktree.documents(commit, self._deadline, held)
            old = self._workspace.state().stamp
            self._take_back(commit)
            if old and self._workspace.readable(old) and self._workspace.sound(old):
                try:
                    place = self._workspace.place(old)
                    built = self._indexer.by_reading(place, wanted, self._deadline, held, new=False)
                    return self._stamped(built, commit, size)
                except EngineMissing:
                    raise
                except (IndexDamaged, EngineFailed) as exc:
                    self._workspace.report(exc)
            try:
                place = self._workspace.place_of(self._workspace.index.new_file())
                built = self._indexer.by_reading(place, wanted, self._deadline, held, new=True)
            except IndexDamaged as exc:
                raise EngineFailed("the search engine built an index that is not the commit's") from exc
            return self._stamped(built, commit, size)

    def _align(self, start: _Start, differences: Sequence[Difference], blobs: Blobs, commit: str) -> int:
        """Brings the worktree to `commit` and returns its bytes."""
        base, other = start.base, start.other
        state = (other or self._workspace).state()
        if base and state.worktree_commit == base.commit:
            self._disown()
            try:
                if other:
                    self._worktree.resemble(other.worktree, base.commit, self._deadline, self._held.descriptor)
                    if other.state() != state:
                        raise WorktreeDamaged("the one to start from was changed meanwhile")
                grown = self._worktree.apply(differences, blobs, base.commit, commit, self._deadline)
                return state.worktree_bytes + grown
            except WorktreeDamaged as exc:
                log.info("realigned", extra={"branch": self._workspace.branch.name, "reason": exc.detail})
        return self._aligned(commit)

    def _aligned(self, commit: str) -> int:
        """Has Git bring the worktree to `commit`, whatever is in it, and returns its bytes."""
        self._disown()
        self._worktree.align(commit, self._deadline, self._held.descriptor)
        return files.size(self._worktree.path)

    def _disown(self) -> None:
        """The worktree is of no commit while it is brought to one: whoever finds it like that aligns it anew."""
        state = self._workspace.state()
        if state.worktree_commit:
            self._workspace.save(state.but(worktree_commit=None), self._held)

    def _take_back(self, commit: str) -> None:
        """The stamp, before anything is changed."""
        state = self._workspace.state()
        self._workspace.save(state.but(worktree_commit=commit, stamp=None, synced_at=self._asked_at), self._held)

    def _stamped(self, built: Built, commit: str, size: int) -> Stamp:
        stamp = Stamp(
            serial=uuid4().hex,
            commit=commit,
            qmd=self._engine.version(),
            collection=COLLECTION,
            embed_model=self._workspace.layout.embed_model,
            identity=built.identity,
            documents=built.documents,
            skipped=built.skipped,
        )
        state = self._workspace.state()
        if state.embedded_commit == commit and self._workspace.pending_embeddings(stamp):  # of an index that is no more
            state = state.but(embedded_commit=None)
        self._workspace.save(state.but(stamp=stamp, worktree_bytes=size), self._held)
        return stamp


def _base(stamp: Stamp) -> Base:
    return Base(stamp.commit, stamp.documents, stamp.skipped)
