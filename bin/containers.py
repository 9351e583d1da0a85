"""memgw in the containers of compose.yaml: what Docker Compose is called with, and told of the settings.

`data/` of the checkout is in the containers, in the same place below theirs.
"""

import os
from pathlib import Path

from memgw.config import ROOT, Config, environment


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
    for name, path in paths(config).items():
        if path.is_relative_to(ROOT / "data"):
            values[name] = str(path.relative_to(ROOT))
    values["MEMGW_BIND"] = config.bind.replace("localhost:", "127.0.0.1:")  # ports are published on addresses only
    return values


def problem(config: Config) -> str | None:
    """Why the containers could not do what the settings say, or None."""
    for name, path in paths(config).items():
        if not path.is_relative_to(ROOT / "data") and not (ROOT / "compose.override.yaml").exists():
            return f"{name}: {path} is in no container: mount it in compose.override.yaml (README, Containers)"
    return None


def paths(config: Config) -> dict[str, Path]:
    """The settings that are paths of this machine."""
    said = {
        "GIT_REMOTE_URL": config.remote_url.removeprefix("file://"),
        "QMD_EMBED_MODEL_URI": config.embed_model,
        "QMD_RERANK_MODEL_URI": config.rerank_model,
        "QMD_GENERATE_MODEL_URI": config.generate_model,
    }
    return {name: Path(value) for name, value in said.items() if value.startswith("/")}
