"""Processes: what comes back, what is raised, and that nothing which was started outlives its call."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import FrameType

import pytest

from memgw import proc
from memgw.config import ROOT
from memgw.errors import ToolFailed, ToolMissing, ToolOutputTooLarge, ToolTimeout
from tests.actors import children, until

PATH = "/usr/local/bin:/usr/bin:/bin"

Shell = Callable[..., bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "folder"
    place.mkdir()
    return place


@pytest.fixture
def sh(folder: Path) -> Iterator[Shell]:
    """Runs a piece of shell; afterwards no child and no descriptor may be left."""

    def run(
        script: str,
        *,
        timeout: float = 20,
        stdin: bytes = b"",
        max_output: int = 1 << 30,
        keep_open: tuple[int, ...] = (),
    ) -> bytes:
        return proc.run(
            ["sh", "-c", script],
            cwd=folder,
            env={"PATH": PATH},
            timeout=timeout,
            stdin=stdin,
            max_output=max_output,
            keep_open=keep_open,
        )

    run("")  # what is made once and kept, is made here
    before, running = os.listdir("/proc/self/fd"), children(os.getpid())  # the warm host of other tests
    yield run
    assert os.listdir("/proc/self/fd") == before
    assert children(os.getpid()) == running


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def all_gone(file: Path, count: int) -> bool:
    """Whether the processes whose ids were written to `file` have ended."""
    pids = file.read_text().split()
    assert len(pids) == count
    return until(lambda: all(map(is_gone, pids)), 5)


def test_what_a_process_writes_to_stdout_comes_back_whole(sh: Shell) -> None:
    assert sh("printf 'a\\0\\377\\n'; echo noise >&2") == b"a\0\xff\n"
    assert sh("head -c 3000000 /dev/zero & head -c 3000000 /dev/zero >&2; wait") == bytes(3_000_000)
    assert sh("") == b""


def test_stdin_is_fed_while_the_output_is_read(sh: Shell) -> None:
    data = os.urandom(1_000_000)
    assert sh("cat", stdin=data * 5) == data * 5
    assert sh("cat; echo end") == b"end\n"


def test_a_process_that_does_not_read_its_stdin_is_no_error(sh: Shell) -> None:
    assert sh("exec <&-; echo x", stdin=bytes(1_000_000)) == b"x\n"
    assert sh("head -c 1 >/dev/null; echo y", stdin=bytes(1_000_000)) == b"y\n"


def test_it_runs_where_it_was_told_in_a_session_of_its_own(sh: Shell, folder: Path) -> None:
    assert sh("pwd -P") == f"{folder.resolve()}\n".encode()
    session = int(sh("cut -d' ' -f6 /proc/self/stat"))
    assert session not in (os.getsid(0), 0)


def test_the_environment_is_the_given_one_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    env = {"PATH": PATH, "NAME": "two\nlines", "EMPTY": ""}
    out = proc.run(["env", "-0"], cwd=folder, env=env, timeout=20)
    assert dict(item.split("=", 1) for item in out.decode().split("\0")[:-1]) == env


def test_no_shell_reads_the_arguments(folder: Path) -> None:
    odd = ["$(touch x)", "`touch y`", "; touch z", "*", "a b", "-n", "\\", "é\n"]
    out = proc.run(["printf", "%s\\0", *odd], cwd=folder, env={"PATH": PATH}, timeout=20)
    assert out.decode().split("\0")[:-1] == odd
    assert os.listdir(folder) == []


def test_another_status_than_0_is_an_error_with_all_that_a_log_needs(sh: Shell) -> None:
    with pytest.raises(ToolFailed) as caught:
        sh("echo lost; printf 'said \\377' >&2; exit 3")
    assert caught.value.status == 3
    assert caught.value.stderr == "said \ufffd"
    assert caught.value.argv == ["sh", "-c", "echo lost; printf 'said \\377' >&2; exit 3"]
    assert str(caught.value) == "ended with status 3"


def test_of_a_long_stderr_the_end_is_kept(sh: Shell) -> None:
    with pytest.raises(ToolFailed) as caught:
        sh("head -c 300000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 1")
    assert caught.value.stderr.endswith("xxx" + "the end\n")
    assert len(caught.value.stderr) == proc.STDERR_KEPT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_a_process_that_a_signal_ended_has_its_negative_as_status(sh: Shell, number: int) -> None:
    with pytest.raises(ToolFailed) as caught:
        sh(f"ulimit -c 0; kill -{number} $$")
    assert caught.value.status == -number


def test_what_is_not_there_or_no_program_is_missing(folder: Path) -> None:
    (folder / "text").write_text("no program")
    for executable in ("no-such-program", str(folder / "nothing"), str(folder / "text"), str(folder), ""):
        with pytest.raises(ToolMissing) as caught:
            proc.run([executable, "x"], cwd=folder, env={"PATH": PATH}, timeout=20)
        assert caught.value.argv == [executable, "x"]


def test_a_folder_to_run_in_that_is_not_there_is_told_as_missing(folder: Path) -> None:
    with pytest.raises(ToolMissing):
        proc.run(["true"], cwd=folder / "nothing", env={"PATH": PATH}, timeout=20)


@pytest.mark.skipif(not shutil.which("timeout"), reason="timeout(1) is what makes 126 and 127 doubtful")
@pytest.mark.parametrize("status", [126, 127])
def test_the_status_of_what_could_not_be_started_is_told_as_missing(sh: Shell, status: int) -> None:
    with pytest.raises(ToolMissing) as caught:
        sh(f"echo reason >&2; exit {status}")
    assert caught.value.stderr == "reason\n"
    with pytest.raises(ToolFailed):
        sh(f"exit {status - 2}")


def test_time_that_is_up_ends_the_whole_group(sh: Shell, folder: Path) -> None:
    begin = monotonic()
    with pytest.raises(ToolTimeout) as caught:
        sh(
            "trap '' TERM; (trap '' TERM; sh -c 'echo $$ >> pids; sleep 60') & sh -c 'echo $$ >> pids; exec sleep 60' &"
            " echo $$ >> pids; echo said >&2; wait; sleep 60",
            timeout=0.4,
        )
    assert 0.4 <= monotonic() - begin < 5
    assert caught.value.stderr == "said\n"
    assert caught.value.argv[0] == "sh"
    assert all_gone(folder / "pids", 3)


def test_time_is_up_for_one_that_never_stops_talking(sh: Shell, folder: Path) -> None:
    with pytest.raises(ToolTimeout):
        sh("echo $$ > pids; while :; do echo x; done", timeout=0.3)
    assert all_gone(folder / "pids", 1)


def test_time_is_up_for_one_that_closed_its_output(sh: Shell, folder: Path) -> None:
    with pytest.raises(ToolTimeout):
        sh("echo $$ > pids; exec >&- 2>&-; sleep 60", timeout=0.3)
    assert all_gone(folder / "pids", 1)


def test_time_is_up_for_one_that_does_not_take_its_stdin(sh: Shell, folder: Path) -> None:
    with pytest.raises(ToolTimeout):
        sh("echo $$ > pids; sleep 60", timeout=0.3, stdin=bytes(1_000_000))
    assert all_gone(folder / "pids", 1)


def test_one_that_closed_its_output_is_waited_for(sh: Shell, folder: Path) -> None:
    with pytest.raises(ToolFailed) as caught:
        sh("exec >&- 2>&-; sleep 0.2; touch done; exit 4")
    assert caught.value.status == 4
    assert os.listdir(folder) == ["done"]


def test_a_grandchild_that_keeps_the_pipes_open_is_not_waited_for_and_ended(sh: Shell, folder: Path) -> None:
    begin = monotonic()
    assert sh("sleep 60 & echo $! > pids; echo out", timeout=30) == b"out\n"
    assert monotonic() - begin < 10
    assert all_gone(folder / "pids", 1)


def test_a_grandchild_that_keeps_talking_is_not_waited_for(sh: Shell, folder: Path) -> None:
    begin = monotonic()
    assert sh("(while :; do echo more; done) & echo $! > pids; echo out", timeout=30).splitlines().count(b"out") == 1
    assert monotonic() - begin < 10
    assert all_gone(folder / "pids", 1)


def test_output_without_end_is_cut_off(sh: Shell, folder: Path) -> None:
    with pytest.raises(ToolOutputTooLarge) as caught:
        sh("echo $$ > pids; exec yes", max_output=100_000)
    assert str(caught.value) == "wrote more than 100000 bytes"
    assert all_gone(folder / "pids", 1)


def test_output_up_to_the_limit_is_taken(sh: Shell) -> None:
    assert sh("printf 12345", max_output=5) == b"12345"
    with pytest.raises(ToolOutputTooLarge):
        sh("printf 123456", max_output=5)


def test_a_descriptor_is_inherited_only_when_it_is_named(sh: Shell, folder: Path) -> None:
    with (folder / "one").open("w") as one, (folder / "two").open("w") as two:
        os.set_inheritable(two.fileno(), True)
        script = "for f in /proc/$$/fd/*; do readlink $f; done; true"
        held = sh(script, keep_open=(one.fileno(),)).decode().split("\n")
        assert str(folder / "one") in held
        assert str(folder / "two") not in held
        assert str(folder / "one") not in sh(script).decode().split("\n")
        assert not os.get_inheritable(one.fileno())


class Interrupted(BaseException):
    """Not to be caught by anybody."""


def test_an_exception_in_the_caller_ends_the_process(sh: Shell, folder: Path) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        if not (folder / "pids").exists():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupted):
            sh("sleep 60 & (echo $$; echo $!) > new; mv new pids; wait")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all_gone(folder / "pids", 2)


@pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("timeout"), reason="not on this machine")
@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
def test_a_process_ends_when_its_caller_is_killed(folder: Path, trap: str) -> None:
    code = (
        "import sys; from pathlib import Path; from memgw import proc\n"
        "proc.run(['sh', '-c', sys.argv[1]], cwd=Path(sys.argv[2]), env={'PATH': sys.argv[3]}, timeout=60)"
    )
    script = f"{trap}sleep 60 & (echo $$; echo $!) > new; mv new pids; wait"
    caller = subprocess.Popen([sys.executable, "-c", code, script, str(folder), PATH], cwd=ROOT)
    try:
        assert until((folder / "pids").exists)
        assert not any(map(is_gone, (folder / "pids").read_text().split()))
    finally:
        caller.kill()
        caller.wait()
    assert all_gone(folder / "pids", 2)


def test_a_machine_without_setpriv_and_timeout_does_the_same(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from memgw import proc; from memgw.errors import *\n"
        "def sh(argv, timeout=20): return proc.run(argv, cwd=Path(sys.argv[1]), env={}, timeout=timeout)\n"
        "shell = sys.argv[2]\n"
        "print(sh([shell, '-c', 'echo out']))\n"
        "for argv, timeout in (([shell, '-c', 'exit 127'], 20), ([shell, '-c', 'while :; do :; done'], 0.2),\n"
        "                      (['/nothing'], 20), ([sys.argv[3]], 20)):\n"
        "    try: sh(argv, timeout)\n"
        "    except ToolError as exc: print(type(exc).__name__)"
    )
    garbage = folder / "garbage"
    garbage.write_bytes(b"\0no program")
    garbage.chmod(0o755)
    command = [sys.executable, "-c", code, str(folder), shutil.which("sh") or "sh", str(garbage)]
    env = {"PATH": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["b'out\\n'", "ToolFailed", "ToolTimeout", "ToolMissing", "ToolMissing"], done.stderr


def test_an_executable_named_by_its_path_needs_no_path_variable(folder: Path) -> None:
    echo = shutil.which("echo") or "echo"
    assert proc.run([echo, "x"], cwd=folder, env={}, timeout=20) == b"x\n"
    assert proc.run([echo, "x"], cwd=folder, env={"PATH": str(folder)}, timeout=20) == b"x\n"


def test_calls_of_many_threads_do_not_meet(sh: Shell) -> None:
    def ask(number: int) -> bytes:
        return sh(f"head -c 100000 /dev/zero | tr '\\0' x; cat; echo {number}", stdin=b"<" * number)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(32)))
    assert answers == [b"x" * 100_000 + b"<" * number + b"%d\n" % number for number in range(32)]


def test_a_process_that_stays_runs_as_it_was_told_and_is_waited_for(folder: Path) -> None:
    child = proc.start(["sh", "-c", "env > seen; exit 3"], cwd=folder, env={"PATH": PATH, "NAME": "x"})
    assert proc.wait(child, 20) == 3
    seen = dict(line.split("=", 1) for line in (folder / "seen").read_text().splitlines())
    assert {name: value for name, value in seen.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")} == {
        "PATH": PATH,
        "NAME": "x",
    }
    child = proc.start(["sleep", "60"], cwd=folder, env={"PATH": PATH})
    try:
        assert proc.wait(child, 0.1) is None
    finally:
        child.kill()
    assert proc.wait(child, 20) == -9


@pytest.mark.skipif(not shutil.which("setpriv"), reason="not on this machine")
def test_a_process_that_stays_does_not_outlive_a_caller_that_was_killed(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from memgw import proc\n"
        "proc.start(['sh', '-c', sys.argv[1]], cwd=Path(sys.argv[2]), env={'PATH': sys.argv[3]}).wait()"
    )
    script = "trap '' TERM; echo $$ > new; mv new pids; while :; do read x < pids; sleep 0.1; done"
    caller = subprocess.Popen([sys.executable, "-c", code, script, str(folder), PATH], cwd=ROOT)
    try:
        assert until((folder / "pids").exists)
        assert not is_gone((folder / "pids").read_text().strip())
    finally:
        caller.kill()
        caller.wait()
    assert all_gone(folder / "pids", 1)
