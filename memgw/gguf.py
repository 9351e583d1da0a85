"""What memgw has to know of a model file in GGUF: how much text it takes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from io import BytesIO
from pathlib import Path

_HEAD = 64 * 1024
"""The writers put the few plain values first, the vocabulary after them."""

_STRING = 8
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32 = 4


def context_length(path: Path) -> int | None:
    """The most tokens that the model was made for; None when the file does not say so early, or is no GGUF file."""
    try:
        with path.open("rb") as file:
            head = BytesIO(file.read(_HEAD))
        return _context_length(head)
    except (OSError, ValueError, struct.error):
        return None


def _context_length(head: BytesIO) -> int | None:
    magic, _, _, values = struct.unpack("<4sIQQ", head.read(24))
    if magic != b"GGUF":
        return None
    for _ in range(values):
        key = _string(head)
        (kind,) = struct.unpack("<I", head.read(4))
        if key.endswith(b".context_length") and kind == _UINT32:
            length: int = struct.unpack("<I", head.read(4))[0]
            return length
        if kind == _STRING:
            _string(head)
        elif kind in _SIZES:
            head.read(_SIZES[kind])
        else:  # a list: nothing plain comes after it
            return None
    return None


def _string(head: BytesIO) -> bytes:
    (length,) = struct.unpack("<Q", head.read(8))
    return head.read(min(length, _HEAD))
