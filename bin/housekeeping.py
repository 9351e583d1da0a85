"""Housekeeping now, behind `make gc`: prints what it freed."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memgw import logs
from memgw.app import create_gateway, create_housekeeper
from memgw.config import load_or_exit
from memgw.errors import WorkspaceBusy

WAIT_SECONDS = 60.0


def main() -> int:
    config = load_or_exit(os.environ)
    logs.configure("WARNING", logs.secrets_of(config.remote_url))
    if not config.data_dir.is_dir():
        print("memgw: there is nothing yet")
        return 0
    try:
        housekeeper = create_housekeeper(config, create_gateway(config, os.environ))
        done = housekeeper.round(now=True, wait=WAIT_SECONDS)
    except WorkspaceBusy:
        print("memgw: another housekeeping is at work, and not done yet", file=sys.stderr)
        return 1
    except OSError as exc:
        print(f"memgw: {config.data_dir} can't be used: {exc.strerror}", file=sys.stderr)
        return 1
    for freed in done.freed:
        print(f"{megabytes(freed.bytes):>12}  {freed.what}: {freed.why}")
    print(f"{megabytes(sum(freed.bytes for freed in done.freed)):>12}  freed")
    for job in done.failed:
        print(f"memgw: {job}: could not be looked after, see above", file=sys.stderr)
    return 1 if done.failed else 0


def megabytes(number: int) -> str:
    return f"{number / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
