"""The models that qmd is told of, and whether they are there. No request downloads one: an unreachable hub hangs."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

DEFAULTS = {
    "embed": "hf:ggml-org/embeddinggemma-300M-GGUF/embeddinggemma-300M-Q8_0.gguf",
    "generate": "hf:tobil/qmd-query-expansion-1.7B-gguf/qmd-query-expansion-1.7B-q4_k_m.gguf",
    "rerank": "hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF/qwen3-reranker-0.6b-q8_0.gguf",
}
"""qmd's own (dist/llm.js). Written out, since qmd writes missing ones into the config file by itself: not
atomically, so that a second qmd could read half a file and take the collection for removed."""


class Role(StrEnum):
    """What qmd needs a model for."""

    EMBED = "embed"
    GENERATE = "generate"
    RERANK = "rerank"


class Models:
    """Where each role's model is: a path, or an `hf:` name that `make models` has fetched into `cache`, qmd's own."""

    def __init__(self, named: Mapping[str, str], cache: Path) -> None:
        self.uris = DEFAULTS | dict(named)
        self.cache = cache

    @property
    def embed(self) -> str:
        return self.uris[Role.EMBED]

    def why_not(self, role: Role) -> str | None:
        """Why the model can't be loaded, in words for a client; None when it looks as if it could.

        qmd removes a file that is not GGUF, the operator's own too: so it must not even see one.
        """
        file = self.file(role)
        if file is None:
            return f"the {_WORDS[role]} model is not there: `make models` fetches it"
        try:
            with file.open("rb") as opened:
                whole = opened.read(4) == b"GGUF"
        except OSError:
            return f"the {_WORDS[role]} model can't be read"
        return None if whole else f"the {_WORDS[role]} model's file is not a GGUF file"

    def is_fetched(self, role: str) -> bool:
        """Whether a model is one that qmd fetches, not a file of the operator's."""
        return self.uris[role].startswith("hf:")

    def file(self, role: str) -> Path | None:
        """Where a model is; None when it is not on this disk."""
        if not self.is_fetched(role):
            path = Path(self.uris[role])
            return path if path.is_file() else None
        name = self.uris[role].rpartition("/")[2]  # qmd puts the owner before it, and `.ipull` behind a part of it
        return next((path for path in sorted(self.cache.glob("*.gguf")) if path.name.endswith(name)), None)


_WORDS = {Role.EMBED: "embedding", Role.GENERATE: "query expansion", Role.RERANK: "reranking"}
