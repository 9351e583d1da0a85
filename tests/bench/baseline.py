"""Baseline (a): what a careful user would write, a shell loop over a clone."""

import json
import os
import subprocess
import time
from pathlib import Path

from memgw.config import Config
from memgw.index import COLLECTION

# qmd by the real node, and its code compiled ahead: faster than the `qmd` on a user's PATH, which is three processes
QMD = 'qmd() { "$NODE" "$QMD" "$@"; }; cd "$CLONE" && '
ASK = QMD + (
    "git fetch --quiet && git reset --quiet --hard origin/main"
    ' && qmd update >/dev/null && qmd search --json -n 10 -- "$1"'
)
UPDATE = QMD + "qmd update >/dev/null"


class Loop:
    """A clone with an index of its own below `folder`."""

    def __init__(self, folder: Path, remote: str) -> None:
        """Clones and indexes; `first` is how long that took."""
        self.folder = folder
        self._prepare()
        start = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", remote, str(folder / "clone")], check=True)
        self._bash(UPDATE)
        self.first = time.perf_counter() - start

    def copied(self, folder: Path) -> "Loop":
        """The same once more, elsewhere, without the wait."""
        subprocess.run(["cp", "-a", str(self.folder), str(folder)], check=True)
        twin = Loop.__new__(Loop)
        twin.folder, twin.first = folder, self.first
        twin._prepare()
        subprocess.run(["git", "-C", str(folder / "clone"), "reset", "--quiet", "--hard"], check=True)
        return twin

    @property
    def index(self) -> Path:
        return self.folder / "qmd" / "index.sqlite"

    def ask(self, text: str) -> tuple[float, list[tuple[str, float]]]:
        """Seconds, and paths with scores."""
        start = time.perf_counter()
        output = self._bash(ASK, text)
        taken = time.perf_counter() - start
        hits = json.loads(output)
        return taken, [(hit["file"].removeprefix(f"qmd://{COLLECTION}/"), hit["score"]) for hit in hits]

    def _prepare(self) -> None:
        """qmd's config, as `qmd collection add` writes it. The collection's name is in the text index: with memgw's,
        scores are the same."""
        (self.folder / "config").mkdir(parents=True, exist_ok=True)
        collection = {"path": str(self.folder / "clone"), "pattern": "**/*.md"}
        (self.folder / "config" / "index.yml").write_text(json.dumps({"collections": {COLLECTION: collection}}))

    def _bash(self, script: str, *arguments: str) -> bytes:
        node, qmd = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher
        environ = {
            **os.environ,
            "NODE": node,
            "QMD": qmd,
            "CLONE": str(self.folder / "clone"),
            "XDG_CACHE_HOME": str(self.folder),
            "QMD_CONFIG_DIR": str(self.folder / "config"),
            "NODE_COMPILE_CACHE": str(self.folder / "node"),
        }
        command = ["bash", "-c", script, "loop", *arguments]
        return subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout
