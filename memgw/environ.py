"""The environment of the processes that we start: built from an allow-list, never inherited."""

from collections.abc import Mapping
from pathlib import Path

_COMMON = ("PATH", "TMPDIR", "TZ")

_GIT = (
    "HOME", "USER", "LOGNAME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK",
    "GIT_SSH", "GIT_SSH_COMMAND", "GIT_SSH_VARIANT",
    "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy",
    "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
)  # fmt: skip

_QMD = ("CUDA_DEVICE", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")


def for_git(environ: Mapping[str, str], global_config: Path, ceiling: Path) -> dict[str, str]:
    """Git never asks a question, speaks English, and finds no repository above `ceiling`.

    `ceiling` matters: data/ lies inside a checkout, and a damaged worktree would otherwise make Git
    climb up and clean the checkout around it.
    """
    return _pick(environ, _COMMON + _GIT) | {
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "GIT_CONFIG_GLOBAL": str(global_config),
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "SSH_ASKPASS_REQUIRE": "never",
        "GCM_INTERACTIVE": "never",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    }


def for_qmd(environ: Mapping[str, str], *, home: Path, cache: Path, config: Path, index: Path) -> dict[str, str]:
    """qmd sees its own home, so that no `~/.config/qmd` of the operator reaches an index.

    `INDEX_PATH` beats `--index`, and a directory of its own keeps qmd's embed lock apart. Unless it believes to be in
    WSL, qmd takes a path such as `/d/memory` for a drive of Windows. CI is left out: with it qmd does no model work. An
    empty CUDA_VISIBLE_DEVICES would hide every GPU, where with us empty means not set.
    """
    kept = _pick(environ, _COMMON) | {name: value for name, value in _pick(environ, _QMD).items() if value}
    return kept | {
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
        "WSL_DISTRO_NAME": "none",
        "NODE_COMPILE_CACHE": environ.get("NODE_COMPILE_CACHE") or str(cache / "node"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(cache),
        "QMD_CONFIG_DIR": str(config),
        "INDEX_PATH": str(index),
        "QMD_SQLITE_BUSY_TIMEOUT": "10000",
    }


def _pick(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: environ[name] for name in names if name in environ}
