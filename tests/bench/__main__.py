"""`make bench` · `make bench QUICK=1` · `make bench ONLY=unchanged,changed PEERS=1 OUT=bench.json`"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from memgw.config import ROOT
from tests.bench.answers import WrongAnswer
from tests.bench.report import Row, as_json, table
from tests.bench.rows import GROUPS, Bench
from tests.bench.scene import Options


def main() -> int:
    """0, or 1 after a wrong answer, or with STRICT=1 after a missed target."""
    wanted = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    cache = wanted.dir.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    wrong: list[str] = []
    start = time.monotonic()
    with TemporaryDirectory(prefix="run-", dir=cache) as work, ExitStack() as exits:
        isolate(Path(work) / "home")
        options = Options(cache, Path(work), wanted.sizes, wanted.peers)
        if wanted.quick:
            options = replace(options, sizes=[500], answers=30, slow=3, patience=8)
        bench = Bench(exits, options)
        for name, group in GROUPS.items():
            if wanted.only and name not in wanted.only:
                continue
            begun = time.monotonic()
            try:
                for row in group(bench):
                    rows.append(row)
            except WrongAnswer as exc:
                wrong.append(f"{name}: {exc}")
            print(f"bench: {name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    about = facts(time.monotonic() - start)
    print(f"\n{table(rows)}\n\n{about['commit']}, {about['cores']} cores, load {about['load']}, {about['seconds']} s")
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(json.dumps({**about, "wrong": wrong, "rows": as_json(rows)}, indent=1, ensure_ascii=False))
    for line in wrong:
        print(f"WRONG ANSWER: {line}", file=sys.stderr)
    missed = [row.name for row in rows if row.met is False]
    return 1 if wrong or (wanted.strict and missed) else 0


def arguments() -> argparse.Namespace:
    """From the command line, else from the environment."""
    said = os.environ.get
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[int(n) for n in said("SIZES", "500 5000 50000").split()]
    )
    parser.add_argument("--only", type=words, default=words(said("ONLY", "")), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", default=said("QUICK", "") == "1", help="500 files, a minute")
    parser.add_argument("--peers", action="store_true", default=said("PEERS", "") == "1")
    parser.add_argument("--strict", action="store_true", default=said("STRICT", "") == "1")
    parser.add_argument("--out", type=Path, default=Path(said("OUT") or ROOT / ".bench" / "bench.json"))
    parser.add_argument("--dir", type=Path, default=Path(said("BENCH_DIR") or ROOT / ".bench"))
    wanted = parser.parse_args()
    if unknown := set(wanted.only) - set(GROUPS):
        parser.error(f"ONLY: {', '.join(sorted(unknown))}: must be of {', '.join(GROUPS)}")
    return wanted


def isolate(home: Path) -> None:
    """From here on nothing of the user's reaches git, qmd or memgw, as in tests/conftest.py."""
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(("GIT_", "QMD_", "MEMGW_", "XDG_", "CUDA_")) or name in ("CI", "INDEX_PATH", "RUNTIME"):
            del os.environ[name]
    os.environ |= {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}


def words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def facts(taken: float) -> dict[str, object]:
    """Of the machine and the code, to tell two tables apart."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "commit": described.stdout.strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "seconds": round(taken),
    }


if __name__ == "__main__":
    sys.exit(main())
