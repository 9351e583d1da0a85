"""Takes away what nobody needs any more, under the locks of requests and in their order: workspace, then mirror.

What a request uses stays: a workspace whose lock is held, or that was used within the longest life of a request. Should
one begin to read a workspace that is just going, it finds the stamp gone when it is done, and starts over.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from time import monotonic, time

from memgw import files, locks, vectors
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import (
    BranchNotFound,
    HostAway,
    IndexDamaged,
    InvalidBranch,
    MemgwError,
    RemoteUnreachable,
    WorkspaceBusy,
    storage_full_translated,
)
from memgw.gateway import Gateway
from memgw.index import IndexFolder
from memgw.state import all_states
from memgw.workspace import Workspace

log = logging.getLogger(__name__)

MANY_PACKS, TOO_MANY_PACKS = 50, 500
"""A fetch makes one. Above the first the mirror is repacked when it is quiet, above the second at any time."""

GROWN = 1.25
"""An index is cleaned when it is so many times as large as it was when it was first seen, or last cleaned."""

IDLE_SECONDS = 60.0
"""It is quiet when no request has used anything for so long."""

VECTOR_DAYS = 14
"""Vectors of another model, or of texts that no index has, are kept for so long, in case they come back."""

MANY_TEXTS = 1000
"""The vectors of fewer texts are not worth the work."""

PRUNE_SECONDS = 600.0
"""Others go on meanwhile: there is no lock to it."""

STEP_SECONDS = 30.0
"""For what is done with a lock in hand; less than a request waits for it."""


@dataclass(frozen=True)
class Bounds:
    """What may stay. 0 workspaces or bytes: no bound. `request_seconds`: no request lives longer."""

    gone_seconds: float
    max_workspaces: int
    max_bytes: int
    request_seconds: float


@dataclass(frozen=True)
class Freed:
    """One thing that was taken away, or made smaller, and the bytes that this gave back."""

    what: str
    why: str
    bytes: int


@dataclass(frozen=True)
class Round:
    """What one round did; `failed`: jobs that could not be done, the log tells why."""

    freed: list[Freed]
    failed: list[str]


class Housekeeper:
    """Of one data directory. However many there are, one at a time is at work."""

    def __init__(self, gateway: Gateway, bounds: Bounds) -> None:
        self._gateway, self._layout, self._mirror = gateway, gateway.layout, gateway.mirror
        self._bounds = bounds
        self._lock = self._layout.data / "locks" / "housekeeping.lock"
        books = self._layout.states / "housekeeping"
        self._branches, self._unowned, self._sizes = (
            Book(books / f"{name}.json") for name in ("branches", "refs", "sizes")
        )

    def round(self, *, now: bool = False, wait: float = 0.0) -> Round:
        """Does each job once; `now`: also what otherwise waits until it is quiet and worth it.

        Raises WorkspaceBusy when another housekeeper is not done within `wait` seconds.
        """
        done = Round([], [])
        jobs: dict[str, Callable[[], Iterator[Freed]]] = {
            "branches that are gone": self._gone,
            "remains": self._remains,
            "refs": self._refs,
            "vectors of other models": self._nurseries,
            "vectors": partial(self._vectors, now),
            "mirror": partial(self._repack, now),
            "indexes": partial(self._clean, now),
            "bounds": self._least_used,
        }
        self._layout.make_folders()
        with locks.hold(self._lock, Deadline(wait + 1), wait):
            for name, job in jobs.items():
                try:
                    with storage_full_translated():
                        for freed in job():
                            log.info("freed", extra={"what": freed.what, "why": freed.why, "bytes": freed.bytes})
                            done.freed.append(freed)
                except (MemgwError, OSError) as exc:
                    log.warning("housekeeping_failed", extra={"job": name}, exc_info=exc)
                    done.failed.append(name)
        return done

    def _gone(self) -> Iterator[Freed]:
        """Branches that the remote does not have any more: seen so over the time of grace, and asked for once more."""
        known = {workspace.branch.name: workspace for workspace in self._workspaces()}
        if not known:
            return
        listed = self._gateway.remote.branches(Deadline(STEP_SECONDS))
        gone = known.keys() - listed - {self._layout.default_branch}
        if gone and not listed & {self._layout.default_branch, *known}:
            raise RemoteUnreachable("the remote's list has none of our branches: it may be of another repository")
        for name in self._branches.missing(gone, self._bounds.gone_seconds):
            workspace = known[name]
            yield from self._remove(workspace, "gone from the remote", partial(self._is_gone, workspace.branch))

    def _is_gone(self, branch: Branch) -> bool:
        try:
            self._gateway.remote.ask(branch, Deadline(STEP_SECONDS), since=monotonic())
        except BranchNotFound:
            return True
        return False

    def _least_used(self) -> Iterator[Freed]:
        workspaces = self._workspaces()
        number, most = len(workspaces), self._bounds.max_workspaces
        used = files.space(*self._counted()) if self._bounds.max_bytes else 0
        for workspace in sorted(workspaces, key=lambda workspace: workspace.record.used_at()):
            too_many = bool(most) and number > most
            too_large = bool(self._bounds.max_bytes) and used > self._bounds.max_bytes
            if not (too_many or too_large):
                break
            if workspace.branch.name != self._layout.default_branch:
                for freed in self._remove(workspace, "too many workspaces" if too_many else "too much on disk"):
                    number, used = number - 1, used - freed.bytes
                    yield freed

    def _counted(self) -> Iterable[Path]:
        """What MEMGW_MAX_DISK_MB is about: not the models, logs, and the demo remote."""
        indexes = self._layout.index("*")
        folders = (self._mirror.path, self._layout.worktree("x").parent, self._layout.nurseries)
        return (*folders, *indexes.parent.glob(indexes.name))

    def _remove(self, workspace: Workspace, why: str, check: Callable[[], bool] = lambda: True) -> Iterator[Freed]:
        """One workspace, unless it is in use or `check`, made with its lock in hand, says no."""
        try:
            with workspace.hold(Deadline(2 * STEP_SECONDS), at_most=0.0) as held:
                if self._in_use(workspace) or not check():
                    return
                size = files.space(*self._layout.places(workspace.name), freed=True)
                workspace.remove(held)
                size += self._forget([workspace.branch.mirror_ref], held.descriptor)
        except WorkspaceBusy:
            return
        yield Freed(f"workspace {workspace.name}", why, size)

    def _in_use(self, workspace: Workspace) -> bool:
        return time() - workspace.record.used_at() < self._bounds.request_seconds

    def _remains(self) -> Iterator[Freed]:
        """What a kill in the middle of `_remove` left, or somebody who deleted states."""
        for name in sorted(self._layout.remains()):
            places = self._layout.places(name)
            with suppress(WorkspaceBusy), locks.hold(self._layout.lock(name), Deadline(STEP_SECONDS), 0.0) as held:
                if places[0].exists():
                    continue
                size = files.space(*places, freed=True)
                for place in places:
                    files.remove(place)
                size += self._forget([], held)
                yield Freed(f"remains of {name}", "no workspace", size)

    def _refs(self) -> Iterator[Freed]:
        """Refs of the mirror that belong to no workspace, or to one that is being made: that has a state soon."""
        listed = self._mirror.refs(Deadline(STEP_SECONDS))
        unowned = listed - {workspace.branch.mirror_ref for workspace in self._workspaces()}
        if unowned := set(self._unowned.missing(unowned, self._bounds.request_seconds)):
            size = self._mirror.forget(sorted(unowned), Deadline(STEP_SECONDS))
            yield Freed(f"{len(unowned)} refs of the mirror", "no workspace", size)

    def _forget(self, refs: list[str], held: int) -> int:
        """What the mirror has of a workspace whose lock is `held`; `_refs` does it another time when it is busy."""
        try:
            return self._mirror.forget(refs, Deadline(STEP_SECONDS), held)
        except WorkspaceBusy:
            return 0

    def _nurseries(self) -> Iterator[Freed]:
        """Vectors of embedding models that are not in use. A file of SQLite's may have others beside it."""
        mine = self._layout.nursery
        for nursery in sorted(mine.parent.glob("*.sqlite")):
            group = list(mine.parent.glob(f"{nursery.name}*"))
            if nursery != mine and max(path.stat().st_mtime for path in group) < time() - VECTOR_DAYS * 86_400:
                size = files.space(*group, freed=True)
                for path in group:
                    files.remove(path)
                yield Freed(f"vectors {nursery.stem}", "of a model that is not in use", size)

    def _vectors(self, now: bool) -> Iterator[Freed]:
        """Vectors of texts that no index has, in the nursery of the model in use."""
        mine, workspaces = self._layout.nursery, self._workspaces()
        if not mine.exists() or not workspaces:
            return
        moment = datetime.now(UTC) - timedelta(days=VECTOR_DAYS)
        try:
            drop = IndexFolder(mine.parent).embedded(mine.name, moment.isoformat())
            old = len(drop)
            for workspace in workspaces if drop else ():
                if not (stamp := workspace.state().stamp):
                    return  # it is being changed: another time
                drop -= workspace.index.texts(stamp.identity.file)
        except IndexDamaged:  # or replaced meanwhile
            return
        if drop and (now or len(drop) > max(MANY_TEXTS, old / 2)):
            used = files.space(mine.parent)
            place = workspaces[0].place_of(mine.name)
            with suppress(HostAway):  # another time
                self._gateway.engine.prune(place, drop, Deadline(PRUNE_SECONDS))
                freed = used - files.space(mine.parent)
                yield Freed(f"vectors of {len(drop)} texts", "that no index has", freed)

    def _repack(self, now: bool) -> Iterator[Freed]:
        packs = self._mirror.packs()
        idle = all(time() - workspace.record.used_at() > IDLE_SECONDS for workspace in self._workspaces())
        if packs and (now or packs > (MANY_PACKS if idle else TOO_MANY_PACKS)):
            size = self._mirror.repack(Deadline(STEP_SECONDS))
            yield Freed("mirror", f"{packs} packs are {self._mirror.packs()}", size)

    def _clean(self, now: bool) -> Iterator[Freed]:
        """`qmd cleanup` for indexes that have grown; whoever reads one meanwhile starts over."""
        known, sizes = self._sizes.load(), dict[str, float]()
        for workspace in self._workspaces():
            stamp = workspace.state().stamp
            if not stamp:
                continue
            size, before = stamp.identity.size, known.get(stamp.identity.file)
            idle = time() - workspace.record.used_at() > IDLE_SECONDS
            if (now and size != before) or (idle and before and size > GROWN * before):
                with suppress(WorkspaceBusy), workspace.hold(Deadline(2 * STEP_SECONDS), at_most=0.0) as held:
                    used = files.space(workspace.index.path)
                    again = vectors.rewritten(workspace, stamp, workspace.engine.clean, STEP_SECONDS, held)
                    if again:
                        before = again.identity.size
                        freed = used - files.space(workspace.index.path)
                        yield Freed(f"index of {workspace.name}", "qmd cleanup", freed)
            sizes[stamp.identity.file] = before or size
        self._sizes.save(sizes)

    def _workspaces(self) -> list[Workspace]:
        found = []
        for state in filter(None, (file.load() for file in all_states(self._layout.states))):
            with suppress(InvalidBranch):  # a damaged state
                found.append(self._gateway.workspace(Branch.parse(state.branch)))
        return found


class Book:
    """A number for each of some names, kept in a file; an empty one when that is lost or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def missing(self, names: Collection[str], seconds: float) -> list[str]:
        """Notes that just these are missing now, and returns those that were at each look for so many seconds."""
        known, now = self.load(), time()
        moments = {name: min(known.get(name, now), now) for name in names}
        self.save(moments)
        return [name for name, moment in moments.items() if now - moment >= seconds]

    def load(self) -> dict[str, float]:
        try:
            return {name: float(number) for name, number in json.loads(self._path.read_text("utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def save(self, numbers: Mapping[str, float]) -> None:
        files.replace(self._path, json.dumps(numbers))
