"""Takes away what nobody needs any more, under the locks of requests and in their order: workspace, then mirror.

What a request uses stays: a workspace whose lock is held, or that was used within the longest life of a request. Should
one begin to read a workspace that is just going, it finds the stamp gone when it is done, and starts over.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time

from memgw import files, locks
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import (
    BranchNotFound,
    InvalidBranch,
    MemgwError,
    RemoteUnreachable,
    WorkspaceBusy,
    storage_full_translated,
)
from memgw.gateway import Gateway
from memgw.notebook import Notebook
from memgw.state import StateFile, all_states
from memgw.upkeep import Freed, Upkeep, each
from memgw.workspace import Workspace

log = logging.getLogger(__name__)

STEP_SECONDS = 30.0
"""For what is done with a lock in hand, unless requests wait for less."""

ODD_DAYS = 14
"""So long stays what has a state that is not understood: damaged, or of a version that may come back."""


@dataclass(frozen=True)
class Bounds:
    """What may stay. 0 workspaces or bytes: no bound. `request_seconds`: no request lives longer. `step_seconds`: so
    long a lock is held at a time."""

    gone_seconds: float
    max_workspaces: int
    max_bytes: int
    request_seconds: float
    step_seconds: float = STEP_SECONDS


@dataclass(frozen=True)
class Round:
    """What one round did; `failed`: jobs that could not be done, the log tells why."""

    freed: list[Freed]
    failed: list[str]


class Housekeeper:
    """Of one data directory. However many there are, one at a time is at work."""

    def __init__(self, gateway: Gateway, bounds: Bounds) -> None:
        self._gateway, self._layout, self._mirror = gateway, gateway.layout, gateway.mirror
        self._bounds, self._step = bounds, bounds.step_seconds
        self._lock = self._layout.data / "locks" / "housekeeping.lock"
        books = self._layout.states / "housekeeping"
        self._branches, self._unowned = Notebook(books / "branches.json"), Notebook(books / "refs.json")
        self._upkeep = Upkeep(gateway, self._workspaces, self._step)

    def round(self, *, now: bool = False, wait: float = 0.0) -> Round:
        """Does each job once; `now`: also what otherwise waits until it is quiet and worth it.

        Raises WorkspaceBusy when another housekeeper is not done within `wait` seconds.
        """
        done = Round([], [])
        jobs: dict[str, Callable[[], Iterator[Freed]]] = {
            "branches that are gone": self._gone,
            "remains": self._remains,
            "refs": self._refs,
            "vectors of other models": self._upkeep.old_models,
            "vectors": partial(self._upkeep.old_texts, now),
            "mirror": partial(self._upkeep.repack, now),
            "indexes": partial(self._upkeep.clean, now),
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
            self._gateway.remote.ask(branch, Deadline(self._step), since=monotonic())
        except BranchNotFound:
            return True
        return False

    def _least_used(self) -> Iterator[Freed]:
        workspaces = self._workspaces()
        number, most = len(workspaces), self._bounds.max_workspaces
        used = files.space(*self._counted()) if self._bounds.max_bytes else 0
        for workspace in sorted(workspaces, key=lambda workspace: workspace.record.used_at()):
            too_many, too_large = bool(most) and number > most, used > (self._bounds.max_bytes or used)
            if not (too_many or too_large):
                return
            if workspace.branch.name != self._layout.default_branch:
                for freed in self._remove(workspace, "too many workspaces" if too_many else "too much on disk"):
                    number, used = number - 1, used - freed.bytes
                    yield freed
        if (most and number > most) or used > (self._bounds.max_bytes or used):
            facts = {"workspaces": number} | ({"bytes": used} if self._bounds.max_bytes else {})
            log.warning("bounds_passed", extra=facts)  # by what is in use, or must stay

    def _counted(self) -> Iterable[Path]:
        """What MEMGW_MAX_DISK_MB is about: not the models, logs, and the demo remote."""
        indexes = self._layout.index("*")
        folders = (self._mirror.path, self._layout.worktree("x").parent, self._layout.nurseries)
        return (*folders, *indexes.parent.glob(indexes.name))

    def _remove(self, workspace: Workspace, why: str, check: Callable[[], bool] = lambda: True) -> Iterator[Freed]:
        """One workspace, unless it is in use or `check`, made with its lock in hand, says no."""
        try:
            with workspace.hold(Deadline(2 * self._step), at_most=0.0) as held:
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

        def remove(name: str) -> Iterator[Freed]:
            places = self._layout.places(name)
            with suppress(WorkspaceBusy), locks.hold(self._layout.lock(name), Deadline(self._step), 0.0) as held:
                if self._is_left(name):
                    size = files.space(*places, freed=True)
                    for place in places:
                        files.remove(place)
                    size += self._forget([], held)
                    yield Freed(f"remains of {name}", "no workspace", size)

        return each(sorted(filter(self._is_left, self._layout.found())), remove)

    def _is_left(self, name: str) -> bool:
        file = StateFile(self._layout.states, name)
        odd = time() - file.used_at() > ODD_DAYS * 86_400 and not self._workspace(file)
        return odd or not self._layout.places(name)[0].exists()

    def _refs(self) -> Iterator[Freed]:
        """Refs of the mirror that belong to no workspace, or to one that is being made: that has a state soon."""
        listed = self._mirror.refs(Deadline(self._step))
        unowned = listed - {workspace.branch.mirror_ref for workspace in self._workspaces()}
        if unowned := set(self._unowned.missing(unowned, self._bounds.request_seconds)):
            size = self._mirror.forget(sorted(unowned), Deadline(self._step))
            yield Freed(f"{len(unowned)} refs of the mirror", "no workspace", size)

    def _forget(self, refs: list[str], held: int) -> int:
        """What the mirror has of a workspace whose lock is `held`; `_refs` does it another time when it is busy."""
        try:
            return self._mirror.forget(refs, Deadline(self._step), held)
        except WorkspaceBusy:
            return 0

    def _workspaces(self) -> list[Workspace]:
        return list(filter(None, map(self._workspace, all_states(self._layout.states))))

    def _workspace(self, file: StateFile) -> Workspace | None:
        """Whose state it is; None when that is not understood, or is a copy of another's."""
        if state := file.load():
            with suppress(InvalidBranch):
                workspace = self._gateway.workspace(Branch.parse(state.branch))
                return workspace if workspace.name == file.workspace else None
        return None
