"""Where things are on disk, and what makes an index good; the same for all workspaces of a gateway (DESIGN.md §4)."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from memgw import files
from memgw.index import Counts

_FOLDERS = (
    "git-mirror",
    "workspaces",
    "qmd-cache",
    "qmd-config",
    "qmd-config/home",
    "state",
    "state/notes",
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

    def make_folders(self) -> None:
        """All that has to be there before anything is done (DESIGN.md §4). `data` itself is the operator's."""
        for name in _FOLDERS:
            files.make_folder(self.data / name)
