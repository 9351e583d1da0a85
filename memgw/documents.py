"""Which files qmd takes for documents, and by which hash it knows them.

The rules are read from qmd 2.8.3 (`reindexCollection` and `hashContent` in dist/store.js) and held to it by a test
over odd names and contents. Pure, but for reading the files it is told to.
"""

import re
from hashlib import sha256

PATTERN = "**/*.md"

MAX_BYTES = 64 * 1024 * 1024
"""Larger files are no memories: Node can't take half a gigabyte in, and nobody wants it in an answer."""

_EXCLUDED_FOLDERS = frozenset({"node_modules", ".git", ".cache", "vendor", "dist", "build"})

# what JavaScript's String.trim removes; Python's strip differs in both directions
_JS_SPACE = (
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)

_LINE_END = "\n\r\u2028\u2029"
_UNREADABLE = re.compile(
    r"[\\\udc80-\udcff]"  # a backslash becomes a slash; what is not UTF-8, another name
    r"|^[A-Za-z]:"  # taken for a drive
    rf"|(^|/)[{_LINE_END}]|[{_LINE_END}][^/]*/"  # not matched by the pattern
)


def wanted_folder(name: str) -> bool:
    """Whether files below a folder of this name can be documents."""
    return not name.startswith(".") and name not in _EXCLUDED_FOLDERS


def wanted_file(name: str) -> bool:
    """Whether a regular file of this name can be a document."""
    return name.endswith(".md") and not name.startswith(".")


def readable(path: str) -> bool:
    """False for names that qmd can't open, or opens another file for. Not UTF-8 is surrogate-escaped here."""
    return not _UNREADABLE.search(path)


def wanted(path: str) -> bool:
    """Whether a regular file of this path is a document."""
    *folders, name = path.split("/")
    return wanted_file(name) and all(map(wanted_folder, folders))


def text(blob: bytes) -> str | None:
    """What qmd reads of a document; None for a blank one, which it passes over."""
    decoded = blob.decode("utf-8", "replace")
    return decoded if decoded.strip(_JS_SPACE) else None


def text_hash(text: str) -> str:
    """qmd's hash of a document's text, 64 hex digits."""
    return sha256(text.encode()).hexdigest()


def content_hash(blob: bytes) -> str | None:
    """The hash of a document's content; None for a blank one."""
    read = text(blob)
    return None if read is None else text_hash(read)
