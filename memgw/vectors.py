"""Vectors follow Git: what a stamped index lacks is embedded apart from it, and brought in between two searches."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from uuid import uuid4

from memgw import files
from memgw.deadline import Deadline
from memgw.engine import Place
from memgw.errors import DeadlineExceeded, EngineBadOutput, EngineFailed, IndexDamaged, WorkspaceBusy
from memgw.state import Stamp
from memgw.workspace import Held, Workspace

log = logging.getLogger(__name__)

Writer = Callable[[Place, Deadline, int], str]
"""Changes an index, with the lock's descriptor in hand, and returns the file that it is in then."""

ADOPT_SECONDS = 30.0
"""A host takes no five to bring in what it makes in one slice; one that says nothing for so long hangs."""

IDLE_SECONDS = 1.0
"""The host that is done before has nothing to make, or can't."""

PATIENCE_SECONDS = 1.0
"""The least time to wait for the lock."""


def complete(
    workspace: Workspace, stamp: Stamp, seconds: float, deadline: Deadline, held: Held | None = None
) -> Stamp | None:
    """Makes vectors for about so many seconds; whether all are there then, the counts say and no exit status.

    Returns the stamp of the index with the vectors that it has now; None when that is of another commit meanwhile. What
    fails is logged: an index without vectors is whole. Raises DeadlineExceeded, StorageFull, IndexDamaged.
    """
    end = monotonic() + seconds
    pending = workspace.pending_embeddings(stamp)
    if not pending:
        _note_complete(workspace, stamp, deadline, held)
        return stamp
    with deadline.step("embed"):
        while pending and (left := end - monotonic()) > 0:
            begun = monotonic()
            try:
                made = workspace.engine.embed(workspace.place(stamp), deadline, left)
            except DeadlineExceeded as exc:  # the engine is busy with others, or hangs
                _report(workspace, exc)
                deadline.left()
                continue
            except (EngineFailed, EngineBadOutput) as exc:
                _report(workspace, exc)
                break
            idle = made is not None or monotonic() - begun < IDLE_SECONDS
            now = _adopt(workspace, stamp, made, end, deadline, held)
            if now is None:
                return None
            before, stamp, pending = pending, now, workspace.pending_embeddings(now)
            if pending >= before and idle:  # a large document takes more than one turn of the host's
                break
    return stamp


def _note_complete(workspace: Workspace, stamp: Stamp, deadline: Deadline, held: Held | None) -> None:
    """A commit that brought no new text has its vectors already."""
    if workspace.state().embedded_commit != stamp.commit:
        with suppress(WorkspaceBusy), workspace.hold(deadline, held, at_most=PATIENCE_SECONDS) as hold:
            state = workspace.state()
            if state.stamp == stamp:
                workspace.save(state.but(embedded_commit=stamp.commit), hold)


def _adopt(
    workspace: Workspace, stamp: Stamp, made: Path | None, end: float, deadline: Deadline, held: Held | None
) -> Stamp | None:
    def write(place: Place, limit: Deadline, descriptor: int) -> str:
        return workspace.engine.adopt(place, made, limit, descriptor)

    patience = max(end - monotonic(), PATIENCE_SECONDS)
    try:
        with workspace.hold(deadline, held, at_most=patience) as hold:
            return rewritten(workspace, stamp, write, ADOPT_SECONDS, hold)
    except WorkspaceBusy as exc:  # what was made waits
        _report(workspace, exc)
        return stamp
    finally:
        if made:
            files.remove(made.parent)


def rewritten(workspace: Workspace, stamp: Stamp, write: Writer, seconds: float, hold: Held) -> Stamp | None:
    """Has the stamped index changed in at most so many seconds, but for its documents, and stamps it again. One that is
    not the stamped one any more is left alone. Returns the stamp that it has then; None when it is of another commit.

    What fails is logged. Raises DeadlineExceeded, StorageFull, IndexDamaged.
    """
    now = workspace.proven(stamp.commit)
    if now != stamp:
        return now
    limit = Deadline(hold.deadline.left(seconds))
    before = workspace.index.listing(stamp.identity.file)
    workspace.save(workspace.state().but(stamp=None), hold)
    file = stamp.identity.file
    try:
        file = write(workspace.place(stamp), limit, hold.descriptor)
    except (EngineFailed, EngineBadOutput, DeadlineExceeded) as exc:  # what it has done until then is kept
        _report(workspace, exc)
    finally:  # whatever ends us: an index without a stamp would be built anew
        again = _stamp_again(workspace, stamp, file, before, hold)
    return again


def _stamp_again(workspace: Workspace, stamp: Stamp, file: str, before: Mapping[str, str], hold: Held) -> Stamp:
    """The same documents as `before`, by path and hash, in a file that was written to: neither the engine's word nor
    their number is proof of it. Raises IndexDamaged when they are others."""
    index = workspace.index
    index.settle(file)
    identity = index.identity(file)
    if identity is None or index.count_texts(file) != stamp.documents or index.listing(file) != before:
        raise IndexDamaged("the index changed its documents when only vectors were to be written")
    again = replace(stamp, serial=uuid4().hex, identity=identity)
    embedded = None if workspace.pending_embeddings(again) else stamp.commit
    workspace.save(workspace.state().but(stamp=again, embedded_commit=embedded), hold)
    if file != stamp.identity.file:
        index.keep_only(file)
    return again


def _report(workspace: Workspace, exc: Exception) -> None:
    log.warning("engine_failed", extra={"branch": workspace.branch.name}, exc_info=exc)
