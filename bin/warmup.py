"""Asks a light question of each branch, again and again, so that mirror, index and qmd are at hand when an agent asks.

No answer is fresher for it: without this, only the first one takes longer. One question at a time;
MEMGW_WARMUP_BRANCHES names the branches, MEMGW_WARMUP_SECONDS how often each is asked.
"""

import heapq
import http.client
import logging
import os
import random
import signal
import sys
from pathlib import Path
from time import monotonic, sleep

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stack

from memgw import logs
from memgw.config import Config, load_or_exit

QUESTION = {"query": "memory", "limit": 1}
JITTER = 0.25

log = logging.getLogger("memgw.warmup")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # a question that waits for its answer is given up, too
    config = load_or_exit(os.environ)
    logs.configure("INFO")
    branches = config.warmup_branches or (config.default_branch,)
    due = [(monotonic() + random.uniform(0, JITTER), branch) for branch in branches]  # noqa: S311
    while True:
        when, branch = heapq.heappop(due)
        sleep(max(0.0, when - monotonic()))
        ask(config, branch)
        heapq.heappush(due, (monotonic() + pause(config.warmup_seconds), branch))


def pause(seconds: float) -> float:
    """So long on average, and never the same for all that were started together."""
    return seconds * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311


def ask(config: Config, branch: str) -> None:
    """One question, and a line on how it went. Whatever goes wrong, the next one is asked in its turn."""
    begun = monotonic()
    facts: dict[str, object] = {"branch": branch}
    try:
        status, answer = stack.ask(config, {**QUESTION, "branch": branch})
        facts |= {"status": status, "commit": answer.get("commit_hash"), "code": answer.get("code")}
    except (OSError, ValueError, http.client.HTTPException) as exc:
        facts |= {"code": "unreachable", "reason": str(exc)}
    facts["ms"] = round((monotonic() - begun) * 1000, 1)
    level = logging.INFO if facts.get("status") == 200 else logging.WARNING
    log.log(level, "warmup", extra={name: value for name, value in facts.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
