"""Starts and stops memgw for an operator: `python bin/stack.py up|down|serve|logs`, behind the Makefile's targets."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bin")]

import containers  # noqa: E402  beside us, and found as memgw is

from memgw.config import Config, load_or_exit  # noqa: E402

START_SECONDS = 60
DOWN = ["--profile", "warmup", "down"]


def main(arguments: list[str]) -> int:
    """Returns the exit status; prints one clear line for whatever is wrong."""
    commands = {"up": up, "down": down, "serve": serve, "logs": logs}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    config = load_or_exit(os.environ, status=2)
    if chosen_runtime(config) == "docker":
        return docker(arguments[0], config)
    return commands[arguments[0]](config)


def chosen_runtime(config: Config) -> str:
    """docker or local, as RUNTIME says; with auto as bin/runtime.sh finds, unless the local stack runs already."""
    done = subprocess.run(["bash", "bin/runtime.sh"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    if (os.environ.get("RUNTIME") or "auto") != "auto":
        return done.stdout.strip()
    runtime = "local" if supervisor(config) else done.stdout.strip()
    print(f"memgw: runtime {runtime}", flush=True)
    return runtime


def docker(command: str, config: Config) -> int:
    """The same commands for the containers of compose.yaml."""
    if not shutil.which("docker"):
        print("memgw: RUNTIME: there is no docker here", file=sys.stderr)
        return 2
    if command in ("up", "serve") and (why := containers.problem(config)):
        print(f"memgw: {why}", file=sys.stderr)
        return 2
    if command == "up":
        if status := compose(config, "up", "--detach", "--build"):
            return status
        if not until(lambda: health(config), START_SECONDS):
            print(f"memgw: did not answer within {START_SECONDS} s; the end of the gateway's log:", file=sys.stderr)
            compose(config, "logs", "--tail", "20", "gateway")
            compose(config, *DOWN)
            return 1
        print(f"memgw: answers on {url(config)}")
        return first_question(config)
    words = {
        "down": DOWN,
        "serve": ["up", "--build"],
        "logs": ["logs", "--follow", "--tail", "40"],
    }
    line = containers.command(*words[command])
    os.chdir(ROOT)
    os.execvpe(line[0], line, containers.variables(config, stop_seconds(config)))  # noqa: S606


def compose(config: Config, *words: str) -> int:
    """The exit status of `docker compose …`."""
    environ = containers.variables(config, stop_seconds(config))
    return subprocess.run(containers.command(*words), cwd=ROOT, env=environ).returncode


def up(config: Config) -> int:
    """Starts the stack, unless it runs; ends when a first question has been answered."""
    if supervisor(config):
        print(f"memgw: is running already, on {url(config)}")
    else:
        if not ready_to_start(config):
            return 1
        subprocess.run(supervisord(config), cwd=ROOT, env=variables(config), check=True)
        if not until(lambda: health(config), START_SECONDS):
            print(f"memgw: did not answer within {START_SECONDS} s; the end of {log_file(config)}:", file=sys.stderr)
            print(tail(log_file(config), 20), file=sys.stderr)
            down(config)
            return 1
        print(f"memgw: answers on {url(config)}")
    if not config.models.file("embed"):
        print(
            "memgw: there is no embedding model yet, which semantic search needs: `make models` fetches qmd's (2 GB),"
            " `make models MODEL=minilm` makes a small one for English that needs no model hub"
        )
    return first_question(config)


def first_question(config: Config) -> int:
    """Asks it and shows the answer, and what to do next."""
    question = {"query": "deploy", "limit": 2}
    print(f"\nPOST {url(config)}/query {json.dumps(question)}")
    status, answer = ask(config, question)
    print(json.dumps(answer, ensure_ascii=False, indent=2))
    print(
        f"\nTry:  curl -s {url(config)}/query -H 'Content-Type: application/json' -d '{json.dumps(question)}'"
        "\nThen: make smoke · make logs · make down"
    )
    return 0 if status == 200 else 1


def serve(config: Config) -> int:
    """Becomes the supervisor, in the foreground: Ctrl-C or TERM ends everything."""
    if supervisor(config):
        print(f"memgw: is running already, on {url(config)}: make down first", file=sys.stderr)
        return 1
    if not ready_to_start(config):
        return 1
    print(f"memgw: starting on {url(config)}; logs are in {config.data_dir / 'logs'}", flush=True)
    command = supervisord(config, "--nodaemon")
    os.chdir(ROOT)
    os.execve(command[0], command, variables(config))  # noqa: S606  no shell is what we want


def down(config: Config) -> int:
    """Ends the stack and waits until it is gone; also what a killed supervisor left behind."""
    limit = stop_seconds(config) + 15
    run = config.data_dir / "run"
    found = False
    for name, sign in (("supervisord", "supervisord"), ("gateway", "memgw.wsgi")):
        pid = process(run / f"{name}.pid", sign)
        if not pid:
            continue
        found = True
        os.kill(pid, signal.SIGTERM)
        if not until(lambda pid=pid, sign=sign: not lives(pid, sign), limit):  # type: ignore[misc]
            print(f"memgw: process {pid} ({name}) does not end", file=sys.stderr)
            return 1
    print("memgw: stopped" if found else "memgw: was not running")
    return 0


def logs(config: Config) -> int:
    """Follows gunicorn's access and error logs, and the requests."""
    folder = config.data_dir / "logs"
    files = [str(folder / name) for name in ("gunicorn.log", "requests.log")]
    command = ["tail", "-n", "40", "-F", *files]
    os.execvp(command[0], command)  # noqa: S606


def ready_to_start(config: Config) -> bool:
    """Makes the folders and looks whether the gateway's port is free, so that a start can't half succeed.

    Without a port for it, qmd's MCP server stays away until there is one; nothing else needs it.
    """
    for name in ("logs", "run"):
        (config.data_dir / name).mkdir(parents=True, exist_ok=True)
    if why := taken(config.mcp_host, config.mcp_port):
        print(f"memgw: MEMGW_MCP_PORT: {why}: going on without qmd's MCP server", file=sys.stderr)
    if why := taken(*address(config)):
        print(f"memgw: MEMGW_BIND: {why}", file=sys.stderr)
        return False
    return True


def taken(host: str, port: int) -> str | None:
    """Why we can't listen there, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return f"can't listen on {host}:{port}: {exc.strerror}"
    return None


def supervisord(config: Config, *options: str) -> list[str]:
    return [sys.executable, "-m", "supervisor.supervisord", "-c", str(ROOT / "bin" / "supervisord.conf"), *options]


def variables(config: Config) -> dict[str, str]:
    """The environment that supervisord.conf refers to."""
    return {
        **os.environ,
        "MEMGW_ROOT": str(ROOT),
        "MEMGW_PYTHON": sys.executable,
        "MEMGW_DATA_DIR": str(config.data_dir),
        "MEMGW_STOP_SECONDS": str(stop_seconds(config)),
        "MEMGW_HOST": "true" if config.engine != "cli" and config.qmd.suffix == ".js" else "false",
    }


def stop_seconds(config: Config) -> int:
    """A little more than gunicorn gives the requests in flight (memgw/gunicorn_conf.py)."""
    return config.timeout_seconds + 20


def supervisor(config: Config) -> int | None:
    """The process id of this data directory's supervisor, if it runs."""
    return process(config.data_dir / "run" / "supervisord.pid", "supervisord")


def process(pid_file: Path, sign: str) -> int | None:
    """The process of a pid file, if it lives and its command line shows that it is ours."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None
    return pid if lives(pid, sign) else None


def lives(pid: int, sign: str) -> bool:
    """Whether the process is there; a pid file goes a moment earlier."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return not Path("/proc/self").exists()
    return sign in command and state != "Z"


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def health(config: Config) -> bool:
    try:
        with urllib.request.urlopen(f"{url(config)}/health", timeout=2) as answer:
            return bool(json.load(answer)["ok"])
    except (OSError, ValueError):
        return False


def ask(config: Config, question: dict[str, object]) -> tuple[int, Any]:
    """Status and body of a query."""
    request = urllib.request.Request(
        f"{url(config)}/query", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=config.timeout_seconds + 30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as exc:
        return exc.code, json.load(exc)


def address(config: Config) -> tuple[str, int]:
    host, _, port = config.bind.rpartition(":")
    return host.strip("[]"), int(port)


def url(config: Config) -> str:
    host, port = address(config)
    if host in ("0.0.0.0", "::"):  # noqa: S104  to ask ourselves, not to listen
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_file(config: Config) -> Path:
    return config.data_dir / "logs" / "gunicorn.log"


def tail(path: Path, lines: int) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
