"""Makes the vectors that requests left for later. One for all gateways of a data directory (see background.py).

It takes the workspaces in turns, those synced last first, some seconds each; it starts where it was after a crash,
since the indexes themselves say what they lack.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from time import monotonic

from memgw import vectors
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import IndexDamaged, InvalidBranch, MemgwError
from memgw.gateway import Gateway
from memgw.models import Role
from memgw.state import Stamp, all_states
from memgw.workspace import Workspace

log = logging.getLogger(__name__)

TURN_SECONDS = 5.0
MOST_SECONDS = 60.0
"""A turn in which nothing was done is followed by one of twice the time, up to this: loading a model takes its time."""

REST_SECONDS = 60.0
"""A workspace whose vectors could not be made is left alone for so long."""


class Embedder:
    """Does a turn at a time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._resting: dict[str, float] = {}
        self._turns: dict[str, float] = {}

    def turn(self, until: float = inf) -> bool:
        """Some seconds for each workspace that lacks vectors, begun before the moment `until`; whether there was any
        work."""
        worked = False
        if self._gateway.models.why_not(Role.EMBED):
            return False
        for workspace, stamp in self._waiting():
            if monotonic() >= until:
                return True
            worked |= self._embed(workspace, stamp)
        return worked

    def _waiting(self) -> Iterator[tuple[Workspace, Stamp]]:
        states = [state for file in all_states(self._gateway.layout.states) if (state := file.load())]
        for state in sorted(states, key=lambda state: state.synced_at or "", reverse=True):
            if state.stamp and state.stamp.commit != state.embedded_commit:
                with suppress(InvalidBranch):  # a damaged state
                    workspace = self._gateway.workspace(Branch.parse(state.branch))
                    if monotonic() >= self._resting.get(workspace.name, 0.0) and (stamp := workspace.proven()):
                        yield workspace, stamp

    def _embed(self, workspace: Workspace, stamp: Stamp) -> bool:
        seconds, begun = self._turns.pop(workspace.name, TURN_SECONDS), monotonic()
        try:
            before = workspace.pending_embeddings(stamp)
            deadline = Deadline(seconds + vectors.ADOPT_SECONDS + vectors.PATIENCE_SECONDS)
            after = vectors.complete(workspace, stamp, seconds, deadline)
            if after is None or not before or workspace.pending_embeddings(after) < before:
                return True
            if monotonic() - begun >= seconds < MOST_SECONDS:
                self._turns[workspace.name] = 2 * seconds
                return True
        except IndexDamaged as exc:  # the next query makes another
            workspace.report(exc)
        except (MemgwError, OSError) as exc:
            log.warning("embedding_failed", extra={"branch": workspace.branch.name}, exc_info=exc)
        self._resting[workspace.name] = monotonic() + REST_SECONDS
        return False
