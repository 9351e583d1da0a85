"""One request from question to answer. This module is the story (DESIGN.md §2); others know how each step is done."""

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from time import monotonic

from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.engine import Engine, QueryType, Question
from memgw.errors import (
    EngineBadOutput,
    EngineFailed,
    EngineMissing,
    IndexDamaged,
    MemgwError,
    MirrorDamaged,
    NotAsAsked,
    storage_full_translated,
)
from memgw.ladder import Asking, Degraded, Found, Ladder, Landed, Moved
from memgw.layout import Layout, UpdateOn
from memgw.mirror import Mirror
from memgw.models import Models
from memgw.objects import Difference
from memgw.remote import Remote
from memgw.state import Stamp, now
from memgw.syncing import Syncer
from memgw.workspace import Held, Workspace

log = logging.getLogger(__name__)

TRIES_WITHOUT_LOCK = 2
WORTH_A_THREAD_MS = 5.0


@dataclass(frozen=True)
class Fresh:
    """An index that is proven, and what is known of the remote. `asked` is False when the remote was not."""

    stamp: Stamp
    synced_at: str
    asked: bool


@dataclass(frozen=True)
class Answer:
    """What `query` found, and how."""

    workspace: Workspace
    fresh: Fresh
    landed: Landed
    command: list[str]

    @property
    def degraded(self) -> list[Degraded]:
        return self.landed.notes + _skipped(self.fresh.stamp)


@dataclass(frozen=True)
class Ahead:
    """A search of the index with `stamp`, begun before it is known whether that is the newest."""

    stamp: Stamp
    found: "Future[Found]"


@dataclass(frozen=True)
class Change:
    """How many files differ between two commits; a rename counts as one deleted and one added."""

    added: int
    modified: int
    deleted: int

    @classmethod
    def of(cls, differences: Iterable[Difference]) -> "Change":
        kinds = [(item.old is not None, item.new is not None) for item in differences]
        return cls(kinds.count((False, True)), kinds.count((True, True)), kinds.count((True, False)))


@dataclass(frozen=True)
class Report:
    """What `sync` did. `previous`: the commit before; None for a new workspace or one that was lost."""

    workspace: Workspace
    fresh: Fresh
    previous: str | None
    change: Change
    degraded: list[Degraded]


class Gateway:
    """Answers from the newest commit of a branch. Safe to share between threads: it keeps nothing of a request but how
    long asking the remote took."""

    def __init__(self, layout: Layout, mirror: Mirror, remote: Remote, engine: Engine, models: Models) -> None:
        self.layout, self.mirror, self.remote, self.engine, self.models = layout, mirror, remote, engine, models
        self.ladder = Ladder(layout, engine, models)
        self._asking_ms = 0.0
        self._threads = ThreadPoolExecutor(512, "search")  # starts one when it is needed: after gunicorn's fork

    def query(
        self,
        branch: Branch,
        question: Question,
        deadline: Deadline,
        *,
        latest: bool = True,
        bodies: bool = False,
        strict: bool = False,
    ) -> Answer:
        """Searches the branch as it is in the remote now; as it is here when not `latest`, if it was ever fetched.

        What can't be found as asked is found in a way that needs less, and says so; `strict`: it raises NotAsAsked.
        """
        workspace = self.workspace(branch)
        ask = Asking(question, bodies, strict)
        with self._noting_errors(workspace):
            since = deadline.started
            ahead = self._ahead(workspace, ask, deadline) if latest else None
            for _ in range(TRIES_WITHOUT_LOCK):
                fresh = self._fresh(workspace, deadline, latest, since=since)
                answer = self._search(workspace, fresh, ask, deadline, ahead=ahead)
                if answer:
                    break
                ahead, since = None, monotonic()  # what was asked before is not of what others did meanwhile
            else:  # the branch moves faster than we search, or its index breaks as we look: keep it still
                with workspace.hold(deadline) as held:
                    fresh = self._fresh(workspace, deadline, latest, held, since=monotonic())
                    answer = self._search(workspace, fresh, ask, deadline, held)
            if not answer:
                raise EngineFailed("the index can't be kept whole")
            return answer

    def sync(self, branch: Branch, deadline: Deadline) -> Report:
        """Brings the branch's workspace to its newest commit without searching."""
        workspace = self.workspace(branch)
        with self._noting_errors(workspace):
            state = workspace.state()
            if state.synced_at and not state.stamp:  # it may be taken back for a moment, and come again
                with workspace.hold(deadline):
                    state = workspace.state()
            before = state.stamp
            fresh = self._fresh(workspace, deadline)
            fresh = replace(fresh, stamp=self.ladder.vectorized(workspace, fresh.stamp, deadline))
            commit, previous = fresh.stamp.commit, before.commit if before else None
            if previous == commit:
                return Report(workspace, fresh, previous, Change(0, 0, 0), _skipped(fresh.stamp))
            differences = self.mirror.objects.differences(previous, commit, deadline)
            if differences is None:  # the old commit is not in the mirror any more
                previous, differences = None, self.mirror.objects.differences(None, commit, deadline)
            return Report(workspace, fresh, previous, Change.of(differences or ()), _skipped(fresh.stamp))

    def workspace(self, branch: Branch) -> Workspace:
        """Makes nothing on disk."""
        return Workspace(branch, self.layout, self.mirror, self.engine)

    def _fresh(
        self,
        workspace: Workspace,
        deadline: Deadline,
        latest: bool = True,
        held: Held | None = None,
        since: float | None = None,
    ) -> Fresh:
        """ask → (hold → look again → fetch → align → index): the second half only when there is something to do."""
        before = workspace.state()
        if not latest and (fresh := self._as_it_stands(workspace, deadline, held)):
            return fresh
        asked = self.remote.ask(workspace.branch, deadline, since)
        self._asking_ms = deadline.timings_ms["ask"]
        stamp, asked_at = None, asked.at
        if self.layout.update_on is not UpdateOn.ALWAYS:
            stamp = workspace.proven(asked.commit)
        if not stamp:
            with workspace.hold(deadline, held) as hold:
                if workspace.state() != before:  # others were at work meanwhile: the branch may have moved again
                    asked = self.remote.ask(workspace.branch, deadline, since=monotonic())
                    stamp, asked_at = workspace.proven(asked.commit), asked.at
                if not stamp:
                    stamp, asked_at = Syncer(workspace, hold).bring(asked.commit, asked.at)
        workspace.record.note_asked(asked_at, stamp.commit)
        workspace.record.note_used()
        return Fresh(stamp, asked_at, asked=True)

    def _as_it_stands(self, workspace: Workspace, deadline: Deadline, held: Held | None) -> Fresh | None:
        """What is here, its index made whole again if need be; None when the branch was never fetched."""
        stamp, state = workspace.proven(), workspace.state()
        if not stamp and state.synced_at:
            with suppress(MirrorDamaged), workspace.hold(deadline, held) as hold:
                stamp = workspace.proven()
                if not stamp and (tip := self.mirror.tip(workspace.branch, deadline)):
                    stamp, _ = Syncer(workspace, hold).bring(tip, state.synced_at)
        if not stamp:
            return None
        workspace.record.note_used()
        return Fresh(stamp, workspace.synced_at() or now(), asked=False)

    def _ahead(self, workspace: Workspace, ask: Asking, deadline: Deadline) -> Ahead | None:
        """Starts to search what is here, where asking the remote takes long enough: mostly its tip has not moved."""
        if self._asking_ms < WORTH_A_THREAD_MS or self.layout.update_on is UpdateOn.ALWAYS:
            return None
        if ask.question.query_type is not QueryType.SEARCH:  # it may have to make vectors first
            return None
        stamp = workspace.proven()
        if not stamp:
            return None
        run = copy_context().run
        return Ahead(stamp, self._threads.submit(run, self.ladder.find, workspace, stamp, ask, deadline))

    def _search(
        self,
        workspace: Workspace,
        fresh: Fresh,
        ask: Asking,
        deadline: Deadline,
        held: Held | None = None,
        ahead: Ahead | None = None,
    ) -> Answer | None:
        """None when the index changed under the search, or is broken: then what was found is worth nothing."""
        try:
            if ahead and ahead.stamp == fresh.stamp:
                landed = Landed(fresh.stamp, ask, ahead.found.result(deadline.left()))
            else:
                landed = self.ladder.climb(workspace, fresh.stamp, ask, deadline, held)
        except Moved:
            return None
        except TimeoutError as exc:
            raise deadline.exceeded() from exc
        except EngineMissing:
            raise
        except (EngineFailed, EngineBadOutput, IndexDamaged):
            with workspace.hold(deadline, held) as hold:
                if workspace.distrust(fresh.stamp, hold):
                    return None
            raise
        if not workspace.still(landed.stamp):
            return None
        command = self.engine.explain(workspace.place(landed.stamp), landed.ask.question)
        return Answer(workspace, replace(fresh, stamp=landed.stamp), landed, command)

    @contextmanager
    def _noting_errors(self, workspace: Workspace) -> Iterator[None]:
        try:
            with storage_full_translated():
                yield
        except NotAsAsked:  # nothing is wrong with the workspace
            raise
        except MemgwError as exc:
            workspace.record.note_error(type(exc).__name__, exc.detail)
            raise


def _skipped(stamp: Stamp) -> list[Degraded]:
    if not stamp.skipped:
        return []
    files = f"{stamp.skipped} file" + ("s" if stamp.skipped > 1 else "")
    return [Degraded("documents_skipped", f"{files} of this commit could not be indexed")]
