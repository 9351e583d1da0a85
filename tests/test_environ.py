"""What the tools get to see of the gateway's environment: what they need, and nothing else."""

import subprocess
from pathlib import Path

from memgw.environ import for_git, for_qmd

HOSTILE = {
    "CI": "true",
    "INDEX_PATH": "/evil.sqlite",
    "QMD_CONFIG_DIR": "/evil",
    "QMD_TRUST_HOOKS": "1",
    "QMD_EMBED_MODEL": "evil",
    "XDG_CACHE_HOME": "/evil",
    "NODE_OPTIONS": "--require /evil.js",
    "LD_PRELOAD": "/evil.so",
    "GIT_DIR": "/evil",
    "GIT_WORK_TREE": "/evil",
    "GIT_INDEX_FILE": "/evil",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "touch /evil",
    "GIT_CONFIG_PARAMETERS": "'core.fsmonitor=evil'",
    "GIT_CONFIG_GLOBAL": "/evil",
    "GIT_EXEC_PATH": "/evil",
    "GIT_EXTERNAL_DIFF": "/evil",
    "GIT_ASKPASS": "/evil",
    "SSH_ASKPASS": "/evil",
    "GIT_TRACE": "1",
    "LC_ALL": "de_DE.UTF-8",
    "LANGUAGE": "de",
    "LANG": "de_DE.UTF-8",
    "PYTHONPATH": "/evil",
    "GIT_REMOTE_URL": "https://user:password@host/x",
    "SECRET_TOKEN": "evil",
}

GIT_FIXED = {
    "LC_ALL": "C.UTF-8",
    "LANGUAGE": "C",
    "GIT_CONFIG_GLOBAL": "/settings",
    "GIT_CEILING_DIRECTORIES": "/data",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "SSH_ASKPASS_REQUIRE": "never",
    "GCM_INTERACTIVE": "never",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}

QMD_FIXED = {
    "LC_ALL": "C.UTF-8",
    "NO_COLOR": "1",
    "WSL_DISTRO_NAME": "none",
    "NODE_COMPILE_CACHE": "/cache/node",
    "HOME": "/home",
    "XDG_CACHE_HOME": "/cache",
    "QMD_CONFIG_DIR": "/config",
    "INDEX_PATH": "/cache/x/i.sqlite",
    "QMD_SQLITE_BUSY_TIMEOUT": "10000",
}


def git_env(environ: dict[str, str]) -> dict[str, str]:
    return for_git(environ, Path("/settings"), Path("/data"))


def qmd_env(environ: dict[str, str]) -> dict[str, str]:
    return for_qmd(
        environ, home=Path("/home"), cache=Path("/cache"), config=Path("/config"), index=Path("/cache/x/i.sqlite")
    )


def test_git_sees_nothing_that_it_was_not_meant_to() -> None:
    assert git_env(HOSTILE) == GIT_FIXED
    assert git_env({}) == GIT_FIXED


def test_git_keeps_what_credentials_certificates_and_proxies_need() -> None:
    kept = {
        "PATH": "/bin", "TMPDIR": "/t", "TZ": "UTC", "HOME": "/me", "USER": "me", "LOGNAME": "me",
        "XDG_CONFIG_HOME": "/x", "SSH_AUTH_SOCK": "/s", "GIT_SSL_CAINFO": "/ca", "GIT_SSL_CAPATH": "/cas",
        "SSL_CERT_FILE": "/c", "SSL_CERT_DIR": "/cs", "http_proxy": "p1", "https_proxy": "p2", "no_proxy": "p3",
        "all_proxy": "p4", "HTTPS_PROXY": "p5", "NO_PROXY": "p6", "ALL_PROXY": "p7",
    }  # fmt: skip
    assert git_env(kept | HOSTILE) == kept | GIT_FIXED


def test_an_ssh_of_the_operators_own_still_never_asks() -> None:
    own = {"GIT_SSH_COMMAND": "ssh -i /key", "GIT_SSH_VARIANT": "plink"}
    assert git_env(own) == GIT_FIXED | own


def test_git_finds_no_repository_above_the_data(tmp_path: Path) -> None:
    settings, data = tmp_path / "settings", tmp_path / "data"
    inside = data / "workspaces" / "main"
    inside.mkdir(parents=True)
    settings.touch()
    env = for_git({"PATH": "/usr/local/bin:/usr/bin:/bin"}, settings, data)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], env=env, check=True)
    look = ["git", "rev-parse", "--show-toplevel"]
    assert subprocess.run(look, cwd=tmp_path, env=env, capture_output=True, text=True).stdout.strip() == str(tmp_path)
    lost = subprocess.run(look, cwd=inside, env=env, capture_output=True, text=True)
    assert lost.returncode == 128
    assert "not a git repository" in lost.stderr


def test_qmd_sees_nothing_that_it_was_not_meant_to() -> None:
    assert qmd_env(HOSTILE | {"HOME": "/me", "XDG_CONFIG_HOME": "/me/.config"}) == QMD_FIXED
    assert qmd_env({}) == QMD_FIXED


def test_qmd_keeps_its_path_and_its_gpu() -> None:
    kept = {
        "PATH": "/bin", "TMPDIR": "/t", "TZ": "UTC", "CUDA_DEVICE": "0", "CUDA_VISIBLE_DEVICES": "1",
        "NVIDIA_VISIBLE_DEVICES": "all", "LD_LIBRARY_PATH": "/cuda",
    }  # fmt: skip
    assert qmd_env(kept | HOSTILE) == kept | QMD_FIXED


def test_an_empty_list_of_gpus_hides_none() -> None:
    assert qmd_env({"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE": "0"}) == {"CUDA_DEVICE": "0"} | QMD_FIXED


def test_the_given_environment_is_left_as_it_was() -> None:
    environ = {"PATH": "/bin", "HOME": "/me"}
    git_env(environ)["PATH"] = qmd_env(environ)["PATH"] = "/changed"
    assert environ == {"PATH": "/bin", "HOME": "/me"}
