"""What we take for a document, and its hash, are what the real qmd takes: over odd names and odd contents."""

import os
import stat
from pathlib import Path
from random import Random

import pytest

from memgw import documents, locks
from memgw.config import Config
from memgw.deadline import Deadline
from memgw.engine import Place, Question
from memgw.errors import IndexDamaged
from memgw.index import IndexFolder
from memgw.models import Models
from memgw.qmd import QmdCli


class Library:
    """A folder of files, and qmd's index of it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.tree = root / "tree"
        self.index = IndexFolder(root / "qmd-cache" / "ws-main")
        self.file = self.index.new_file()
        launcher = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher
        self.engine = QmdCli(launcher, root, {"PATH": os.environ["PATH"]}, Models({}, root))
        self.tree.mkdir()

    @property
    def place(self) -> Place:
        return Place("ws-main", self.tree, self.index.path, self.file)

    def write(self, name: str | bytes, content: str | bytes) -> None:
        path = Path(os.fsdecode(os.path.join(os.fsencode(self.tree), os.fsencode(name))))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def remove(self, name: str) -> None:
        (self.tree / name).unlink()

    def update(self) -> None:
        deadline = Deadline(60)
        with locks.hold(self._root / "lock", deadline, 60) as held:
            self.engine.update(self.place, deadline, held)

    def search(self, text: str) -> set[str]:
        """The paths that qmd finds; at most 50."""
        return {hit.path for hit in self.engine.search(self.place, Question(text, limit=50), Deadline(60))}

    def wanted(self) -> dict[str, str]:
        """Path → content hash by the rules of documents.py, over regular files as Git would list them."""
        found = {}
        for folder, _, names in os.walk(self.tree):
            inside = os.path.relpath(folder, self.tree)
            folders = [] if inside == "." else inside.split("/")
            for name in names:
                path = os.path.join(folder, name)
                regular = stat.S_ISREG(os.lstat(path).st_mode)
                if regular and documents.wanted_file(name) and all(map(documents.wanted_folder, folders)):
                    content_hash = documents.content_hash(Path(path).read_bytes())
                    if content_hash:
                        found["/".join([*folders, name])] = content_hash
        return found

    def lacking(self) -> set[str]:
        """What the index lacks; whatever else is different is an error."""
        return self.index.check(self.file, self.wanted(), deep=True)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path)


FOUND = [
    "a.md", "A.md", "a b.md", " lead.md", "trail .md", "a#b.md", "a?b.md", "q?index=ws-main.md", "100%20.md",
    "a&b=c.md", "new\nline.md", "re\rturn.md", "ta\tb.md", 'q"uote.md', "q'uote.md", "[br].md", "[!a].md", "{x,y}.md",
    "!not.md", "-dash.md", "--upload.md", "(p).md", "*.md", "**.md", "@(a).md", "+a.md", "$x.md", "$(id).md", "~.md",
    "1:b.md", "ab:c.md", "\x01.md", "\x7f.md", "\x85.md", "a\u2028b.md", "é.md", "e\u0301.md", "记忆/🙂.md",
    "\ufeff.md", "\ufffd.md", "a..md", "a.md.md", "a.b/c.d/e.md", "x.md/in.md", "Vendor/x.md", "vendor2/x.md",
    "my-dist/x.md", "x/Build/y.md", "cache/x.md", "git/x.md", "x/a:b.md",
]  # fmt: skip

UNREADABLE = [
    "back\\slash.md", "\\.md", "folder\\/x.md", "bad\udcff.md", "\udc80/x.md", "c:drive.md", "Z:/x.md", "\nfirst.md",
    "\rfirst.md", "\u2028first.md", "\u2029first.md", "x/\nfirst.md", "new\nline/x.md", "x/line\n/y/z.md",
    "re\rturn/x.md", "\u2028/x.md", "x\u2029y/z.md",
]  # fmt: skip

PASSED_OVER = [
    ".hidden.md", ".md", "..x.md", "...md", ".folder/x.md", "x/.folder/y.md", "x/.hidden.md", "vendor/x.md",
    "x/vendor/y.md", "dist/x.md", "build/x.md", "node_modules/x.md", "x/y/node_modules/z/a.md", ".cache/x.md",
    ".git2/x.md", "x.MD", "x.Md", "x.markdown", "x.mdx", "x.md.txt", "xmd", "x.md~", "x.md ", "vendor/new\nline.md",
    "dist/\n.md",
]  # fmt: skip


def test_files_with_odd_names_are_documents_but_for_those_that_qmd_cant_open(library: Library) -> None:
    for number, name in enumerate([*FOUND, *UNREADABLE, *PASSED_OVER]):
        library.write(name, f"# Title {number}\n\nhaystack needle{number}\n")
    library.update()
    assert set(library.wanted()) == {*FOUND, *UNREADABLE}
    assert library.lacking() == set(UNREADABLE)
    assert library.index.documents(library.file) == len(FOUND)


def test_the_names_that_qmd_cant_open_are_known_beforehand() -> None:
    assert [name for name in FOUND if not documents.readable(name)] == []
    assert [name for name in UNREADABLE if documents.readable(name)] == []


def test_a_document_is_found_by_its_content_under_its_exact_name(library: Library) -> None:
    for name in FOUND[:48]:
        library.write(name, "haystack\n")
    library.update()
    assert library.search("haystack") == set(FOUND[:48])


def test_links_are_passed_over(library: Library) -> None:
    library.write("real/a.md", "one")
    library.write("plain.txt", "two")
    (library.tree / "file.md").symlink_to("real/a.md")
    (library.tree / "text.md").symlink_to("plain.txt")
    (library.tree / "folder").symlink_to("real")
    (library.tree / "folder.md").symlink_to("real")
    (library.tree / "dangling.md").symlink_to("nowhere")
    (library.tree / "up.md").symlink_to("..")
    library.update()
    assert set(library.wanted()) == {"real/a.md"}
    assert library.lacking() == set()


CONTENTS: dict[str, bytes] = {
    "text": b"text",
    "no newline": b"# Title",
    "crlf": b"# Title\r\n\r\ntext\r\n",
    "cr": b"a\rb\r",
    "bom": b"\xef\xbb\xbf# Title\n",
    "two boms": b"\xef\xbb\xbf\xef\xbb\xbfx",
    "bom inside": b"x\xef\xbb\xbfy",
    "utf-16": "# Title".encode("utf-16"),
    "latin-1": "# Schöne Grüße\n".encode("latin-1"),
    "nul": b"a\0b",
    "nul first": b"\0# Title",
    "only nul": b"\0",
    "many nuls": bytes(5000),
    "controls": bytes(range(1, 32)),
    "all bytes": bytes(range(256)),
    "all bytes back": bytes(reversed(range(256))),
    "emoji": "🙂👩‍👧🏳️‍🌈".encode(),
    "not a character": "\ufffe\uffff\U0010ffff".encode(),
    "replacement": "\ufffd".encode(),
    "nfc": "é".encode(),
    "nfd": "e\u0301".encode(),
    "cjk": "# 记忆\n\n团队的记忆".encode(),
    "overlong": b"\xc0\x80\xc1\xbf\xe0\x80\x80\xf0\x80\x80\x80",
    "surrogates": b"\xed\xa0\x80\xed\xb0\x80 \xed\xbf\xbf",
    "too high": b"\xf4\x90\x80\x80\xf5\x80\x80\x80\xff\xfe",
    "cut short": b"x\xe2\x82",
    "cut shorter": b"x\xf0\x9f",
    "cut within": b"\xe2\x82x\xf0\x9f\x99y\xe2z",
    "alone": b"\x80\xbf\xbf\xbf\xbf",
    "front matter": b"---\ntitle: x\n---\n",
    "only a hash": b"#",
    "long line": b"x" * 300_000,
    "many lines": b"x\n" * 100_000,
    "same one": b"the same",
    "same two": b"the same",
}


def test_contents_are_hashed_as_qmd_does(library: Library) -> None:
    for name, content in CONTENTS.items():
        library.write(f"{name}.md", content)
    library.update()
    assert set(library.wanted()) == {f"{name}.md" for name in CONTENTS}
    assert library.lacking() == set()


def test_bytes_that_are_no_utf_8_are_read_as_qmd_does(library: Library) -> None:
    dice = Random(20260301)
    pieces = [
        *(bytes([byte]) for byte in range(0x7E, 0x100)), b"a", b"\n", b"\0", b"\xe2\x82\xac", b"\xf0\x9f\x99\x82",
        b"\xed\xa0", b"\xe0\x9f", b"\xf0\x8f", b"\xf4\x90", b"\xf4\x8f\xbf", b"\xef\xbb\xbf", b"\xef\xbf\xbd",
    ]  # fmt: skip
    for number in range(500):
        library.write(f"{number}.md", b"x" + b"".join(dice.choices(pieces, k=dice.randint(1, 40))))
    library.update()
    assert len(library.wanted()) == 500
    assert library.lacking() == set()


def test_blank_is_what_javascript_takes_for_blank(library: Library) -> None:
    spaces = [chr(code) for code in range(0x10000) if chr(code).isspace()]
    others = [
        "\ufeff",
        "\u180e",
        "\u200b",
        "\u200c",
        "\u200d",
        "\u2060",
        "\0",
        "\x7f",
        "\x80",
        "\u00ad",
        "\u3164",
        "x",
        "#",
    ]
    for letter in [*spaces, *others]:
        library.write(f"{ord(letter):04x}.md", f"\n{letter}\t")
    library.write("empty.md", "")
    library.write("spaces.md", "".join(spaces))
    library.write("blank.md", "\ufeff\u00a0\u3000\u2028\r\n")
    library.write("not utf-8.md", b" \xff ")
    library.update()
    wanted = set(library.wanted())
    assert {"empty.md", "blank.md", "feff.md", "00a0.md", "3000.md", "0020.md"}.isdisjoint(wanted)
    assert {"001c.md", "001f.md", "0085.md", "200b.md", "0000.md", "0078.md", "spaces.md", "not utf-8.md"} <= wanted
    assert library.lacking() == set()


def test_a_document_that_becomes_blank_is_noticed_since_qmd_keeps_its_old_text(library: Library) -> None:
    library.write("a.md", "text")
    library.write("b.md", "other")
    library.update()
    assert library.lacking() == set()
    library.write("a.md", " \n")
    library.update()
    with pytest.raises(IndexDamaged):
        library.lacking()
    library.file = library.index.new_file()
    library.update()
    assert set(library.wanted()) == {"b.md"}
    assert library.lacking() == set()


def test_an_update_follows_whatever_happens_to_files(library: Library) -> None:
    library.write("my-file.md", "the same")
    library.write("changed.md", "before")
    library.write("removed.md", "gone")
    library.write("folder/a.md", "moved")
    library.write("folder.md", "a file")
    library.write("back.md", "again")
    library.update()
    library.remove("my-file.md")
    library.write("My File.md", "the same")  # a name that qmd once took for the same
    library.write("changed.md", "after")
    library.remove("removed.md")
    library.remove("back.md")
    library.remove("folder/a.md")
    library.remove("folder.md")
    library.write("folder.md/a.md", "moved")
    library.update()
    assert set(library.wanted()) == {"My File.md", "changed.md", "folder.md/a.md"}
    assert library.lacking() == set()
    library.write("back.md", "again")
    library.write("my-file.md", "the same")
    library.update()
    assert set(library.wanted()) == {"My File.md", "changed.md", "folder.md/a.md", "back.md", "my-file.md"}
    assert library.lacking() == set()
    assert library.search("before") == set()
    assert library.search("after") == {"changed.md"}


def test_a_folder_without_documents_makes_an_empty_index(library: Library) -> None:
    library.write("x.txt", "text")
    library.update()
    assert library.lacking() == set()
    assert library.index.documents(library.file) == 0
    assert library.search("text") == set()
