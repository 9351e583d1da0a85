"""The settings: what each takes, and that whoever makes mistakes hears of all of them at once."""

import re
import subprocess
from base64 import b64encode
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from memgw.config import ROOT, Config, ConfigError, environment
from memgw.models import DEFAULTS as DEFAULTS_OF_QMD

REMOTE = {"GIT_REMOTE_URL": "https://git.example.com/memory.git"}

DEFAULTS: dict[str, Any] = {
    "remote_url": "https://git.example.com/memory.git",
    "default_branch": "main",
    "timeout_seconds": 300,
    "index_prefix": "ws",
    "update_on": "true",
    "engine": "auto",
    "embed_on_change": True,
    "embed_seconds": 5,
    "query_seconds": 10,
    "deep_seconds": 60,
    "embed_model": "",
    "rerank_model": "",
    "generate_model": "",
    "cuda_device": "",
    "cuda_visible_devices": "",
    "nvidia_visible_devices": "",
    "data_dir": ROOT / "data",
    "bind": "127.0.0.1:8787",
    "workers": 2,
    "threads": 64,
    "max_requests": 100_000,
    "remote_timeout_seconds": 30,
    "lock_timeout_seconds": 60,
    "client_timeout_seconds": 30,
    "max_body_bytes": 65_536,
    "hook_secret": "",
    "hook_secret_old": "",
    "hook_window_seconds": 300,
    "hook_max_bytes": 5_242_880,
    "disk_floor_mb": 200,
    "log_level": "INFO",
    "gone_branch_hours": 24,
    "max_workspaces": 0,
    "max_disk_mb": 0,
    "housekeeping_minutes": 10,
    "mcp_host": "127.0.0.1",
    "mcp_port": 8181,
    "warmup_branches": (),
    "warmup_seconds": 60,
    "qmd": ROOT / "qmd/node_modules/@tobilu/qmd/dist/cli/qmd.js",
    "node": "",
}

# variable, text, field, value, one wrong text (None: any line of text will do), a part of what is said of it
SETTINGS: list[tuple[str, str, str, Any, str | None, str]] = [
    ("GIT_REMOTE_URL", "git@host:team/memory.git", "remote_url", "git@host:team/memory.git", "ext::sh -c id", "a URL"),
    ("DEFAULT_BRANCH", "memory/2026-03", "default_branch", "memory/2026-03", "a..b", "must be a branch"),
    ("QMD_TIMEOUT_SECONDS", "86400", "timeout_seconds", 86_400, "0", "from 1 to 86400"),
    ("QMD_INDEX_PREFIX", "my_team-2", "index_prefix", "my_team-2", "../up", "letters, digits"),
    ("QMD_UPDATE_ON_LATEST_QUERY", "always", "update_on", "always", "True", "one of true, always, false"),
    ("QMD_ENGINE", "host", "engine", "host", "HOST", "one of auto, host, cli"),
    ("QMD_EMBED_ON_CHANGE", "false", "embed_on_change", False, "no", "one of true, false"),
    ("QMD_EMBED_MODEL_URI", "hf:a/b/c.gguf", "embed_model", "hf:a/b/c.gguf", "two\nlines", "one line"),
    ("QMD_RERANK_MODEL_URI", "/m/r.gguf", "rerank_model", "/m/r.gguf", "two\nlines", "one line"),
    ("QMD_GENERATE_MODEL_URI", "/m/g.gguf", "generate_model", "/m/g.gguf", "two\nlines", "one line"),
    ("MEMGW_EMBED_BUDGET_SECONDS", "3600", "embed_seconds", 3600, "0", "from 1 to 3600"),
    ("MEMGW_QUERY_BUDGET_SECONDS", "1", "query_seconds", 1, "0.5", "from 1 to 3600"),
    ("MEMGW_DEEP_BUDGET_SECONDS", "90", "deep_seconds", 90, "x", "from 1 to 3600"),
    ("CUDA_DEVICE", "1", "cuda_device", "1", "two\nlines", "one line"),
    ("CUDA_VISIBLE_DEVICES", "0,1", "cuda_visible_devices", "0,1", "two\nlines", "one line"),
    ("NVIDIA_VISIBLE_DEVICES", "all", "nvidia_visible_devices", "all", "two\nlines", "one line"),
    ("MEMGW_DATA_DIR", "/srv/memgw", "data_dir", Path("/srv/memgw"), "two\nlines", "one line"),
    ("MEMGW_BIND", "[::1]:80", "bind", "[::1]:80", "8787", "host:port"),
    ("MEMGW_WORKERS", "1", "workers", 1, "65", "from 1 to 64"),
    ("MEMGW_THREADS", "512", "threads", 512, "7", "from 8 to 512"),
    ("MEMGW_MAX_REQUESTS", "20000", "max_requests", 20_000, "-1", "from 0 to"),
    ("MEMGW_REMOTE_TIMEOUT_SECONDS", "5", "remote_timeout_seconds", 5, "5s", "a whole number"),
    ("MEMGW_LOCK_TIMEOUT_SECONDS", "7", "lock_timeout_seconds", 7, "-7", "a whole number"),
    ("MEMGW_CLIENT_TIMEOUT_SECONDS", "1", "client_timeout_seconds", 1, "0", "from 1 to 3600"),
    ("MEMGW_MAX_BODY_BYTES", "1024", "max_body_bytes", 1024, "1e4", "a whole number"),
    (
        "MEMGW_HOOK_SECRET",
        "It's a Secret to Everybody",
        "hook_secret",
        "It's a Secret to Everybody",
        "short",
        "8 to 256",
    ),
    ("MEMGW_HOOK_SECRET_OLD", "01234567", "hook_secret_old", "01234567", "0123456", "8 to 256"),
    ("MEMGW_HOOK_WINDOW_SECONDS", "60", "hook_window_seconds", 60, "0", "from 1 to 86400"),
    ("MEMGW_HOOK_MAX_BYTES", "65536", "hook_max_bytes", 65_536, "1", "from 65536 to 26214400"),
    ("MEMGW_DISK_FLOOR_MB", "0", "disk_floor_mb", 0, "1 GB", "a whole number"),
    ("MEMGW_LOG_LEVEL", "DEBUG", "log_level", "DEBUG", "debug", "one of DEBUG"),
    ("MEMGW_GONE_BRANCH_HOURS", "0", "gone_branch_hours", 0, "8761", "from 0 to 8760"),
    ("MEMGW_MAX_WORKSPACES", "50", "max_workspaces", 50, "-1", "a whole number"),
    ("MEMGW_MAX_DISK_MB", "4096", "max_disk_mb", 4096, "4G", "a whole number"),
    ("MEMGW_HOUSEKEEPING_MINUTES", "0", "housekeeping_minutes", 0, "1.5", "from 0 to 10080"),
    ("MEMGW_MCP_HOST", "10.0.0.7", "mcp_host", "10.0.0.7", "http://a", "must be a host"),
    ("MEMGW_MCP_PORT", "65535", "mcp_port", 65_535, "65536", "from 1 to 65535"),
    ("MEMGW_WARMUP_BRANCHES", "main, task/A", "warmup_branches", ("main", "task/A"), "main,", "must be a branch"),
    ("MEMGW_WARMUP_SECONDS", "5", "warmup_seconds", 5, "0.5", "from 1 to 86400"),
    ("MEMGW_QMD", "/usr/bin/qmd", "qmd", Path("/usr/bin/qmd"), "two\nlines", "one line"),
    ("MEMGW_NODE", "/usr/bin/node", "node", "/usr/bin/node", "two\nlines", "one line"),
]


def mistakes(environ: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load(environ)
    return caught.value.lines


def remote(value: str) -> str:
    return Config.load({"GIT_REMOTE_URL": value}).remote_url


def test_only_the_remote_is_required() -> None:
    assert vars(Config.load(REMOTE)) == DEFAULTS
    assert mistakes({}) == ["GIT_REMOTE_URL: is required"]


def test_every_field_is_one_variable() -> None:
    assert [row[2] for row in SETTINGS] == [item.name for item in fields(Config)]
    assert [row[0] for row in SETTINGS] == [item.metadata["name"] for item in fields(Config)]


@pytest.mark.parametrize(("name", "text", "field", "value"), [row[:4] for row in SETTINGS])
def test_a_variable_sets_its_field_and_no_other(name: str, text: str, field: str, value: object) -> None:
    assert DEFAULTS[field] != value
    assert vars(Config.load(REMOTE | {name: f"  {text} "})) == DEFAULTS | {field: value}


@pytest.mark.parametrize("blank", ["", "  ", "\t"])
def test_empty_means_not_set(blank: str) -> None:
    environ = dict.fromkeys((row[0] for row in SETTINGS), blank)
    assert vars(Config.load(environ | REMOTE)) == DEFAULTS
    assert mistakes(environ) == ["GIT_REMOTE_URL: is required"]


def test_all_mistakes_are_told_at_once_a_line_each() -> None:
    wrong = {row[0]: row[4] for row in SETTINGS if row[4] is not None}
    lines = mistakes(wrong)
    assert len(lines) == len(wrong) == len(SETTINGS)
    for line, (name, _, _, _, _, said) in zip(lines, SETTINGS, strict=True):
        assert line.startswith(f"{name}: ")
        assert said in line
        assert "\n" not in line


def test_a_mistake_never_repeats_a_value_that_may_be_secret() -> None:
    assert "hunter2" not in mistakes({"GIT_REMOTE_URL": "ftp://me:hunter2@host/x"})[0]


@pytest.mark.parametrize("number", ["", "0", "1.0", "+1", " 1 2", "１", "1_0", "0x10", "9" * 30, "-1", "inf"])
def test_a_number_is_plain_digits_within_its_range(number: str) -> None:
    environ = REMOTE | {"MEMGW_WORKERS": number or "x"}
    assert mistakes(environ) == ["MEMGW_WORKERS: must be a whole number from 1 to 64"]


@pytest.mark.parametrize(
    "value",
    [
        "https://host/x.git", "http://user:pw@host:8080/x", "ssh://git@host:22/x", "git://host/x",
        "file:///srv/x.git", "HTTPS://host/x", "git@host:x.git", "host:x", "[::1]:x.git", "user@[::1]:x",
        "/srv/x.git",
    ],
)  # fmt: skip
def test_a_remote_is_taken_as_it_is_given(value: str) -> None:
    assert remote(value) == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("data/remote-memory.git", ROOT / "data/remote-memory.git"),
        ("./x y.git", ROOT / "x y.git"),
        ("../x.git", ROOT.parent / "x.git"),
        ("./a:b", ROOT / "a:b"),
        ("/srv/../srv/x.git", Path("/srv/x.git")),
    ],
)
def test_a_remotes_path_counts_from_the_checkout(
    value: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert remote(value) == str(path)


@pytest.mark.parametrize(
    "value",
    [
        "ext::sh -c id", "fd::7", "file::x", "a+b::x", "::x", "-oProxyCommand=id", "--upload-pack=id", "ftp://host/x",
        "ext://host", "git+ssh://host/x", "https://host/\nx", "/srv/\0x",
    ],
)  # fmt: skip
def test_a_remote_that_could_run_commands_or_that_git_may_not_use_is_refused(value: str) -> None:
    [line] = mistakes({"GIT_REMOTE_URL": value})
    assert line.startswith("GIT_REMOTE_URL: must be ")


def test_a_folder_counts_from_the_checkout_wherever_the_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.load(REMOTE | {"MEMGW_DATA_DIR": "some/where"}).data_dir == ROOT / "some/where"
    assert Config.load(REMOTE | {"MEMGW_QMD": "bin/../q.js"}).qmd == ROOT / "q.js"


def test_a_folder_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.load(REMOTE | {"MEMGW_DATA_DIR": "~/memgw"}).data_dir == tmp_path / "memgw"
    assert remote("~/memory.git") == str(tmp_path / "memory.git")


def test_the_home_of_a_user_that_does_not_exist_is_a_mistake_like_any_other() -> None:
    lines = mistakes({"GIT_REMOTE_URL": "~nobody-of-this-name/x", "MEMGW_DATA_DIR": "~nobody-of-this-name/x"})
    assert [line.partition(":")[0] for line in lines] == ["GIT_REMOTE_URL", "MEMGW_DATA_DIR"]


@pytest.mark.parametrize("value", ["host", ":80", "host:", "host:0", "host:65536", "host:http", "a b:80", "host:８０"])
def test_an_address_to_listen_on_has_a_host_and_a_port(value: str) -> None:
    assert mistakes(REMOTE | {"MEMGW_BIND": value}) == ["MEMGW_BIND: must be host:port"]


def test_models_and_gpus_are_those_that_are_set() -> None:
    assert Config.load(REMOTE).models.uris == DEFAULTS_OF_QMD
    assert Config.load(REMOTE).gpu == {}
    config = Config.load(REMOTE | {"QMD_EMBED_MODEL_URI": "/e", "QMD_RERANK_MODEL_URI": "r", "CUDA_DEVICE": "0"})
    assert config.models.uris == DEFAULTS_OF_QMD | {"embed": "/e", "rerank": str(ROOT / "r")}
    assert config.gpu == {"CUDA_DEVICE": "0"}
    config = Config.load(
        REMOTE | {"QMD_GENERATE_MODEL_URI": "hf:a/b/c", "CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "all"}
    )
    assert config.models.uris == DEFAULTS_OF_QMD | {"generate": "hf:a/b/c"}
    assert config.gpu == {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "all"}


def test_an_executable_is_started_by_itself() -> None:
    assert Config.load(REMOTE | {"MEMGW_QMD": "/opt/qmd"}).launcher == ["/opt/qmd"]


def test_a_script_of_nodes_is_started_by_the_named_node() -> None:
    config = Config.load(REMOTE | {"MEMGW_QMD": "/opt/qmd.js", "MEMGW_NODE": "/opt/node"})
    assert config.launcher == ["/opt/node", "/opt/qmd.js"]


def test_the_installed_node_is_the_real_one_and_new_enough() -> None:
    node, script = Config.load(REMOTE).launcher
    assert script == str(ROOT / "qmd/node_modules/@tobilu/qmd/dist/cli/qmd.js")
    said = subprocess.run(
        [node, "-p", "process.versions.node + ' ' + process.execPath"], capture_output=True, text=True
    )
    version, _, path = said.stdout.rstrip("\n").partition(" ")
    assert int(version.split(".")[0]) >= 22
    assert Path(path).samefile(node)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("# a comment\nMEMGW_WORKERS=7\nexport MEMGW_THREADS='9'\nDEFAULT_BRANCH=\nMEMGW_NODE\n\n", "utf-8")
    found = environment({"MEMGW_WORKERS": "3", "HOME": "/h"}, file)
    assert found == {"MEMGW_WORKERS": "3", "MEMGW_THREADS": "9", "DEFAULT_BRANCH": "", "HOME": "/h"}


def test_an_empty_variable_hides_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("MEMGW_WORKERS=7\n", "utf-8")
    assert Config.load(REMOTE | environment({"MEMGW_WORKERS": ""}, file)).workers == DEFAULTS["workers"]


def test_no_file_is_no_mistake(tmp_path: Path) -> None:
    assert environment({"A": "1"}, tmp_path / ".env") == {"A": "1"}


def test_the_example_has_a_line_and_a_comment_for_every_setting() -> None:
    lines = (ROOT / ".env.example").read_text("utf-8").splitlines()
    named = [(at, found[1]) for at, line in enumerate(lines) if (found := re.match(r"#?([A-Z][A-Z0-9_]*)=", line))]
    ours = [item.metadata["name"] for item in fields(Config)]
    assert sorted(name for _, name in named[: len(ours)]) == sorted(ours)  # those behind them are compose.yaml's
    for at, name in named:
        assert re.match(r"# \w", lines[at - 1]), f"{name} has no comment"


def test_the_example_shows_the_defaults() -> None:
    lines = (ROOT / ".env.example").read_text("utf-8").splitlines()
    shown = dict(line.removeprefix("#").split("=", 1) for line in lines if re.match(r"#?[A-Z][A-Z0-9_]*=", line))
    shown["GIT_REMOTE_URL"] = REMOTE["GIT_REMOTE_URL"]
    assert vars(Config.load(shown)) == DEFAULTS


@pytest.mark.parametrize("value", ["hf:a", "hf:a/b", "hf:a/b/c d.gguf", "hf:/b/c"])
def test_a_name_of_a_model_hub_is_whole(value: str) -> None:
    assert mistakes(REMOTE | {"QMD_EMBED_MODEL_URI": value}) == [
        "QMD_EMBED_MODEL_URI: must be a path or hf:owner/repository/file"
    ]


def test_several_secrets_may_hold_at_once_while_one_takes_the_place_of_another() -> None:
    new, old = "whsec_" + b64encode(b"k" * 32).decode(), "an-old-one,with/signs=%"
    config = Config.load(REMOTE | {"MEMGW_HOOK_SECRET": new, "MEMGW_HOOK_SECRET_OLD": old})
    assert config.hook_secrets == [new, old]
    assert Config.load(REMOTE | {"MEMGW_HOOK_SECRET_OLD": old}).hook_secrets == [old]
    assert Config.load(REMOTE).hook_secrets == []


@pytest.mark.parametrize(
    "value",
    [
        "1234567", "x" * 257, "0123456789abcdéf", "two\nlines of it",
        "whsec_0123456789abcdef", "whsec_" + b64encode(b"k" * 23).decode(), "whsec_!" + b64encode(b"k" * 32).decode(),
        "whsec_" + b64encode(b"k" * 32).decode()[:-1],
    ],
)  # fmt: skip
def test_a_secret_that_is_short_or_cut_off_is_a_mistake_and_is_not_repeated(value: str) -> None:
    [line] = mistakes(REMOTE | {"MEMGW_HOOK_SECRET": value})
    assert line.startswith("MEMGW_HOOK_SECRET: must be ")
    assert value not in line
