"""Files that are whole or not there, and folders that go whatever is in them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from memgw import files
from memgw.config import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "folder"
    place.mkdir()
    yield place
    for below, _, _ in os.walk(tmp_path):
        os.chmod(below, 0o700)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def python(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_file_is_replaced_whole_and_nothing_else_is_left(folder: Path) -> None:
    file = folder / "deep" / "er" / "state.json"
    files.replace(file, "first, and longer than the second 记忆\n")
    files.replace(file, "second\n")
    assert file.read_bytes() == b"second\n"
    assert names(file.parent) == ["state.json"]


def test_a_reader_sees_the_old_or_the_new_text_but_no_mixture(folder: Path) -> None:
    file = folder / "state.json"
    texts = ["a" * 200_000, "b" * 100_000]
    files.replace(file, texts[0])
    stop, seen = Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add(file.read_text("utf-8"))

    reader = Thread(target=read)
    reader.start()
    for turn in range(200):
        files.replace(file, texts[turn % 2])
    stop.set()
    reader.join()
    assert seen <= set(texts)


def test_a_text_that_cant_be_written_leaves_the_old_one(folder: Path) -> None:
    file = folder / "state.json"
    files.replace(file, "old")
    with pytest.raises(UnicodeEncodeError):
        files.replace(file, "new \udc80")
    assert file.read_text("utf-8") == "old"
    assert names(folder) == ["state.json"]


def test_a_folder_in_the_place_of_a_file_is_thrown_away(folder: Path) -> None:
    (folder / "state.json" / "inside").mkdir(parents=True)
    files.replace(folder / "state.json", "new")
    assert (folder / "state.json").read_text("utf-8") == "new"
    assert names(folder) == ["state.json"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(folder: Path) -> None:
    (folder / "kept").mkdir()
    for target in ("kept", "nowhere"):
        (folder / "state.json").unlink(missing_ok=True)
        (folder / "state.json").symlink_to(target)
        files.replace(folder / "state.json", "new")
        assert not (folder / "state.json").is_symlink()
        assert names(folder) == ["kept", "state.json"]


def test_a_full_disk_leaves_the_old_text(folder: Path) -> None:
    file = folder / "state.json"
    files.replace(file, "old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from memgw import files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: files.replace(Path(sys.argv[1]), 'x' * 5000)\n"
        "except OSError as exc: print(exc.errno)"
    )
    done = python(code, file)
    assert done.stdout == "27\n", done.stderr  # EFBIG: as near to ENOSPC as a test gets without a disk of its own
    assert file.read_text("utf-8") == "old"
    assert names(folder) == ["state.json"]


def test_ensure_writes_only_when_the_text_differs(folder: Path) -> None:
    file = folder / "sub" / "settings"
    files.ensure(file, "text\n")
    before = file.stat()
    files.ensure(file, "text\n")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    files.ensure(file, "other\n")
    assert file.read_text("utf-8") == "other\n"
    assert file.stat().st_ino != before.st_ino


def test_ensure_repairs_a_damaged_file(folder: Path) -> None:
    file = folder / "settings"
    file.write_bytes(b"\xff\xfe\x00")
    files.ensure(file, "text")
    assert file.read_text("utf-8") == "text"
    file.unlink()
    (file / "a" / "folder").mkdir(parents=True)
    files.ensure(file, "text")
    assert file.read_text("utf-8") == "text"
    file.unlink()
    file.symlink_to(folder / "nowhere")
    files.ensure(file, "text")
    assert not file.is_symlink()
    assert file.read_text("utf-8") == "text"
    assert names(folder) == ["settings"]


def test_removing_what_is_not_there_is_no_error(folder: Path) -> None:
    files.remove(folder / "nothing")
    files.remove(folder / "no" / "folder" / "either")
    assert names(folder) == []


def test_a_file_a_folder_and_a_link_are_removed(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "tree" / "a" / "b").mkdir(parents=True)
    (folder / "tree" / "a" / "b" / "c").touch()
    (folder / "dangling").symlink_to(folder / "nowhere")
    for name in ("file", "tree", "dangling"):
        files.remove(folder / name)
    assert names(folder) == []


def test_links_are_removed_and_not_followed(folder: Path) -> None:
    kept = folder / "kept"
    (kept / "inner").mkdir(parents=True)
    (kept / "inner" / "file").write_text("here")
    kept.chmod(0o555)
    (folder / "tree").mkdir()
    (folder / "tree" / "to-folder").symlink_to(kept)
    (folder / "tree" / "to-inner").symlink_to(kept / "inner")
    (folder / "tree" / "to-file").symlink_to(kept / "inner" / "file")
    (folder / "link").symlink_to(kept)
    files.remove(folder / "tree")
    files.remove(folder / "link")
    assert names(folder) == ["kept"]
    assert (kept / "inner" / "file").read_text() == "here"
    assert kept.stat().st_mode & 0o777 == 0o555


def test_folders_without_permissions_are_removed_by_their_owner() -> None:
    code = (
        "import os, tempfile; from pathlib import Path; from memgw import files\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)  # root passes over permissions\n"
        "place = Path(tempfile.mkdtemp()); tree = place / 'tree'; (tree / 'a' / 'b' / 'c').mkdir(parents=True)\n"
        "(tree / 'a' / 'b' / 'file').touch(); (tree / 'a' / 'b' / 'file').chmod(0)\n"
        "(tree / 'a' / 'link').symlink_to('/')\n"
        "for path, mode in (('a/b/c', 0), ('a/b', 0o500), ('a', 0), ('.', 0o555)): (tree / path).chmod(mode)\n"
        "files.remove(tree); print(os.listdir(place)); place.rmdir()"
    )
    done = python(code)
    assert done.stdout == "[]\n", done.stderr


def test_a_folder_goes_while_others_still_put_files_in_and_take_them_out(folder: Path) -> None:
    """As SQLite does beside an index that is searched."""
    for number in range(30):
        tree = folder / f"tree{number}"
        tree.mkdir()
        for name in range(50):
            (tree / f"{name}").touch()
        busy = Event()

        def reader(tree: Path = tree, busy: Event = busy) -> None:
            for turn in range(60):
                try:
                    (tree / f"{turn}-wal").touch()
                    busy.set()
                    if turn % 2:
                        (tree / f"{turn}-wal").unlink()
                except FileNotFoundError:
                    pass

        other = Thread(target=reader)
        other.start()
        busy.wait(10)
        files.remove(tree)
        other.join()
        assert not tree.exists()


def test_names_that_are_not_utf_8_are_removed(folder: Path) -> None:
    tree = os.fsencode(folder / "tree")
    os.makedirs(tree + b"/bad\xff\n")
    os.close(os.open(tree + b"/bad\xff\n/\xfe", os.O_CREAT))
    files.remove(folder / "tree")
    assert names(folder) == []


def test_leftovers_of_a_killed_replace_are_removed_and_nothing_else(folder: Path) -> None:
    file = folder / "ws.json"
    kept = [
        "ws.json", "ws.json.bak", ".ws.json", ".ws.json.", ".wsxjson.abcd1234", ".ws.json.a.b", "x.ws.json.abcd1234",
        ".other.json.abcd1234", ".ws.json.abcd1234.tmp", ".ws.json~1.abcd",
    ]  # fmt: skip
    for name in [*kept, ".ws.json.abcd1234", ".ws.json._x7"]:
        (folder / name).touch()
    (folder / ".ws.json.folder" / "in").mkdir(parents=True)
    for name in names(folder):
        os.utime(folder / name, (0, 0))
    (folder / ".ws.json.at_work").touch()
    files.remove_leftovers(file)
    assert names(folder) == sorted([*kept, ".ws.json.at_work"])


def test_what_a_killed_replace_leaves_is_known_as_its_leftover(folder: Path) -> None:
    file = folder / "main~0123.json"
    code = (
        "import os, signal, sys; from pathlib import Path; from memgw import files\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.replace(Path(sys.argv[1]), 'half')"
    )
    assert python(code, file).returncode == -9
    (left,) = names(folder)
    os.utime(folder / left, (0, 0))
    files.remove_leftovers(file)
    assert names(folder) == []


def test_leftovers_are_looked_for_beside_writers_at_work(folder: Path) -> None:
    file, stop = folder / "ws.json", threading.Event()

    def write() -> None:
        while not stop.is_set():
            files.replace(file, "text")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(3000):
            files.remove_leftovers(file)
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert names(folder) == ["ws.json"]


def test_leftovers_in_a_folder_that_is_not_there_are_no_error(folder: Path) -> None:
    files.remove_leftovers(folder / "no" / "file")
    assert names(folder) == []


def test_a_folder_is_made_once_and_keeps_what_is_in_it(folder: Path) -> None:
    files.make_folder(folder / "a" / "b")
    (folder / "a" / "b" / "file").touch()
    files.make_folder(folder / "a" / "b")
    assert names(folder / "a" / "b") == ["file"]


def test_what_has_the_name_of_a_folder_is_thrown_away(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    (folder / "dangling").symlink_to(folder / "nowhere")
    for name in ("file", "dangling"):
        files.make_folder(folder / name)
        assert (folder / name).is_dir()
        assert not (folder / name).is_symlink()
        assert names(folder / name) == []


def test_the_size_of_a_folder_is_that_of_its_files_links_not_followed(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "one").write_bytes(b"x" * 1000)
    (folder / "a" / "b" / "two").write_bytes(b"x" * 234)
    assert files.size(folder) == 1234
    (folder / "a" / "to-one").symlink_to("one")
    assert files.size(folder) == 1234 + len("one")
    assert files.size(folder / "nothing") == 0


def test_a_file_system_with_room_is_not_full(tmp_path: Path) -> None:
    assert not files.is_full(tmp_path)
