"""Where things are on disk, and what makes an index good; the same for all workspaces of a gateway (DESIGN.md §4)."""

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from memgw import files
from memgw.branch import WORKSPACE
from memgw.index import Counts

_FOLDERS = (
    "git-mirror",
    "workspaces",
    "qmd-cache",
    "qmd-config",
    "qmd-config/home",
    "state",
    "state/notes",
    "state/used",
    "state/housekeeping",
    "locks",
    "locks/workspaces",
    "askings",
)


class UpdateOn(StrEnum):
    """QMD_UPDATE_ON_LATEST_QUERY: what a query that wants the latest does when the commit did not move."""

    PROOF = "true"
    ALWAYS = "always"
    MOVED = "false"  # looks at the file's identity and no further


@dataclass(frozen=True)
class Layout:
    """Where things are, and what makes an index good; the same for all workspaces of a gateway."""

    data: Path
    prefix: str
    update_on: UpdateOn
    embed_model: str
    lock_timeout: float
    default_branch: str
    embed_on_change: bool = True
    embed_seconds: float = 5.0
    query_seconds: float = 10.0
    deep_seconds: float = 60.0
    counts: Counts = field(default_factory=Counts)

    @property
    def states(self) -> Path:
        return self.data / "state"

    def lock(self, workspace: str) -> Path:
        return self.data / "locks" / "workspaces" / f"{workspace}.lock"

    def index(self, workspace: str) -> Path:
        return self.data / "qmd-cache" / f"{self.prefix}-{workspace}"

    def worktree(self, workspace: str) -> Path:
        return self.data / "workspaces" / workspace

    @property
    def nurseries(self) -> Path:
        return self.data / "qmd-cache" / "vectors"

    @property
    def nursery(self) -> Path:
        """Where the vectors of the embedding model in use are kept."""
        return self.nurseries / f"{sha256(self.embed_model.encode()).hexdigest()[:12]}.sqlite"

    def places(self, workspace: str) -> list[Path]:
        """All that a workspace has here but its lock, in the order in which it may go: without a state nobody believes
        the rest."""
        return [
            self.states / f"{workspace}.json",
            self.index(workspace),
            self.worktree(workspace),
            self.data / "qmd-config" / f"{self.prefix}-{workspace}.yml",
            self.data / "askings" / f"{workspace}.json",
            self.states / "notes" / f"{workspace}.json",
            self.states / "used" / workspace,
        ]

    def found(self) -> set[str]:
        """Workspaces that have anything here but a lock."""
        names = set[str]()
        for place in self.places("*"):
            before, _, after = place.name.partition("*")
            names |= {found.name.removeprefix(before).removesuffix(after) for found in place.parent.glob(place.name)}
        return set(filter(WORKSPACE.fullmatch, names))

    def make_folders(self) -> None:
        """All that has to be there before anything is done (DESIGN.md §4). `data` itself is the operator's."""
        for name in _FOLDERS:
            files.make_folder(self.data / name)
