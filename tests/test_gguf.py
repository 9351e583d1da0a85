"""A model file's head: what it says, and what it does not."""

import struct
from pathlib import Path

import pytest

from memgw.gguf import context_length

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def value(key: bytes, kind: int, data: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + data


def head(*values: bytes, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)


NAME = value(b"general.architecture", STRING, string(b"bert"))
LENGTH = value(b"bert.context_length", UINT32, struct.pack("<I", 512))


@pytest.mark.parametrize(
    ("content", "length"),
    [
        (head(LENGTH), 512),
        (head(NAME, LENGTH), 512),
        (
            head(NAME, value(b"a", FLOAT32, b"1234"), value(b"b", BOOL, b"1"), value(b"c", UINT64, b"8" * 8), LENGTH),
            512,
        ),
        (head(NAME), None),
        (head(NAME, LENGTH, magic=b"GGML"), None),
        (head(value(b"tokens", ARRAY, b""), LENGTH), None),
        (head(value(b"bert.context_length", FLOAT32, b"1234")), None),
        (head(value(b"x", STRING, struct.pack("<Q", 2**63)), LENGTH), None),
        (head(NAME, LENGTH)[:-2], None),
        (b"", None),
        (b"<html>", None),
    ],
)
def test_the_length_is_what_the_head_says(tmp_path: Path, content: bytes, length: int | None) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert context_length(path) == length


def test_a_file_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert context_length(tmp_path / "m.gguf") is None
