"""memgw in the containers of compose.yaml: what Docker Compose is called with, and told of the settings."""

import os
from pathlib import Path

from memgw.config import ROOT, Config, environment

PATHS = ("GIT_REMOTE_URL", "QMD_EMBED_MODEL_URI", "QMD_RERANK_MODEL_URI", "QMD_GENERATE_MODEL_URI")
"""Settings that may be paths of this machine. `data/` of the checkout is in the containers, in the same place."""


def command(*words: str) -> list[str]:
    """`docker compose …`, which gets `variables` and no .env. Without GPU=1 it finds the operator's
    compose.override.yaml, or what COMPOSE_FILE names, by itself."""
    files = ["compose.yaml", "compose.gpu.yaml"] if os.environ.get("GPU") == "1" else []
    if files and (ROOT / "compose.override.yaml").exists():
        files.append("compose.override.yaml")
    return [
        "docker",
        "compose",
        "--env-file",
        "/dev/null",
        *(word for file in files for word in ("--file", file)),
        *words,
    ]


def variables(config: Config, stop_seconds: int) -> dict[str, str]:
    """What compose.yaml refers to. `.env` is read by us and not by Compose, to which a $ in it is a variable."""
    values = environment(os.environ) | {"MEMGW_STOP_SECONDS": str(stop_seconds)}
    for name in PATHS:
        if (path := Path(values.get(name, ""))).is_relative_to(ROOT / "data"):
            values[name] = str(path.relative_to(ROOT))
    values["MEMGW_BIND"] = config.bind.replace("localhost:", "127.0.0.1:")  # ports are published on addresses only
    return values


def problem(config: Config) -> str | None:
    """Why the containers could not do what the settings say, or None."""
    path = config.remote_url.removeprefix("file://")
    mounted = Path(path).is_relative_to(ROOT / "data") and path == config.remote_url
    if path.startswith("/") and not mounted and not (ROOT / "compose.override.yaml").exists():
        return f"GIT_REMOTE_URL: {path} is in no container: mount it in compose.override.yaml (README, Containers)"
    return None
