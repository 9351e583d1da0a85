"""What is remembered of a workspace: whole, or not at all, whatever happened to the files."""

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from memgw.index import Identity
from memgw.state import Notes, Stamp, State, StateFile, all_states, now

STAMP = Stamp(
    serial="s1",
    commit="a" * 40,
    qmd="2.8.3",
    collection="_",
    embed_model="",
    identity=Identity("index-0123.sqlite", 12, 4096, 1_700_000_000_123_456_789),
    documents=3,
    skipped=1,
)
STATE = State("记忆/x", "a" * 40, STAMP, "b" * 40, "2026-03-01T00:00:00.000000Z", 12345)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "state"


@pytest.fixture
def file(folder: Path) -> StateFile:
    return StateFile(folder, "main~01")


def written(state: State = STATE) -> dict[str, Any]:
    return {"format": 1} | asdict(state)


def put(folder: Path, content: object, name: str = "main~01.json") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.mark.parametrize("state", [STATE, State("main"), replace(STATE, stamp=None, synced_at=None)])
def test_what_is_saved_is_loaded(file: StateFile, state: State) -> None:
    file.save(replace(STATE, branch="another"))
    file.save(state)
    assert file.load() == state


def test_it_is_one_file_in_a_format_that_a_person_can_read(file: StateFile, folder: Path) -> None:
    file.save(STATE)
    assert os.listdir(folder) == ["main~01.json"]
    assert json.loads((folder / "main~01.json").read_text("utf-8")) == written()


def test_nothing_is_known_of_a_workspace_without_a_file(file: StateFile, folder: Path) -> None:
    assert file.load() is None
    assert file.notes() == Notes()
    assert not folder.exists()


def test_a_change_makes_another_state() -> None:
    assert STATE.but(stamp=None, worktree_bytes=1) == replace(STATE, stamp=None, worktree_bytes=1)
    assert STATE.stamp == STAMP


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 400, b"\xff\xfe", b"{", b"[]", b"null", b"1", b'"x"', b"{}", b"[" * 100_000, b'{"format": 1}',
        json.dumps(written()).encode()[:-20],
    ],
)  # fmt: skip
def test_nothing_is_known_from_garbage(file: StateFile, folder: Path, content: bytes) -> None:
    put(folder, content)
    assert file.load() is None


@pytest.mark.parametrize("number", [0, 2, "1", None, [1]])
def test_nothing_is_known_from_another_format(file: StateFile, folder: Path, number: object) -> None:
    put(folder, written() | {"format": number})
    assert file.load() is None


def test_nothing_is_known_when_a_field_is_missing_or_strange(file: StateFile, folder: Path) -> None:
    put(folder, written() | {"color": "red"})
    assert file.load() is None
    for field in ("format", "branch", "stamp"):
        put(folder, {key: value for key, value in written().items() if key != field})
        assert file.load() is None, field
    for field in asdict(STAMP):
        put(folder, written() | {"stamp": {key: value for key, value in asdict(STAMP).items() if key != field}})
        assert file.load() is None, field
    for field in asdict(STAMP.identity):
        identity = {key: value for key, value in asdict(STAMP.identity).items() if key != field}
        put(folder, written() | {"stamp": asdict(STAMP) | {"identity": identity}})
        assert file.load() is None, field


OTHER: list[Any] = [5, 5.5, True, "text", ["text"], {"a": 1}, None]


def others(value: object, *, optional: bool = False) -> list[Any]:
    """Values of other types than that of `value`."""
    return [other for other in OTHER if not isinstance(other, type(value)) and not (optional and other is None)]


@pytest.mark.parametrize("field", [field for field in asdict(STATE) if field != "stamp"])
def test_nothing_is_known_when_a_field_is_of_another_type(file: StateFile, folder: Path, field: str) -> None:
    value = asdict(STATE)[field]
    for other in others(value, optional=field not in ("branch", "worktree_bytes")):
        put(folder, written() | {field: other})
        assert file.load() is None, other


@pytest.mark.parametrize("field", asdict(STAMP))
def test_nothing_is_known_when_a_field_of_the_stamp_is_of_another_type(
    file: StateFile, folder: Path, field: str
) -> None:
    for other in others(asdict(STAMP)[field]):
        put(folder, written() | {"stamp": asdict(STAMP) | {field: other}})
        assert file.load() is None, other


@pytest.mark.parametrize("field", asdict(STAMP.identity))
def test_nothing_is_known_when_a_field_of_the_identity_is_of_another_type(
    file: StateFile, folder: Path, field: str
) -> None:
    for other in others(asdict(STAMP.identity)[field]):
        identity = asdict(STAMP.identity) | {field: other}
        put(folder, written() | {"stamp": asdict(STAMP) | {"identity": identity}})
        assert file.load() is None, other


def test_a_folder_in_place_of_the_file_is_nothing_known(file: StateFile, folder: Path) -> None:
    (folder / "main~01.json").mkdir(parents=True)
    (folder / "notes" / "main~01.json").mkdir(parents=True)
    assert file.load() is None
    assert file.notes() == Notes()


def test_the_last_asking_is_noted(file: StateFile) -> None:
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    assert file.notes() == Notes("2026-03-01T00:00:00.000000Z", "a" * 40)
    file.note_asked("2026-03-01T00:00:01.000000Z", "a" * 40)
    assert file.notes() == Notes("2026-03-01T00:00:01.000000Z", "a" * 40)


def test_an_asking_within_the_same_second_is_not_worth_a_write(file: StateFile) -> None:
    file.note_asked("2026-03-01T00:00:01.100000Z", "a" * 40)
    file.note_asked("2026-03-01T00:00:01.900000Z", "a" * 40)
    file.note_asked("2026-03-01T00:00:00.900000Z", "a" * 40)
    assert file.notes().asked_at == "2026-03-01T00:00:01.100000Z"
    file.note_asked("2026-03-01T00:00:01.950000Z", "b" * 40)
    assert file.notes() == Notes("2026-03-01T00:00:01.950000Z", "b" * 40)


def test_an_error_is_noted_beside_the_last_asking_and_gone_after_the_next(file: StateFile) -> None:
    file.save(STATE)
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    before = now()
    file.note_error("RemoteUnreachable", "the remote could not be reached")
    notes = file.notes()
    assert (notes.asked_at, notes.asked_commit) == ("2026-03-01T00:00:00.000000Z", "a" * 40)
    assert notes.last_error
    assert before <= notes.last_error.at <= now()
    assert notes.last_error.kind == "RemoteUnreachable"
    assert notes.last_error.detail == "the remote could not be reached"
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    assert file.notes().last_error is None
    assert file.load() == STATE


def test_an_error_of_a_branch_that_somebody_made_up_leaves_nothing_behind(file: StateFile, folder: Path) -> None:
    file.note_error("BranchNotFound", "no such branch")
    assert file.notes() == Notes()
    assert not folder.exists()


def test_notes_that_cant_be_written_are_no_error(file: StateFile, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way of the folder")
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    assert file.notes() == Notes()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"{", b"[]", b"null", b"[" * 100_000, b'{"color": 1}', b'{"asked_at": 5}', b'{"asked_commit": 5}',
        b'{"last_error": "x"}', b'{"last_error": ["x"]}', b'{"last_error": {"code": 5}}',
    ],
)  # fmt: skip
def test_notes_that_are_no_notes_tell_nothing(file: StateFile, folder: Path, content: bytes) -> None:
    put(folder, content, "notes/main~01.json")
    assert file.notes() == Notes()
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    assert file.notes() == Notes("2026-03-01T00:00:00.000000Z", "a" * 40)


def test_leftovers_of_killed_writers_are_removed_for_this_workspace_only(file: StateFile, folder: Path) -> None:
    file.save(STATE)
    file.note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    for name in (".main~01.json.abcdefgh", ".main~02.json.abcdefgh"):
        for place in (folder, folder / "notes"):
            (place / name).touch()
            os.utime(place / name, (0, 0))
    file.remove_leftovers()
    assert sorted(os.listdir(folder)) == [".main~02.json.abcdefgh", "main~01.json", "notes"]
    assert sorted(os.listdir(folder / "notes")) == [".main~02.json.abcdefgh", "main~01.json"]
    assert file.load() == STATE


def test_all_workspaces_are_listed_by_name(folder: Path) -> None:
    assert list(all_states(folder)) == []
    for name in ("task-b", "main", "x.y~01"):
        StateFile(folder, name).save(State(f"branch of {name}"))
    StateFile(folder, "main").note_asked("2026-03-01T00:00:00.000000Z", "a" * 40)
    (folder / ".main.json.abcdefgh").touch()
    (folder / "README").touch()
    listed = [file.load() for file in all_states(folder)]
    assert listed == [State(f"branch of {name}") for name in ("main", "task-b", "x.y~01")]


def test_now_is_utc_and_sorts_as_text() -> None:
    before = datetime.now(UTC)
    first, second = now(), now()
    assert first <= second
    assert first.endswith("Z")
    assert len(first) == len("2026-03-01T00:00:00.000000Z")
    assert before <= datetime.fromisoformat(first) <= datetime.now(UTC)
