"""How gunicorn serves memgw: `gunicorn -c python:memgw.gunicorn_conf memgw.wsgi:app`.

Threads, since requests wait for Git and qmd and not for Python. gunicorn's `timeout` bounds a worker's heartbeat, not a
request (gthread); a request is bounded by its own deadline, which is shorter than both time-outs below.
"""

import os
import re
import sys
from itertools import count
from typing import Any

from memgw import files
from memgw.config import load_or_exit

_config = load_or_exit(os.environ)

_METRICS = _config.data_dir / "run" / "metrics" / re.sub(r"[^\w.]+", "-", _config.bind)
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
try:  # before the application is imported, and with it the client of Prometheus, which reads this
    files.remove(_METRICS)
    _METRICS.mkdir(parents=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(_METRICS)
except OSError as exc:
    print(f"memgw: each worker has metrics of its own: {exc.strerror}: data/run/metrics", file=sys.stderr)


def pre_fork(server: Any, worker: Any) -> None:
    """A worker takes the place of one that ended, and goes on with its counts: these never go down, and files don't
    grow in number."""
    taken = {other.memgw_place for other in server.WORKERS.values()}
    worker.memgw_place = next(place for place in count() if place not in taken)


def post_fork(server: Any, worker: Any) -> None:
    from memgw import metrics

    metrics.begin(_METRICS, f"{server.pid}-{worker.memgw_place}")


def on_exit(server: Any) -> None:
    """In the master, after its workers."""
    server.app.wsgi().extensions["memgw"].remote.close()


bind = _config.bind
worker_class = "memgw.worker.Worker"
workers = _config.workers
threads = _config.threads
preload_app = True  # one import instead of one a worker: a worker that died is back at once, and memory is shared
timeout = _config.timeout_seconds + 30
graceful_timeout = _config.timeout_seconds + 10
keepalive = 75
control_socket_disable = True  # it lies in HOME, so that a second stack would take it over
errorlog = "-"
accesslog = "-"
logconfig_dict = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "error": {"format": "%(asctime)s [%(process)d] [%(levelname)s] %(message)s"},
        "access": {"format": "%(message)s"},
    },
    "handlers": {
        "error": {"class": "logging.StreamHandler", "formatter": "error", "stream": "ext://sys.stderr"},
        "access": {"class": "logging.StreamHandler", "formatter": "access", "stream": "ext://sys.stderr"},
    },
    "root": {"level": "WARNING", "handlers": ["error"]},
    "loggers": {
        "gunicorn.error": {"level": "INFO", "handlers": ["error"], "propagate": False},
        "gunicorn.access": {"level": "INFO", "handlers": ["access"], "propagate": False},
    },
}
