"""The only place where processes are started."""

import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which
from time import monotonic, sleep
from typing import NoReturn

from memgw.errors import ToolFailed, ToolMissing, ToolOutputTooLarge, ToolTimeout

Process = subprocess.Popen[bytes]

STDERR_KEPT = 16_384
_CHUNK = 65_536
_LOOK_EVERY = 0.05
_GRACE = 5.0


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    keep_open: tuple[int, ...] = (),
    stdin: bytes = b"",
    max_output: int = 64 * 1024 * 1024,
    harmless: bool = False,
) -> bytes:
    """Runs a process to its end and returns what it wrote to stdout.

    No shell; a session of its own, killed as a group as soon as the process ends or we leave, so that nothing
    that it started outlives the call. `timeout` is in seconds. `keep_open`: descriptors that the
    process inherits; a lock's, so that the lock is held until the process is gone even if we are killed. An orphan is
    ended by the kernel (setpriv) or by `timeout`, where the machine has these; not a `harmless` one, which only reads,
    ends when nobody takes what it writes, and is started in half the time.

    Raises ToolMissing, ToolTimeout, ToolOutputTooLarge (more than `max_output` bytes), ToolFailed (status not 0).
    """
    command = list(argv)
    backstop = [] if harmless else _backstop(timeout)
    try:
        child = subprocess.Popen(
            [*backstop, *command],
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=keep_open,
        )
    except OSError as exc:
        raise ToolMissing(f"can't be started: {exc}", command) from exc
    with child:
        try:
            out, err = _communicate(child, command, stdin, monotonic() + timeout, max_output)
        finally:
            # the child is not reaped yet, so that its number still is that of its group and of no other
            os.killpg(child.pid, signal.SIGKILL)
    stderr = err.decode(errors="replace")
    if len(err) >= STDERR_KEPT:  # no half line: it could hold half of a secret
        stderr = stderr.partition("\n")[2] or stderr
    status = child.returncode
    if backstop and status in (126, 127):  # timeout(1): can't be invoked, not found
        raise ToolMissing("can't be started", command, stderr)
    if status:
        raise ToolFailed(f"ended with status {status}", command, stderr, status)
    return out


def start(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> Process:
    """Starts a process that stays, writing where we write; raises ToolMissing. It ends with us where the machine has
    setpriv."""
    setpriv = _setpriv()
    prefix = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
    try:
        return subprocess.Popen([*prefix, *argv], cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL)
    except OSError as exc:
        raise ToolMissing(f"can't be started: {exc}", list(argv)) from exc


def become(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> NoReturn:
    """Goes on as another program, under the same process id; raises ToolMissing. It ends with our parent where the
    machine has setpriv."""
    setpriv = _setpriv()
    command = [*([setpriv, "--pdeathsig", "TERM"] if setpriv else []), *argv]
    try:
        os.chdir(cwd)
        os.execvpe(command[0], command, dict(env))  # noqa: S606  no shell is what we want
    except OSError as exc:
        raise ToolMissing(f"can't be started: {exc}", list(argv)) from exc


def wait(child: Process, seconds: float) -> int | None:
    """The status of a started process once it has ended, None if it has not after so many seconds."""
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _communicate(child: Process, argv: list[str], stdin: bytes, end: float, max_output: int) -> tuple[bytes, bytes]:
    """Feeds and reads the child until it has ended; what its own children still hold open is not waited for."""
    out, err = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None  # noqa: S101  for mypy: asked for above
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            selector.register(child.stdin, selectors.EVENT_WRITE)
        unsent = memoryview(stdin)
        ended = False
        while selector.get_map():
            left = end - monotonic()
            if left <= 0:
                raise ToolTimeout("ran out of time", argv, err.decode(errors="replace"))
            ready = selector.select(0 if ended else min(left, _LOOK_EVERY))
            if ended and not any(key.fileobj is not child.stdin for key, _ in ready):
                break
            for key, _ in ready:
                if key.fileobj is child.stdin:
                    unsent = _feed(child, selector, unsent)
                    continue
                try:
                    chunk = os.read(key.fd, _CHUNK)
                except BlockingIOError:
                    continue
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stdout:
                    out += chunk
                    if len(out) > max_output:
                        raise ToolOutputTooLarge(f"wrote more than {max_output} bytes", argv)
                else:
                    err = (err + chunk)[-STDERR_KEPT:]
            ended = _has_ended(child)
        pause = 0.0005
        while not _has_ended(child):  # mostly a moment between the end of its output and its own
            left = end - monotonic()
            if left <= 0:
                raise ToolTimeout("ran out of time", argv, err.decode(errors="replace"))
            sleep(min(left, pause))
            pause = min(2 * pause, _LOOK_EVERY)
    return bytes(out), bytes(err)


def _has_ended(child: Process) -> bool:
    """Looks without reaping."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _feed(child: Process, selector: selectors.BaseSelector, unsent: memoryview) -> memoryview:
    """Writes a piece of stdin and closes it after the last; a child that stopped reading is no error here."""
    assert child.stdin is not None  # noqa: S101  for mypy: registered only when there is one
    try:
        unsent = unsent[os.write(child.stdin.fileno(), unsent[:_CHUNK]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        unsent = unsent[len(unsent) :]
    if not unsent:
        selector.unregister(child.stdin)
        child.stdin.close()
    return unsent


def _backstop(timeout: float) -> list[str]:
    """What ends the process when we can't: our own death, seen by the kernel, or the clock."""
    setpriv, clock = _setpriv(), which("timeout")
    prefix = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
    return [*prefix, clock, "-k", "1", f"{timeout + _GRACE:.0f}"] if clock else prefix


@cache
def _setpriv() -> str | None:
    """util-linux's setpriv, if it is here and knows --pdeathsig (busybox's does not)."""
    setpriv = which("setpriv")
    if setpriv is None:
        return None
    knows = subprocess.run([setpriv, "--pdeathsig", "TERM", setpriv, "--version"], capture_output=True)
    return None if knows.returncode else setpriv
