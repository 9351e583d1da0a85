"""The remote, which alone knows the newest commit of a branch. Asking it is read only and takes no lock."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from memgw import refs
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, DeadlineExceeded, RemoteUnreachable, ToolError
from memgw.gitcmd import Commands, raise_remote
from memgw.gitconfig import GitConfig
from memgw.state import now

_OID = re.compile(rb"[0-9a-f]{40}")


@dataclass(frozen=True)
class Asked:
    """`commit`: what the remote had for the branch at `at` or later. `at`: when the asking began."""

    at: str
    commit: str


class Remote:
    """Asked in the quickest way that its URL allows; in git's own (`ls-remote`) whenever anything is unusual, and for
    every no: that a branch is gone is only believed of git."""

    def __init__(self, data: Path, url: str, environ: Mapping[str, str], *, timeout: float) -> None:
        self.url = url
        self.config = GitConfig(data, url, environ)
        self._timeout = timeout

    @property
    def env(self) -> dict[str, str]:
        """What git has to be started with, for this remote and anything else."""
        return self.config.env

    def ask(self, branch: Branch, deadline: Deadline, since: float | None = None) -> Asked:
        """The commit of `branch` in the remote, from an asking that began at `since` or later: a moment of
        `time.monotonic()`, the arrival of the request if None.

        Raises BranchNotFound, RemoteUnreachable, RemoteAuthFailed, DeadlineExceeded.
        """
        with deadline.step("ask"):
            at = now()
            limit = Deadline(deadline.left(self._timeout))
            try:
                return Asked(at, self._quickly(branch, limit) or self._ls_remote(branch, limit, deadline))
            except DeadlineExceeded as exc:
                if deadline.is_over:
                    raise deadline.exceeded() from exc
                raise RemoteUnreachable("the remote did not answer in time") from exc

    def _quickly(self, branch: Branch, limit: Deadline) -> str | None:
        view = self.config.view(limit)
        place = refs.place(view.url) if view and not view.hides_refs else None
        return refs.read(place, branch.ref) if place else None

    def _ls_remote(self, branch: Branch, limit: Deadline, deadline: Deadline) -> str:
        git = Commands(self.config.path.parent, self.env, limit)
        try:
            out = cast(bytes, git.ls_remote("--", self.url, branch.ref))
        except ToolError as exc:
            raise_remote(exc, deadline)
        for line in out.split(b"\n"):
            oid, _, ref = line.partition(b"\t")
            if ref == branch.ref.encode():  # ls-remote matches the end of names
                if not _OID.fullmatch(oid):
                    raise RemoteUnreachable("the remote does not use SHA-1 object names, which memgw needs")
                return oid.decode("ascii")
        if not out and self.url.startswith("http"):
            self._confirm_refs(git, deadline)
        raise BranchNotFound(f"the remote has no branch {branch.name!r}")

    def _confirm_refs(self, git: Commands, deadline: Deadline) -> None:
        """Git takes any empty answer over HTTP, a broken proxy's too, for a repository without refs. Raises
        RemoteUnreachable unless the remote has some."""
        try:
            if git.ls_remote("--", self.url, "HEAD") or git.ls_remote("--heads", "--", self.url):
                return
        except ToolError as exc:
            raise_remote(exc, deadline)
        raise RemoteUnreachable("the remote lists no ref at all: it is empty, or no Git server answered")
