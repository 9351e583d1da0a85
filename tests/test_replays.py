"""What was taken once is not taken twice: not by another worker, not after a restart; damage only forgets."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import time

import pytest

from memgw import files, replays
from memgw.config import ROOT
from memgw.errors import HookReplayed, StorageFull, WorkspaceBusy
from memgw.replays import Replays
from tests.test_metrics import fill

WINDOW = 300.0


def mark(number: int) -> str:
    return sha256(str(number).encode()).hexdigest()


def taken(replays: Replays, name: str, until: float | None = None) -> bool:
    try:
        with replays.once(name, time() + WINDOW if until is None else until):
            return True
    except HookReplayed:
        return False


def remembered(data: Path) -> dict[str, float]:
    found = json.loads((data / "hooks" / "taken.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def test_a_repeat_is_refused_by_whoever_gets_it(data: Path) -> None:
    assert taken(Replays(data), mark(1))
    assert not taken(Replays(data), mark(1))
    assert taken(Replays(data), mark(2))


def test_of_many_at_once_in_several_processes_one_is_taken(data: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from concurrent.futures import ThreadPoolExecutor\n"
        "from tests.test_replays import Replays, taken\n"
        "one = Replays(Path(sys.argv[1]))\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda _: taken(one, 'a' * 64), range(16))))"
    )
    command = [sys.executable, "-c", script, str(data)]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(int(process.communicate()[0]) for process in both) == [0, 1]


def test_what_failed_was_not_taken(data: Path) -> None:
    one = Replays(data)
    with pytest.raises(WorkspaceBusy), one.once(mark(1), time() + WINDOW):
        raise WorkspaceBusy("too many", 1)
    assert taken(one, mark(1))


def test_it_is_remembered_until_the_moment_that_was_said_and_then_forgotten(data: Path) -> None:
    one = Replays(data)
    now = time()
    assert taken(one, mark(1), now + 2 * WINDOW - 1)
    assert taken(one, mark(2), now - 1)
    assert taken(one, mark(2), now + WINDOW)
    assert set(remembered(data)) == {mark(1), mark(2)}
    files.replace(data / "hooks" / "taken.json", json.dumps({mark(3): now - 1, mark(4): now + 60}))
    assert taken(one, mark(3))
    assert not taken(one, mark(4))


def test_the_list_is_bounded_and_loses_what_would_be_forgotten_first(data: Path) -> None:
    now = time()
    full = {mark(number): now + 10 + number / 100 for number in range(replays.MOST)}
    files.replace(data / "hooks" / "taken.json", json.dumps(full))
    one = Replays(data)
    assert taken(one, "f" * 64)
    assert len(remembered(data)) == replays.MOST
    assert taken(one, mark(0))
    assert not taken(one, mark(replays.MOST - 1))
    assert (data / "hooks" / "taken.json").stat().st_size < 500_000


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 30_000, b'{"a": "b"}', b'{"a": null}', b'{"a": [1]}',
        b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e400}', b'{"a": 99999999999999}', b'{"a": true}', b"\0" * 4096,
        b'{"' + b"a" * 2_000_000 + b'": 1}',
    ],
)  # fmt: skip
def test_a_damaged_list_forgets_and_is_whole_again(data: Path, damage: bytes) -> None:
    one = Replays(data)
    assert taken(one, mark(1))
    (data / "hooks" / "taken.json").write_bytes(damage)
    assert taken(one, mark(1))
    assert not taken(one, mark(1))
    assert set(remembered(data)) == {mark(1)}


def test_lost_files_and_folders_in_their_places_are_no_matter(data: Path) -> None:
    one = Replays(data)
    assert taken(one, mark(1))
    files.remove(data)
    assert taken(one, mark(1))
    for name in ("hooks/taken.json", "locks/hooks.lock"):
        files.remove(data / name)
        (data / name / "below").mkdir(parents=True)
        assert taken(one, mark(2))
        assert not taken(one, mark(2))
        files.remove(data / "hooks")
    (data / "hooks").write_text("no folder")
    assert taken(one, mark(1))
    assert not taken(one, mark(1))


def test_a_clock_that_was_set_back_does_not_keep_it_for_ever(data: Path) -> None:
    one = Replays(data)
    files.replace(data / "hooks" / "taken.json", json.dumps({mark(1): time() + 400_000}))
    assert taken(one, mark(1))


def test_on_a_full_disk_nothing_is_remembered_and_that_is_told(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        one = Replays(place / "data")
        assert taken(one, mark(1))
        fill(place / "ballast")
        for _ in range(2):
            with pytest.raises(StorageFull):
                taken(one, mark(2))
        assert not taken(one, mark(1))
        (place / "ballast").unlink()
        assert taken(one, mark(2))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_whoever_holds_the_lock_for_long_is_not_waited_for(data: Path) -> None:
    one, entered, leave = Replays(data), threading.Event(), threading.Event()

    def hold() -> None:
        with one.once(mark(1), time() + WINDOW):
            entered.set()
            assert leave.wait(30)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert entered.wait(30)
        with pytest.raises(WorkspaceBusy):
            taken(Replays(data), mark(2))
        leave.set()
    assert taken(one, mark(2))
