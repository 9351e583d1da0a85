"""What `/status` tells. It takes no lock and asks no remote, so that it stays fast while all else is busy."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from memgw import __version__, files, proc
from memgw.branch import Branch
from memgw.config import Config
from memgw.errors import IndexDamaged, InvalidBranch, MemgwError, ToolError
from memgw.gateway import Gateway
from memgw.logs import redact, secrets_of
from memgw.models import Role
from memgw.problems import code_of
from memgw.state import all_states


class Status:
    """Collects; keeps nothing but the versions of programs that do not change under it."""

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self._config, self._gateway = config, gateway

    def collect(self) -> dict[str, Any]:
        return {
            "default_branch": self._config.default_branch,
            "versions": {"memgw": __version__, "qmd": self._qmd(), "git": self._git, "node": self._node},
            "mirror": {
                "remote": redact(self._config.remote_url, secrets_of(self._config.remote_url)),
                "bytes": files.size(self._gateway.mirror.path),
            },
            "models": {role: self._model(role) for role in Role},
            "workspaces": list(filter(None, map(self._workspace, self._branches()))),
        }

    def _model(self, role: Role) -> dict[str, Any]:
        why_not = self._gateway.models.why_not(role)
        uri = self._gateway.models.uris[role]
        shown = uri if uri.startswith("hf:") else Path(uri).name  # no path of the server goes to a client
        return {"uri": shown, "loadable": why_not is None, "detail": why_not}

    def _branches(self) -> list[str]:
        states = (file.load() for file in all_states(self._gateway.layout.states))
        return [state.branch for state in states if state]

    def _workspace(self, name: str) -> dict[str, Any] | None:
        try:
            workspace = self._gateway.workspace(Branch.parse(name))
        except InvalidBranch:  # a damaged state
            return None
        state, notes = workspace.state(), workspace.record.notes()
        stamp = state.stamp
        try:
            pending = workspace.pending_embeddings(stamp) if stamp else None
        except IndexDamaged:
            pending = None
        error = notes.last_error
        return {
            "workspace": workspace.name,
            "branch": name,
            "commit": state.worktree_commit,
            "indexed_commit": stamp.commit if stamp else None,
            "embedded_commit": state.embedded_commit,
            "synced_at": workspace.synced_at(),
            "documents": stamp.documents if stamp else None,
            "pending_embeddings": pending,
            "last_error": error and {"at": error.at, "code": code_of(error.kind), "detail": error.detail},
            "bytes": state.worktree_bytes + workspace.index.bytes(),
        }

    def _qmd(self) -> str | None:
        try:
            return self._gateway.engine.version()
        except MemgwError:
            return None

    @cached_property
    def _git(self) -> str | None:
        return self._version(["git", "--version"])

    @cached_property
    def _node(self) -> str | None:
        return self._version([self._config.launcher[0], "--version"]) if len(self._config.launcher) > 1 else None

    def _version(self, command: list[str]) -> str | None:
        try:
            said = proc.run(
                command, cwd=self._config.data_dir, env=self._gateway.mirror.env, timeout=5, max_output=1000
            ).decode(errors="replace")
        except ToolError:
            return None
        found = re.search(r"\d+(\.\d+)+", said)
        return found[0] if found else None
