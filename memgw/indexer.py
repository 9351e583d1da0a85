"""Makes an index the index of a commit: from the difference to another, or by having the engine read the worktree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memgw import documents
from memgw.deadline import Deadline
from memgw.engine import Batch, Engine, Place
from memgw.errors import IndexDamaged
from memgw.index import Identity, IndexFolder
from memgw.objects import Blobs, Difference, Objects

SKIPPED = ""
"""A document that the engine can't take in has this for a hash."""


@dataclass(frozen=True)
class Base:
    """An index of `commit` to start from, with so many documents in it and left out of it."""

    commit: str
    documents: int
    skipped: int


@dataclass(frozen=True)
class Built:
    """What was made and stood all comparisons. `skipped` documents are not in it."""

    identity: Identity
    documents: int
    skipped: int


class Indexer:
    """Works in one workspace's folder; for whoever holds its lock. It believes nothing that the engine says.

    Both ways raise IndexDamaged, EngineFailed and what else the engine raises; the file is worth nothing then.
    """

    def __init__(self, index: IndexFolder, engine: Engine, objects: Objects) -> None:
        self._index, self._engine, self._objects = index, engine, objects

    def by_difference(
        self,
        base: Base | None,
        place: Place,
        commit: str,
        differences: Sequence[Difference],
        blobs: Blobs,
        deadline: Deadline,
    ) -> Built:
        """Takes out of Git the blobs of `differences`, which lead from `base`, or from nothing, to `commit`; no others.

        Compared is what changed, and how many documents there are in all; everything, when there was no base.
        """
        changed = [item for item in differences if documents.wanted(item.path) and _matters(item)]
        paths = [item.path for item in changed if documents.readable(item.path)]  # no index has another
        before = self._index.hashes(place.file, paths) if base else {}
        if any(item.old is None and item.path in before for item in changed):
            raise IndexDamaged("the index to start from has what is new in the commit")
        wanted: dict[str, str] = {}
        self._engine.apply(place, self._batches(changed, before, wanted, blobs), deadline)
        identity = self._settled(place.file)
        texts = {path: key for path, key in wanted.items() if key != SKIPPED}
        if base is None:
            if self._index.check(place.file, texts):
                raise IndexDamaged("the index lacks documents of the commit")
            return Built(identity, len(texts), len(wanted) - len(texts))
        number = base.documents - len(before) + len(texts)
        if self._index.hashes(place.file, paths) != texts:
            raise IndexDamaged("the index did not take in what changed")
        if {self._index.documents(place.file), self._index.count_texts(place.file)} != {number}:
            raise IndexDamaged("the index has another number of documents than the commit")
        return Built(identity, number, self._skipped(base, commit, len(wanted) - len(texts), deadline))

    def by_reading(self, place: Place, wanted: dict[str, str], deadline: Deadline, held: int, *, new: bool) -> Built:
        """Has the engine read the worktree, and compares all with `wanted` (path → content hash, or SKIPPED).

        A new index may lack documents that the engine can't take in; one that was there may lack SKIPPED ones only.
        """
        self._engine.update(place, deadline, held)
        identity = self._settled(place.file)
        lacking = self._index.check(place.file, wanted)
        if not new and any(wanted[path] != SKIPPED for path in lacking):
            raise IndexDamaged("the index lacks documents of the commit")
        if self._index.identity(place.file) != identity:
            raise IndexDamaged("another process writes to the index")
        return Built(identity, len(wanted) - len(lacking), len(lacking))

    def _settled(self, file: str) -> Identity:
        self._index.settle(file)
        identity = self._index.identity(file)
        if identity is None:
            raise IndexDamaged("another process writes to the index")
        return identity

    def _batches(
        self, changed: Sequence[Difference], before: dict[str, str], wanted: dict[str, str], blobs: Blobs
    ) -> Iterator[Batch]:
        """What the engine has to do, some megabytes at a time; notes in `wanted` what the index has to hold then."""
        paths: dict[str, list[str]] = {}
        for item in changed:
            if item.new and item.new.is_regular:
                paths.setdefault(item.new.blob, []).append(item.path)
        sizes = blobs.sizes(list(paths))
        for blob, names in paths.items():
            wanted |= {
                name: SKIPPED
                for name in names
                if sizes[blob] > documents.MAX_BYTES or not documents.readable(name)
            }  # fmt: skip
        readable = [blob for blob, names in paths.items() if any(name not in wanted for name in names)]
        put: list[tuple[str, str]] = []
        for contents in blobs.contents(readable):
            put = []
            for blob, content in contents.items():
                text = documents.text(content)
                for name in paths[blob]:
                    if text is not None and name not in wanted:
                        wanted[name] = documents.text_hash(text)
                        put.append((name, text))
            yield Batch([], put)
        gone = [path for path in before if wanted.get(path, SKIPPED) == SKIPPED]
        if gone or not put:
            yield Batch(gone, [])

    def _skipped(self, base: Base, commit: str, new: int, deadline: Deadline) -> int:
        """How many documents of `commit` are left out: some of the base's may have been mended or deleted since."""
        if not base.skipped:
            return new
        if self._count_skipped(base.commit, deadline) != base.skipped:
            raise IndexDamaged("why the index to start from lacks documents is not known")
        return self._count_skipped(commit, deadline)

    def _count_skipped(self, commit: str, deadline: Deadline) -> int:
        found = self._objects.documents(commit, deadline).items()
        return sum(size > documents.MAX_BYTES or not documents.readable(path) for path, (_, size) in found)


def _matters(item: Difference) -> bool:
    """False for one whose mode alone changed: a document it was and is."""
    both = item.old and item.new
    return not (both and item.old.is_regular and item.new.is_regular and item.old.blob == item.new.blob)  # type: ignore[union-attr]
