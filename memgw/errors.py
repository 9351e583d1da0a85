"""What can go wrong, in the words of the domain; nothing here knows HTTP.

    MemgwError                  has a `detail` that may be shown to a client
    ├── InvalidBranch           the name can't be a branch
    ├── InvalidProfile          the memory profile is not one of ours
    ├── BranchNotFound          the remote was asked and has no such branch
    ├── RemoteUnreachable       the remote could not be asked
    ├── RemoteAuthFailed        the remote refused our credentials
    ├── CommitUnusable          the newest commit can't be laid out as files
    ├── EngineFailed            qmd crashed or refused
    │   ├── EngineMissing       …: it is not installed, or can't be started
    │   └── HostAway            …: the warm host does not answer
    ├── EngineBadOutput         qmd printed something that is not its format
    ├── NotAsAsked              the question can't be answered in the way it wants, and `strict` forbids another
    │   ├── ModelUnavailable    …: a model is not there
    │   ├── VectorsPending      …: documents have no vectors yet
    │   ├── BudgetExceeded      …: it takes longer than its share of the request's time
    │   └── EngineError         …: the engine failed at it
    ├── WorkspaceBusy           another request holds the workspace for too long
    ├── DeadlineExceeded        the time of the request is used up
    ├── StorageFull             no space is left under the data directory
    ├── HooksOff                no secret is set to know a forge by
    ├── HookUnauthorized        a hook was not made, or not lately, by somebody who knows the secret
    ├── HookReplayed            a hook was taken before
    └── Damaged                 something under the data directory is broken
        ├── MirrorDamaged       …: throw it away and make it again
        ├── WorktreeDamaged
        └── IndexDamaged

`Damaged` errors are signals inside a transaction, which heals what they name and goes on; one that
reaches a client is a fault of ours. Tool errors (a process that failed, hung or can't be started)
stay below the module that owns the tool, which translates them once.

    ToolError
    ├── ToolMissing             the executable can't be started
    ├── ToolTimeout             it ran longer than it was given
    ├── ToolOutputTooLarge      it printed more than anybody would read
    └── ToolFailed              it ended with another status than 0
"""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC

FULL = (ENOSPC, EDQUOT)


class MemgwError(Exception):
    """The base of all that a request can end with. `detail` is safe to show to a client."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class InvalidBranch(MemgwError): ...


class InvalidProfile(MemgwError): ...


class BranchNotFound(MemgwError): ...


class RemoteUnreachable(MemgwError): ...


class RemoteAuthFailed(MemgwError): ...


class CommitUnusable(MemgwError): ...


class EngineFailed(MemgwError): ...


class EngineMissing(EngineFailed): ...


class HostAway(EngineFailed): ...


class EngineBadOutput(MemgwError): ...


class NotAsAsked(MemgwError):
    """`code`: what an answer that was found in another way says of it."""

    code: str


class ModelUnavailable(NotAsAsked):
    code = "model_unavailable"


class VectorsPending(NotAsAsked):
    code = "vectors_pending"


class BudgetExceeded(NotAsAsked):
    code = "budget_exceeded"


class EngineError(NotAsAsked):
    code = "engine_error"


class WorkspaceBusy(MemgwError):
    """`retry_after`: seconds after which it makes sense to ask again."""

    def __init__(self, detail: str, retry_after: int) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class DeadlineExceeded(MemgwError): ...


class StorageFull(MemgwError): ...


class HooksOff(MemgwError): ...


class HookUnauthorized(MemgwError): ...


class HookReplayed(MemgwError): ...


class Damaged(MemgwError): ...


class MirrorDamaged(Damaged): ...


class WorktreeDamaged(Damaged): ...


class IndexDamaged(Damaged): ...


class ToolError(Exception):
    """A process did not do its work. `argv` and `stderr` are for the log, never for a client."""

    def __init__(self, message: str, argv: list[str], stderr: str = "") -> None:
        super().__init__(message)
        self.argv = argv
        self.stderr = stderr

    @property
    def disk_is_full(self) -> bool:
        """True when what the process said means that it had no space to write to."""
        ours = (line for line in self.stderr.lower().splitlines() if not line.startswith("remote:"))
        said = "\n".join(ours)
        return any(
            sign in said for sign in ("no space left on device", "enospc", "disk is full", "quota exceeded", "edquot")
        )


class ToolMissing(ToolError): ...


class ToolTimeout(ToolError): ...


class ToolOutputTooLarge(ToolError): ...


class ToolFailed(ToolError):
    """`status`: the exit status, negative for the signal that ended it (as subprocess counts)."""

    def __init__(self, message: str, argv: list[str], stderr: str, status: int) -> None:
        super().__init__(message, argv, stderr)
        self.status = status


@contextmanager
def storage_full_translated() -> Iterator[None]:
    """Turns the operating system's "no space" into `StorageFull`, wherever a file is written."""
    try:
        yield
    except OSError as exc:
        if exc.errno in FULL:
            raise StorageFull("no space is left where memgw keeps its data") from exc
        raise
