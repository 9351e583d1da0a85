"""Git's commands through GitPython, with our own way of starting processes and of reading failures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import git

from memgw import proc
from memgw.deadline import Deadline
from memgw.errors import (
    MemgwError,
    RemoteAuthFailed,
    RemoteUnreachable,
    StorageFull,
    ToolError,
    ToolMissing,
    ToolTimeout,
)

_AUTH = re.compile(
    r"authentication failed|could not read (username|password)|permission denied \(|"
    r"host key verification failed|terminal prompts disabled|"
    r"(error|HTTP)[: ]+(401|403)|access denied|invalid credentials",
    re.IGNORECASE,
)


class Commands(git.Git):
    """`commands.fetch("--no-tags", …)` runs `git fetch --no-tags …` and returns its stdout as bytes.

    Processes are started by `proc.run`: the given environment and nothing else, a limit of time taken from the
    request's deadline, the lock's descriptor kept open. ToolError is what they raise; the
    modules that call them translate it.
    """

    def __init__(
        self,
        cwd: Path,
        env: Mapping[str, str],
        deadline: Deadline,
        keep_open: tuple[int, ...] = (),
        at_most: float | None = None,
        max_output: int | None = None,
        harmless: bool = False,
    ) -> None:
        super().__init__(str(cwd))
        self._env, self._deadline, self._keep_open, self._at_most = env, deadline, keep_open, at_most
        self._max_output, self._harmless = max_output or 1024 * 1024 * 1024, harmless

    def execute(self, command: Sequence[str], **kwargs: Any) -> bytes:  # type: ignore[override]
        """`kwargs`: `istream`, the bytes for stdin; nothing else of GitPython's is wanted here."""
        stdin = kwargs.pop("istream", b"")
        if kwargs:
            raise TypeError(f"not supported: {', '.join(kwargs)}")
        return proc.run(
            command,
            cwd=Path(str(self.working_dir)),
            env=self._env,
            timeout=self._deadline.left(self._at_most),
            keep_open=self._keep_open,
            stdin=stdin,
            max_output=self._max_output,
            harmless=self._harmless,
        )


def translate(exc: ToolError, deadline: Deadline) -> MemgwError | None:
    """What a failure of any git command means, or None when it says nothing of the kinds known here."""
    if isinstance(exc, ToolTimeout):
        return deadline.exceeded()
    if exc.disk_is_full:
        return StorageFull("no space is left where memgw keeps its data")
    return None


def raise_remote(exc: ToolError, deadline: Deadline) -> NoReturn:
    """Raises what a failed conversation with the remote means."""
    if isinstance(exc, ToolTimeout) and not deadline.is_over:
        raise RemoteUnreachable("the remote did not answer in time") from exc
    known = translate(exc, deadline)
    if known:
        raise known from exc
    if isinstance(exc, ToolMissing):
        raise RemoteUnreachable("git can't be started") from exc
    if _AUTH.search(exc.stderr):
        raise RemoteAuthFailed("the remote refused the gateway's credentials") from exc
    raise RemoteUnreachable("the remote could not be reached, or not understood") from exc
