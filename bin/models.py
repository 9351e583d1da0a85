"""`make models` · `make models MODEL=minilm`: brings models here ahead of time; no request has to wait for them.

Without MODEL: those of .env, else qmd's own, some 2 GB, by qmd itself. `minilm`: a small one for English that needs
no model hub (bin/minilm.py), and the line in .env that has it used. PATIENCE=… seconds without a byte are the end.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from dotenv import set_key

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memgw.app import create_cli  # noqa: E402  found through the line above
from memgw.config import Config, load_or_exit  # noqa: E402
from memgw.qmd import MODEL_VARIABLES, QmdCli  # noqa: E402

PATIENCE_SECONDS = float(os.environ.get("PATIENCE") or 30)
"""qmd waits for ever for a hub that it can't reach."""

SAY_EVERY_SECONDS = 10

NETWORK = (
    "HF_ENDPOINT", "HF_TOKEN", "NODE_EXTRA_CA_CERTS",
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Returns the exit status; prints one clear line for whatever is wrong."""
    if arguments not in ([], ["minilm"]):
        print(f"models: MODEL={' '.join(arguments)}: must be minilm, or left out", file=sys.stderr)
        return 2
    config = load_or_exit(os.environ, status=2)
    if arguments:
        return minilm(config, ROOT / ".env")
    return fetch(config, create_cli(config, os.environ))


def minilm(config: Config, env_file: Path) -> int:
    path = config.data_dir / "models" / "minilm-l6-v2-q8_0.gguf"
    if status := subprocess.run([sys.executable, str(ROOT / "bin" / "minilm.py"), str(path)]).returncode:
        return status
    say(f"{shown(path)} is here")
    name = "QMD_EMBED_MODEL_URI"
    if config.embed_model == str(path):
        say(f"and it is {name} already")
        return 0
    set_key(env_file, name, shown(path), follow_symlinks=True)
    if name in os.environ:
        say(f"{env_file.name} names it now, but {name} of the environment wins: {os.environ[name]}")
        return 0
    say(f"{env_file.name} names it now as {name}; `make down up` has it used, and makes all vectors with it")
    return 0


def fetch(config: Config, cli: QmdCli) -> int:
    models = config.models
    here = {role: models.file(role) for role in MODEL_VARIABLES}
    for role, path in here.items():
        if path:
            say(f"{role}: {shown(path)} is here")
    if all(here.values()):
        return 0
    if gone := [role for role, path in here.items() if not path and not models.is_fetched(role)]:
        print(f"models: {', '.join(gone)}: the file that .env names is not there", file=sys.stderr)
        return 1
    with TemporaryDirectory(prefix="memgw-models-") as settings:
        # qmd writes models into its settings file, where they would beat the environment later. And of a model that it
        # has, it deletes the file when it can't ask the hub: it is told of those as files that are nobody's to fetch.
        variables = {MODEL_VARIABLES[role]: str(path) for role, path in here.items() if path}
        network = {name: os.environ[name] for name in NETWORK if name in os.environ}
        own = {"QMD_CONFIG_DIR": settings, "INDEX_PATH": f"{settings}/none.sqlite", "NODE_USE_ENV_PROXY": "1"}
        why = pull(config, cli.host_env() | variables | network | own, models.cache)
    if why:
        print(
            f"models: {why}. Without a model hub there is a small model for English: make models MODEL=minilm",
            file=sys.stderr,
        )
        return 1
    return 0


def pull(config: Config, environ: dict[str, str], folder: Path) -> str | None:
    """Has qmd fetch what is missing; why that failed, or None."""
    on_terminal = sys.stdout.isatty()
    command = [*config.launcher, "--index", "models", "pull", *(["--progress"] if on_terminal else [])]
    process = subprocess.Popen(command, cwd=environ["HOME"], env=environ, start_new_session=True)
    try:
        if not watch(process, folder, quiet=on_terminal):
            return f"nothing came from the model hub for {PATIENCE_SECONDS:g} seconds"
        return f"qmd could not fetch them (exit {process.returncode}, see above)" if process.returncode else None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if on_terminal:
            print("\x1b[?25h", end="", flush=True)  # the cursor, which a killed progress bar leaves hidden


def watch(process: "subprocess.Popen[bytes]", folder: Path, *, quiet: bool) -> bool:
    """Until it ends; False when it gets no further."""
    size, grown, said = bytes_in(folder), time.monotonic(), time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if (current := bytes_in(folder)) != size:
            size, grown = current, now
        elif now - grown > PATIENCE_SECONDS:
            return False
        if not quiet and now - said > SAY_EVERY_SECONDS:
            said = now
            say(f"{size / 1e6:.0f} MB are here")
    return True


def bytes_in(folder: Path) -> int:
    """What was written, also of files that were made at their full length before."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            pass
    return total


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def say(text: str) -> None:
    print(f"models: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
