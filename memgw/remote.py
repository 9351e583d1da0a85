"""The remote, which alone knows the newest commit of a branch. Asking it is read only and takes no lock."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from memgw import lsrefs, metrics, proc, refs
from memgw.asking import Asked, Askings
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, DeadlineExceeded, RemoteUnreachable, ToolError
from memgw.gitcmd import Commands, raise_remote
from memgw.gitconfig import GitConfig, View
from memgw.state import now

QUICK_SECONDS = 5.0

_HEAD = re.compile(rb"[0-9a-f]{40}\trefs/heads/([^\t]+)")
_OID = re.compile(rb"[0-9a-f]{40}")


class Remote:
    """Asked in the quickest way that its URL allows; in git's own (`ls-remote`) whenever anything is unusual, and for
    every no: that a branch is gone is only believed of git."""

    def __init__(self, data: Path, url: str, environ: Mapping[str, str], *, timeout: float) -> None:
        self.url = url
        self.config = GitConfig(data, url, environ)
        self._timeout = timeout
        self._askings = Askings(data, url)
        self._server: tuple[View, lsrefs.Server | None] | None = None

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
            with self._limited(deadline) as limit:
                view = self.config.view(limit)
            place = refs.place(view.url) if view and not view.hides_refs else None
            if place and (commit := refs.read(place, branch.ref)):  # quicker than any sharing
                with metrics.asking():
                    return Asked(at, commit)
            since = deadline.started if since is None else since
            return self._askings.share(branch, deadline, since, lambda: self._ask(branch, view, deadline))

    def branches(self, deadline: Deadline) -> frozenset[str]:
        """The names of all branches. Raises as `ask` does, and RemoteUnreachable for a list that is empty or not to the
        letter: that is no proof that anything is gone."""
        self.config.write()
        with self._limited(deadline) as limit:
            git = Commands(self.config.path.parent, self.env, limit)
            try:
                out = cast(bytes, git.ls_remote("--heads", "--", self.url))
            except ToolError as exc:
                self.config.forget_connections()
                raise_remote(exc, deadline)
        *lines, last = out.split(b"\n")
        found = [_HEAD.fullmatch(line) for line in lines]
        if not found or None in found or last:
            raise RemoteUnreachable("the remote's list of branches is empty, or not understood")
        return frozenset(os.fsdecode(match[1]) for match in found if match)

    def close(self) -> None:
        """Ends the connections that ssh keeps. For when the gateway ends."""
        folder = self.config.connections
        for socket in folder.glob("*") if folder else ():
            command = ["ssh", "-F", "/dev/null", "-o", f"ControlPath={socket}", "-O", "exit", "memgw"]
            with suppress(ToolError):
                proc.run(command, cwd=socket.parent, env=self.env, timeout=2)

    def _ask(self, branch: Branch, view: View | None, deadline: Deadline) -> Asked:
        at = now()
        with self._limited(deadline) as limit:
            commit = self._over_http(branch, view, limit) if view else None
            return Asked(at, commit or self._ls_remote(branch, limit, deadline))

    @contextmanager
    def _limited(self, deadline: Deadline) -> Iterator[Deadline]:
        """The time for a whole asking, all tries together."""
        limit = Deadline(deadline.left(self._timeout))
        try:
            yield limit
        except DeadlineExceeded as exc:
            if deadline.is_over:
                raise deadline.exceeded() from exc
            raise RemoteUnreachable("the remote did not answer in time") from exc

    def _over_http(self, branch: Branch, view: View, limit: Deadline) -> str | None:
        if not self._server or self._server[0] != view:
            self._server = view, lsrefs.server(view.url, dict(view.http), self.env)
        server = self._server[1]
        if not server:
            return None
        seconds = limit.left() / 2  # the other half is for git
        return server.tip(branch.ref, min(seconds, QUICK_SECONDS), lambda: self._credentials(view.url, limit))

    def _credentials(self, url: str, limit: Deadline) -> tuple[str, str] | None:
        git = Commands(self.config.path.parent, self.env, limit)
        try:
            out = cast(bytes, git.credential("fill", istream=f"url={url}\n\n".encode()))
        except (ToolError, DeadlineExceeded):
            return None
        said = dict(line.split("=", 1) for line in out.decode().split("\n") if "=" in line)
        return (said["username"], said["password"]) if {"username", "password"} <= said.keys() else None

    def _ls_remote(self, branch: Branch, limit: Deadline, deadline: Deadline) -> str:
        git = Commands(self.config.path.parent, self.env, limit)
        try:
            out = cast(bytes, git.ls_remote("--", self.url, branch.ref))
        except ToolError as exc:
            self.config.forget_connections()
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
