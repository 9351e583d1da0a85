"""Vectors follow Git: what a stamped index lacks is embedded apart from it, and brought in between two searches."""

import logging
from dataclasses import replace
from time import monotonic
from uuid import uuid4

from memgw.deadline import Deadline
from memgw.errors import DeadlineExceeded, EngineBadOutput, EngineFailed, IndexDamaged
from memgw.state import Stamp
from memgw.workspace import Held, Workspace

log = logging.getLogger(__name__)

SLICE_SECONDS = 5.0
"""After so long, what was made is brought in, so that others have it."""

ADOPT_SECONDS = 120.0


def complete(
    workspace: Workspace, stamp: Stamp, seconds: float, deadline: Deadline, held: Held | None = None
) -> Stamp | None:
    """Makes vectors for at most so many seconds; whether all are there then, the counts say and no exit status.

    Returns the stamp of the index with the vectors that it has now; None when somebody else changed it meanwhile. What
    fails is logged: an index without vectors is whole. Raises DeadlineExceeded, WorkspaceBusy, StorageFull,
    IndexDamaged.
    """
    end = monotonic() + seconds
    pending = workspace.pending_embeddings(stamp)
    if not pending:
        _note_complete(workspace, stamp, deadline, held)
        return stamp
    with deadline.step("embed"):
        while pending and (left := min(end - monotonic(), deadline.left(), SLICE_SECONDS)) > 0:
            try:
                workspace.engine.embed(workspace.place(stamp), deadline, left)
            except (EngineFailed, EngineBadOutput) as exc:
                _report(workspace, exc)
                break
            now = _adopt(workspace, stamp, max(end - monotonic(), left), deadline, held)
            if now is None:
                return None
            before, stamp, pending = pending, now, workspace.pending_embeddings(now)
            if pending >= before:
                break
    return stamp


def _note_complete(workspace: Workspace, stamp: Stamp, deadline: Deadline, held: Held | None) -> None:
    """A commit that brought no new text has its vectors already."""
    if workspace.state().embedded_commit != stamp.commit:
        with workspace.hold(deadline, held) as hold:
            state = workspace.state()
            if state.stamp == stamp:
                workspace.save(state.but(embedded_commit=stamp.commit), hold)


def _adopt(workspace: Workspace, stamp: Stamp, seconds: float, deadline: Deadline, held: Held | None) -> Stamp | None:
    with workspace.hold(deadline, held) as hold:
        state = workspace.state()
        if state.stamp != stamp or not workspace.sound(stamp):
            return None
        workspace.save(state.but(stamp=None), hold)
        limit = Deadline(min(deadline.left(), max(seconds, 1.0), ADOPT_SECONDS))
        try:
            workspace.engine.adopt(workspace.place(stamp), limit, hold.descriptor)
        except (EngineFailed, EngineBadOutput, DeadlineExceeded) as exc:  # what it has made until then is kept
            _report(workspace, exc)
        return _stamp_again(workspace, stamp, hold)


def _stamp_again(workspace: Workspace, stamp: Stamp, hold: Held) -> Stamp:
    """The same documents in a file that was written to. Raises IndexDamaged when they are not."""
    index, file = workspace.index, stamp.identity.file
    index.settle(file)
    identity = index.identity(file)
    if identity is None or {index.documents(file), index.count_texts(file)} != {stamp.documents}:
        raise IndexDamaged("the index lost documents when vectors were made")
    again = replace(stamp, serial=uuid4().hex, identity=identity)
    embedded = None if workspace.pending_embeddings(again) else stamp.commit
    workspace.save(workspace.state().but(stamp=again, embedded_commit=embedded), hold)
    return again


def _report(workspace: Workspace, exc: Exception) -> None:
    log.warning("embedding_failed", extra={"branch": workspace.branch.name}, exc_info=exc)
