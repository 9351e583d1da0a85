"""How gunicorn serves memgw: `gunicorn -c python:memgw.gunicorn_conf memgw.wsgi:app`."""

import os
import re
import resource
import signal
import sys
from functools import partial
from itertools import count
from typing import Any

from memgw import files
from memgw.config import load_or_exit
from memgw.worker import STOPPING

_config = load_or_exit(os.environ)

_METRICS = _config.data_dir / "run" / "metrics" / re.sub(r"[^\w.]+", "-", _config.bind)
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
try:  # before the application is imported, and with it the client of Prometheus, which reads this
    files.remove(_METRICS)
    _METRICS.mkdir(parents=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(_METRICS)
except OSError as exc:
    print(f"memgw: each worker has metrics of its own: {exc.strerror}: data/run/metrics", file=sys.stderr)

_let_in = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOPPING)
os.register_at_fork(before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPPING), after_in_parent=_let_in)


def pre_exec(server: Any) -> None:
    """In what becomes a second master (USR2)."""
    _let_in()


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


# Where each number comes from, for operators: README, "gunicorn".
bind = _config.bind
# Of connections that no worker has accepted yet, such as in the moment when workers are replaced. The kernel may bound
# it lower (net.core.somaxconn).
backlog = 2048

# Threads, since requests wait for Git and qmd and not for Python. Those of memgw.worker wait for no client.
worker_class = "memgw.worker.Worker"
workers = _config.workers
# Requests at work, and four more that answer /health and /status (app.SPARE_THREADS).
threads = _config.threads
# Connections of a worker, idle ones included: one more closes the one that has been idle longest. Each is a descriptor,
# and a request at work may have ten more: the limit is raised to what this needs, where the system lets us.
worker_connections = max(1000, 2 * threads)
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_needed = worker_connections + 10 * threads + 200
if _soft != resource.RLIM_INFINITY and _soft < _needed:
    _most = _needed if _hard == resource.RLIM_INFINITY else min(_hard, _needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _hard))
# One import instead of one a worker: a worker that died is back at once, and memory is shared.
preload_app = True

# Seconds without a turn of a worker's main loop, which waits for nothing and nobody: that worker hangs, and is killed.
# It has nothing to do with how long a request takes; that is bounded by its own deadline (QMD_TIMEOUT_SECONDS).
timeout = 60
# What a worker that stops leaves to the requests at work: the longest deadline, and time to send the answer.
graceful_timeout = _config.timeout_seconds + 10
# Seconds that a connection may be idle. Longer than the minute for which proxies and clients keep one, so that they
# close it and not we: a request that crosses with our closing would be lost to a client that does not ask again.
keepalive = 75

# A worker does not grow (README); should a library begin to leak, it does not for months. No request is lost by it. The
# jitter keeps two workers from being replaced at once.
max_requests = _config.max_requests
max_requests_jitter = max_requests // 5

# Of a request's head: no URL of ours is long, proxies add a dozen fields, and what has to be kept of a stalled one is
# small. The body is bounded by MEMGW_MAX_BODY_BYTES or MEMGW_HOOK_MAX_BYTES.
limit_request_line = 4094
limit_request_fields = 64
limit_request_field_size = 8190

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
