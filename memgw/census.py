"""The numbers of `/metrics` that are looked up when they are asked for. Cheap: state files, and a count of vectors once
for each state of an index; what there is no time for is left out, and said so."""

import os
from time import monotonic

from memgw.branch import Branch
from memgw.config import Config
from memgw.errors import MemgwError
from memgw.gateway import Gateway
from memgw.models import Role
from memgw.state import Stamp, all_states

SECONDS = 0.5


class Census:
    """Counts the workspaces of a gateway. Safe to share between threads."""

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self._config, self._gateway = config, gateway
        self._pending: dict[str, tuple[str, int]] = {}

    def take(self) -> dict[str, float]:
        """Numbers by their names in Prometheus (metrics.NUMBERS)."""
        end = monotonic() + SECONDS
        states = list(all_states(self._gateway.layout.states))
        stamps: list[Stamp] = []
        pending: dict[str, tuple[str, int]] = {}
        for file in states:
            state = file.load() if monotonic() < end else None
            if not state or not state.stamp:
                continue
            known = self._pending.get(state.branch)
            if not known or known[0] != state.stamp.serial:
                if monotonic() >= end:
                    continue
                try:
                    workspace = self._gateway.workspace(Branch.parse(state.branch))
                    known = state.stamp.serial, workspace.pending_embeddings(state.stamp)
                except MemgwError:  # a damaged state or index: the next request mends it
                    continue
            stamps.append(state.stamp)
            pending[state.branch] = known
        self._pending = pending
        return {
            "memgw_workspaces": len(states),
            "memgw_documents": sum(stamp.documents for stamp in stamps),
            "memgw_index_bytes": sum(stamp.identity.size for stamp in stamps),
            "memgw_pending_vectors": sum(number for _, number in pending.values()),
            "memgw_workspaces_uncounted": len(states) - len(stamps),
            "memgw_embedding_model_loadable": float(not self._gateway.models.why_not(Role.EMBED)),
            **self._disk(),
        }

    def _disk(self) -> dict[str, float]:
        floor: dict[str, float] = {"memgw_disk_floor_bytes": self._config.disk_floor_mb * 1_000_000}
        try:
            space = os.statvfs(self._config.data_dir)
        except OSError:
            return floor
        return floor | {"memgw_disk_free_bytes": space.f_bavail * space.f_frsize}
