"""Puts the parts together: configuration → gateway → Flask application."""

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from time import monotonic
from uuid import uuid4

from flask import Flask, Response, current_app, g, request

from memgw import hooks, logs, metrics, problems
from memgw.census import Census
from memgw.config import Config
from memgw.engine import Engine
from memgw.errors import WorkspaceBusy
from memgw.forges import UNKNOWN
from memgw.gateway import Gateway
from memgw.host import Host
from memgw.housekeeping import STEP_SECONDS, Bounds, Housekeeper
from memgw.layout import Layout, UpdateOn
from memgw.mirror import Mirror
from memgw.pushes import Pushes
from memgw.qmd import QmdCli
from memgw.readiness import Readiness
from memgw.remote import Remote
from memgw.replays import Replays
from memgw.status import Status
from memgw.views import bp
from memgw.warm import QmdAuto, QmdHost

SPARE_THREADS = 4

HOOKS_AT_ONCE = 2
HOOK_PATIENCE_SECONDS = 0.5
"""Hooks take some milliseconds each: two of the spare threads do for them, so that no question keeps a hook out, nor a
hook a question. Only of a burst that these can't take do some go where questions go."""

requests_log = logging.getLogger(logs.REQUESTS)

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

STEPS = {
    "wait": "waited_ms",
    "ask": "asked_ms",
    "fetch": "fetched_ms",
    "align": "aligned_ms",
    "index": "indexed_ms",
    "embed": "embedded_ms",
    "search": "searched_ms",
}


def create_gateway(config: Config, environ: Mapping[str, str]) -> Gateway:
    """`environ`: of this process; what the tools need of it is picked from it."""
    layout = Layout(
        data=config.data_dir,
        prefix=config.index_prefix,
        update_on=UpdateOn(config.update_on),
        embed_model=config.models.embed,
        lock_timeout=config.lock_timeout_seconds,
        default_branch=config.default_branch,
        embed_on_change=config.embed_on_change,
        embed_seconds=config.embed_seconds,
        query_seconds=config.query_seconds,
        deep_seconds=config.deep_seconds,
    )
    remote = Remote(config.data_dir, config.remote_url, environ, timeout=config.remote_timeout_seconds)
    mirror = Mirror(config.data_dir, remote, lock_timeout=config.lock_timeout_seconds)
    return Gateway(layout, mirror, remote, create_engine(config, environ, layout.nursery), config.models)


def create_housekeeper(config: Config, gateway: Gateway) -> Housekeeper:
    patience = min(config.lock_timeout_seconds, config.timeout_seconds)
    bounds = Bounds(
        gone_seconds=config.gone_branch_hours * 3600,
        max_workspaces=config.max_workspaces,
        max_bytes=config.max_disk_mb * 1_000_000,
        request_seconds=config.timeout_seconds,
        step_seconds=min(STEP_SECONDS, max(patience / 2, 1.0)),
    )
    return Housekeeper(gateway, bounds)


def create_engine(config: Config, environ: Mapping[str, str], nursery: Path) -> Engine:
    """The one that QMD_ENGINE says; `nursery`: where it keeps vectors for all branches."""
    cli = create_cli(config, environ)
    if config.engine == "cli":
        return cli
    host = QmdHost(Host(config.host_socket), cli, cli.settings, nursery)
    return host if config.engine == "host" else QmdAuto(host, cli)


def create_cli(config: Config, environ: Mapping[str, str]) -> QmdCli:
    return QmdCli(config.launcher, config.data_dir, {**environ, **config.gpu}, config.models)


def create_app(config: Config, environ: Mapping[str, str]) -> Flask:
    """The WSGI application. Makes the data directory; asks nothing of Git or qmd yet."""
    secrets = [*config.hook_secrets, *logs.secrets_of(config.remote_url)]
    logs.configure(config.log_level, sorted(secrets, key=len, reverse=True))
    config.data_dir.mkdir(parents=True, exist_ok=True)
    app = Flask("memgw", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes + 1  # see bodies.whole
    app.json.ensure_ascii = False  # type: ignore[attr-defined]
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.json.compact = True  # type: ignore[attr-defined]
    gateway = create_gateway(config, environ)
    app.extensions |= {
        "memgw": gateway,
        "memgw.config": config,
        "memgw.status": Status(config, gateway),
        "memgw.readiness": Readiness(config, gateway),
        "memgw.census": Census(config, gateway),
        "memgw.body_limits": partial(_most, config),
        "memgw.replays": Replays(config.data_dir),
        "memgw.pushes": Pushes(gateway, config.timeout_seconds),
    }
    problems.init_app(app)
    app.before_request(_begin)
    _admit(app, config.threads - SPARE_THREADS)
    app.after_request(_end)
    app.register_blueprint(bp)
    app.extensions["memgw.endpoints"] = {rule.rule for rule in app.url_map.iter_rules()}
    return app


def _most(config: Config, path: str) -> int:
    """Bytes of a request's body that are worth waiting for: one more than it may have."""
    return 1 + (config.hook_max_bytes if path == hooks.PATH and config.hook_secrets else config.max_body_bytes)


def _admit(app: Flask, slots: int) -> None:
    """Lets so many requests of this process work at once, so that the rest of the threads can answer /health and
    /status whatever the others wait for."""
    free, for_hooks = BoundedSemaphore(slots), BoundedSemaphore(HOOKS_AT_ONCE)

    @app.before_request
    def enter() -> None:
        if request.method == "POST":
            if request.endpoint == hooks.ENDPOINT and for_hooks.acquire(timeout=HOOK_PATIENCE_SECONDS):
                g.admitted = for_hooks
            elif free.acquire(blocking=False):
                g.admitted = free
            else:
                raise WorkspaceBusy("too many requests are at work at once", retry_after=1)

    @app.teardown_request
    def leave(_: BaseException | None) -> None:
        if slots := g.pop("admitted", None):
            slots.release()
        logs.request_id.set("")


def _begin() -> None:
    given = request.headers.get("X-Request-ID", "")
    logs.request_id.set(given if _GIVEN_ID.fullmatch(given) else uuid4().hex)
    g.arrived = monotonic()
    g.facts = {}


def _end(response: Response) -> Response:
    """One line a request: what was asked of which commit, how it ended, and where the time went."""
    response.headers["X-Request-ID"] = logs.request_id.get()
    spent = g.deadline.timings_ms if "deadline" in g else {}
    seconds = monotonic() - g.arrived
    endpoint = request.path if request.path in current_app.extensions["memgw.endpoints"] else "other"
    metrics.request(endpoint, response.status_code, seconds, spent)
    if request.endpoint == hooks.ENDPOINT and (outcome := g.get("code") or g.facts.get("outcome")):
        metrics.hook(g.facts.get("forge", UNKNOWN), outcome)
    facts = {
        "method": request.method,
        "path": request.path,
        "status": response.status_code,
        "code": g.get("code"),
        **g.facts,
        "ms": round(seconds * 1000, 1),
        **{STEPS[step]: ms for step, ms in spent.items()},
    }
    requests_log.info("request", extra={key: value for key, value in facts.items() if value is not None})
    return response
