"""The gateway's own gitconfig, and what git makes of it together with the operator's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import cast

from memgw import files
from memgw.deadline import Deadline
from memgw.environ import for_git
from memgw.errors import ToolError
from memgw.gitcmd import Commands

BELIEVED_SECONDS = 60.0

_SETTINGS = """\
# Written by memgw. Your own settings come first, so that credential helpers, proxies and core.sshCommand work.
[core]
    sshCommand = {ssh}
[include]
{includes}
[core]
    hooksPath = /dev/null
    fsmonitor = false
    logAllRefUpdates = false
    fsync = none
    autocrlf = false
    symlinks = true
    quotePath = true
    attributesFile = /dev/null
    excludesFile = /dev/null
[safe]
    directory = *
[gc]
    auto = 0
[maintenance]
    auto = false
[fetch]
    unpackLimit = 1
    recurseSubmodules = false
    writeCommitGraph = false
[checkout]
    defaultRemote =
[submodule]
    recurse = false
[advice]
    detachedHead = false
[protocol]
    version = 2
[init]
    templateDir =
"""


@dataclass(frozen=True)
class View:
    """The remote as git sees it. `url`: after the operator's `insteadOf`. `hides_refs`: some setting of his may hide
    refs of a repository on this machine. `http`: the settings that hold for `url`, named in lower case, no `http.`."""

    url: str
    hides_refs: bool
    http: tuple[tuple[str, str], ...]


class GitConfig:
    """`<data>/git-mirror/gitconfig`, and `env`: the environment that makes git read it."""

    def __init__(self, data: Path, url: str, environ: Mapping[str, str]) -> None:
        self.path = data / "git-mirror" / "gitconfig"
        self.env = for_git(environ, self.path, data)
        self._url = url
        own = [
            Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/"), ".config"), "git/config"),
            Path(environ.get("HOME", "/"), ".gitconfig"),
        ]
        if named := environ.get("GIT_CONFIG_GLOBAL"):
            own = [Path(named)]
        self.connections = data / "run" / "ssh" if _multiplexes(url, data) else None
        self._text = _SETTINGS.format(
            ssh=" -o ".join(["ssh", "BatchMode=yes", *_multiplexing(self.connections)]),
            includes="\n".join(f"    path = {_quoted(place)}" for place in own),
        )
        self._read = [self.path, *own, Path("/etc/gitconfig")]
        self._lock = Lock()
        self._view: tuple[View, object, float] | None = None

    def write(self) -> None:
        files.ensure(self.path, self._text)
        if self.connections:
            files.make_folder(self.connections)
            if self.connections.stat().st_mode & 0o077:  # who can open a socket in there is us to the remote
                self.connections.chmod(0o700)

    def forget_connections(self) -> None:
        """Makes the next ssh connect anew. A connection that is kept ends by itself when nobody uses it."""
        if self.connections:
            for socket in self.connections.glob("*"):
                socket.unlink(missing_ok=True)

    def view(self, deadline: Deadline) -> View | None:
        """None when git can't say. A change of the files that git reads counts at once; one of files that these include
        in their turn, which we do not know, after a minute."""
        self.write()
        with self._lock:  # one looks, those behind it use what it saw
            seen = [_identity(path) for path in self._read]
            if not self._view or self._view[1] != seen or self._view[2] < monotonic() - BELIEVED_SECONDS:
                try:
                    self._view = self._look(deadline), seen, monotonic()
                except (ToolError, UnicodeDecodeError):
                    self._view = None
            return self._view[0] if self._view else None

    def _look(self, deadline: Deadline) -> View:
        git = Commands(self.path.parent, self.env, deadline)
        url = self._url
        names = {name for name, _ in _pairs(git.config("-z", "--list"))}
        if any(re.match(r"url\.|remote\.", name) for name in names):
            url = cast(bytes, git.ls_remote("--get-url", "--", url)).decode().removesuffix("\n")
        http: list[tuple[str, str]] = []
        if any(name.startswith("http.") for name in names):
            http = _pairs(git.config("-z", "--get-urlmatch", "http", url))
        return View(
            url,
            bool(names & {"transfer.hiderefs", "uploadpack.hiderefs"}),
            tuple((name.removeprefix("http."), value) for name, value in http),
        )


def _multiplexes(url: str, data: Path) -> bool:
    """Whether ssh is what git will use, and the socket's path is of a length and of letters that ssh can take: ssh adds
    40 to the folder's for %C and 17 while it makes one, of the 108 that a socket's address has."""
    ssh = re.match(r"(ssh|git\+ssh|ssh\+git)://|(?!\w+://)[^/]+:", url)
    return bool(ssh and re.fullmatch(r"[A-Za-z0-9/._-]{1,40}", str(data)))


def _multiplexing(folder: Path | None) -> list[str]:
    """Options that keep one connection for a minute: a new command on it costs one round trip, and is as fresh as ever,
    since the server starts an upload-pack for each. A connection that the network lost is given up after 10 seconds."""
    if not folder:
        return []
    options = ("ControlMaster=auto", "ControlPersist=60", "ServerAliveInterval=5", "ServerAliveCountMax=2")
    return [*options, f"ControlPath={folder}/%C"]


def _pairs(listed: bytes) -> list[tuple[str, str]]:
    """What `git config -z` prints: a name, a line feed and the value, ended by NUL."""
    pairs = [entry.partition("\n") for entry in listed.decode().split("\0")[:-1]]
    return [(name, value) for name, _, value in pairs]


def _identity(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
