"""`python -m memgw.background`: what is done outside of requests, by one process for all gateways of a data directory:
vectors that requests left for later, and housekeeping."""

import logging
import os
import signal
import sys
from math import inf
from time import monotonic, sleep

from memgw import logs
from memgw.app import create_gateway, create_housekeeper
from memgw.config import load_or_exit
from memgw.embedder import Embedder
from memgw.errors import MemgwError, WorkspaceBusy
from memgw.housekeeping import Housekeeper

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 2.0


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # what is half done is left as a kill would leave it, or better
    config = load_or_exit(os.environ)
    logs.configure(config.log_level, logs.secrets_of(config.remote_url))
    gateway = create_gateway(config, os.environ)
    embedder, housekeeper = Embedder(gateway), create_housekeeper(config, gateway)
    every = config.housekeeping_minutes * 60
    due = monotonic() + every if every else inf
    parent = os.getppid()
    while os.getppid() == parent:  # a killed supervisor leaves nothing behind
        if monotonic() >= due:
            _round(housekeeper)
            due = monotonic() + every
        if not embedder.turn(due):  # thousands of branches may lack vectors
            sleep(LOOK_EVERY_SECONDS)
    return 0


def _round(housekeeper: Housekeeper) -> None:
    """Whatever keeps it from its work keeps nobody from making vectors."""
    try:
        housekeeper.round()
    except WorkspaceBusy:  # `make gc` is at it
        pass
    except (MemgwError, OSError) as exc:
        log.warning("housekeeping_failed", exc_info=exc)


if __name__ == "__main__":
    sys.exit(main())
