"""Makes smaller what stays: the mirror, indexes, vectors. In quiet times, or now.

Whoever reads an index that is just cleaned finds another stamp when he is done, and starts over.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import time
from typing import TypeVar

from memgw import files, vectors
from memgw.deadline import Deadline
from memgw.errors import HostAway, IndexDamaged, MemgwError, WorkspaceBusy
from memgw.gateway import Gateway
from memgw.index import IndexFolder
from memgw.notebook import Notebook
from memgw.workspace import Workspace

MANY_PACKS, TOO_MANY_PACKS = 50, 500
"""A fetch makes one. Above the first the mirror is repacked when it is quiet, above the second at any time."""

GROWN = 1.25
"""An index is cleaned when it is so many times as large as it was when it was first seen, or last cleaned."""

IDLE_SECONDS = 60.0
"""It is quiet when no request has used anything for so long."""

VECTOR_DAYS = 14
"""Vectors of another model, or of texts that no index has, are kept for so long, in case they come back."""

CHANGING_SECONDS = 3600.0
"""An index without a stamp, of a workspace not used for so long, is not being changed: it was left like that."""

COPIES = 3
"""A file is written anew only with room for so many of it: nobody else is to find the disk full meanwhile."""

MANY_TEXTS = 1000
"""The vectors of fewer texts are not worth the work."""

PRUNE_SECONDS = 600.0
"""Others go on meanwhile: there is no lock to it."""

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Freed:
    """One thing that was taken away, or made smaller, and the bytes that this gave back."""

    what: str
    why: str
    bytes: int


class Upkeep:
    """Of one gateway. `workspaces`: those that there are; `step_seconds`: so long a lock is held at a time."""

    def __init__(self, gateway: Gateway, workspaces: Callable[[], list[Workspace]], step_seconds: float) -> None:
        self._gateway, self._layout, self._mirror = gateway, gateway.layout, gateway.mirror
        self._workspaces, self._step = workspaces, step_seconds
        self._sizes = Notebook(self._layout.states / "housekeeping" / "sizes.json")

    def old_models(self) -> Iterator[Freed]:
        """Vectors of embedding models that are not in use. A file of SQLite's may have others beside it."""
        mine = self._layout.nursery
        for nursery in sorted(mine.parent.glob("*.sqlite")):
            group = list(mine.parent.glob(f"{nursery.name}*"))
            if nursery != mine and max(path.stat().st_mtime for path in group) < time() - VECTOR_DAYS * 86_400:
                size = files.space(*group, freed=True)
                for path in group:
                    files.remove(path)
                yield Freed(f"vectors {nursery.stem}", "of a model that is not in use", size)

    def old_texts(self, now: bool) -> Iterator[Freed]:
        """Vectors of texts that no index has, in the nursery of the model in use."""
        mine, workspaces = self._layout.nursery, self._workspaces()
        if not mine.exists() or not workspaces:
            return
        moment = datetime.now(UTC) - timedelta(days=VECTOR_DAYS)
        try:
            drop = IndexFolder(mine.parent).embedded(mine.name, moment.isoformat())
        except IndexDamaged:  # or replaced meanwhile
            return
        old = len(drop)
        for workspace in workspaces if drop else ():
            texts = _texts(workspace)
            if texts is None and time() - workspace.record.used_at() < CHANGING_SECONDS:
                return  # another time
            drop -= texts or set()
        used = files.space(mine.parent)
        room = files.free(mine.parent) > COPIES * used
        if drop and room and (now or len(drop) > max(MANY_TEXTS, old / 2)):
            place = workspaces[0].place_of(mine.name)
            with suppress(HostAway):  # another time
                self._gateway.engine.prune(place, drop, Deadline(PRUNE_SECONDS))
                if (freed := used - files.space(mine.parent)) > 0:  # the command line keeps none
                    yield Freed(f"vectors of {len(drop)} texts", "that no index has", freed)

    def repack(self, now: bool) -> Iterator[Freed]:
        packs = self._mirror.packs()
        idle = all(time() - workspace.record.used_at() > IDLE_SECONDS for workspace in self._workspaces())
        if packs and (now or packs > (MANY_PACKS if idle else TOO_MANY_PACKS)):
            size = self._mirror.repack(Deadline(self._step))
            yield Freed("mirror", f"{packs} packs are {self._mirror.packs()}", size)

    def clean(self, now: bool) -> Iterator[Freed]:
        """`qmd cleanup` for indexes that have grown; whoever reads one meanwhile starts over."""
        known, sizes = self._sizes.load(), dict[str, float]()

        def clean(workspace: Workspace) -> Iterator[Freed]:
            stamp = workspace.state().stamp
            if not stamp:
                return
            size, before = stamp.identity.size, known.get(stamp.identity.file)
            sizes[stamp.identity.file] = before or size
            idle = time() - workspace.record.used_at() > IDLE_SECONDS
            worth = (now and size != before) or (idle and before and size > GROWN * before)
            if worth and files.free(self._layout.data) > COPIES * size:
                with suppress(WorkspaceBusy), workspace.hold(Deadline(2 * self._step), at_most=0.0) as held:
                    used = files.space(workspace.index.path)
                    again = vectors.rewritten(workspace, stamp, workspace.engine.clean, self._step, held)
                    if again:
                        sizes[stamp.identity.file] = again.identity.size
                        freed = used - files.space(workspace.index.path)
                        yield Freed(f"index of {workspace.name}", "qmd cleanup", freed)

        try:
            yield from each(self._workspaces(), clean)
        finally:
            self._sizes.save(sizes)


def _texts(workspace: Workspace) -> set[str] | None:
    """What its index has, by hash; None when it is being changed, or damaged."""
    stamp = workspace.state().stamp
    with suppress(IndexDamaged):
        return workspace.index.texts(stamp.identity.file) if stamp else None
    return None


def each(things: Iterable[Thing], act: Callable[[Thing], Iterator[Freed]]) -> Iterator[Freed]:
    """One that fails keeps no other waiting. Raises the last failure when all had their turn."""
    failure: Exception | None = None
    for thing in things:
        try:
            yield from act(thing)
        except (MemgwError, OSError) as exc:
            failure = exc
    if failure:
        raise failure
