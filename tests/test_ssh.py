"""ssh keeps one connection for a minute: each asking on it is of now; it outlives neither trouble nor the gateway."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest

from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import RemoteUnreachable
from memgw.remote import Remote
from tests.actors import Upstream, processes_with, served, sshd, until

with_sshd = pytest.mark.skipif(
    not shutil.which("sshd") or (os.getuid() == 0 and not Path("/run/sshd").is_dir()),
    reason="no sshd on this machine, or none that starts (as root it needs /run/sshd)",
)


@pytest.fixture
def data() -> Iterator[Path]:
    """A short path: a socket's address has 108 bytes."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def tip(remote: Remote) -> str:
    return remote.ask(Branch("main"), Deadline(60)).commit


@with_sshd
def test_a_push_between_two_askings_is_seen_on_the_same_connection(
    connect: Callable[..., Remote], upstream: Upstream, tmp_path: Path, data: Path
) -> None:
    with sshd(tmp_path / "sshd") as (where, path):
        remote = connect(f"{where}{upstream.path}", PATH=path)
        try:
            for number in range(4):
                commit = upstream.commit("main", {"a.md": f"{number}\n"})
                assert tip(remote) == commit
                assert len(list((data / "run" / "ssh").iterdir())) == 1
            assert (data / "run" / "ssh").stat().st_mode & 0o777 == 0o700
            assert (tmp_path / "sshd" / "log").read_text().count("Accepted") == 1
        finally:
            remote.close()
        assert until(lambda: not processes_with(str(data / "run")))


@with_sshd
def test_a_gateway_over_ssh_fetches_holds_no_lock_afterwards_and_ends_the_connection_with_itself(
    environ: dict[str, str], upstream: Upstream, tmp_path: Path
) -> None:
    with sshd(tmp_path / "sshd") as (where, path):
        environ |= {"GIT_REMOTE_URL": f"{where}{upstream.path}", "PATH": path}
        with served(environ, tmp_path, measured=False) as server:  # which looks for processes that are left
            for number in range(2):
                upstream.commit("main", {"a.md": f"# A\n\nalpha{number}\n"})
                begin = monotonic()
                assert len(server.query(f"alpha{number}")["results"]) == 1
                assert monotonic() - begin < 20
            assert (tmp_path / "sshd" / "log").read_text().count("Accepted") <= 2  # one a worker that came at once


@with_sshd
def test_a_connection_that_hangs_or_died_is_made_anew(
    connect: Callable[..., Remote], upstream: Upstream, tmp_path: Path, data: Path
) -> None:
    with sshd(tmp_path / "sshd") as (where, path):
        remote = connect(f"{where}{upstream.path}", timeout=2, PATH=path)
        upstream.commit("main", {"a.md": "0\n"})
        tip(remote)
        (master,) = processes_with(str(data / "run"))
        try:
            os.kill(master, 19)
            with pytest.raises(RemoteUnreachable):
                tip(remote)
            commit = upstream.commit("main", {"a.md": "1\n"})
            assert tip(remote) == commit
        finally:
            os.kill(master, 9)
            for other in processes_with(str(data / "run")):
                os.kill(other, 9)
        commit = upstream.commit("main", {"a.md": "2\n"})
        assert tip(remote) == commit
        remote.close()


def test_ssh_is_told_to_keep_the_connection_in_a_private_folder(
    connect: Callable[..., Remote], upstream: Upstream, tmp_path: Path, data: Path
) -> None:
    said = tmp_path / "said"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" > {said}\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    remote = connect(f"ssh://example.com{upstream.path}", PATH=f"{ssh.parent}:{os.environ['PATH']}")
    for number in range(2):
        commit = upstream.commit("main", {"a.md": f"{number}\n"})
        assert tip(remote) == commit
    assert f"-o ControlPath={data}/run/ssh/%C" in said.read_text()
    assert (data / "run" / "ssh").stat().st_mode & 0o777 == 0o700
    own = tmp_path / "home" / ".gitconfig"
    own.write_text(f"[core]\n\tsshCommand = {ssh} -i key\n")
    assert tip(remote) == commit
    assert said.read_text().startswith("-i key")
    assert "Control" not in said.read_text()


@pytest.mark.parametrize("name", ["x" * 60, "a b", "a%b"])
def test_a_data_directory_that_no_socket_fits_in_is_done_without(
    connect: Callable[..., Remote], upstream: Upstream, tmp_path: Path, data: Path, name: str
) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\ncase "$*" in *Control*) exit 1;; esac\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    environ = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    commit = upstream.commit("main", {"a.md": "0\n"})
    assert tip(Remote(data / name, f"ssh://h{upstream.path}", environ, timeout=30)) == commit
