"""The endpoints. A view reads, asks the gateway, and writes down what it was told."""

from typing import Any

from flask import Blueprint, Response, current_app, g, jsonify, request

from memgw import metrics
from memgw.bodies import read
from memgw.branch import Branch
from memgw.census import Census
from memgw.config import Config
from memgw.deadline import Deadline
from memgw.engine import Kind, Part, QueryType, Question
from memgw.errors import IndexDamaged
from memgw.gateway import Fresh, Gateway
from memgw.ladder import Degraded
from memgw.openapi import document
from memgw.readiness import Readiness
from memgw.results import Hit
from memgw.schemas import AnswerOut, HealthOut, QueryIn, ReadyOut, SelectionIn, StatusOut, SyncOut
from memgw.status import Status
from memgw.workspace import Workspace

bp = Blueprint("memgw", __name__)

QUERY, SELECTION = QueryIn(), SelectionIn()
ANSWER, SYNC, STATUS, HEALTH, READY = AnswerOut(), SyncOut(), StatusOut(), HealthOut(), ReadyOut()
"""Made once: that costs more than using them."""


@bp.get("/health")
def health() -> Response:
    """Touches no lock, no Git and no qmd."""
    return jsonify(HEALTH.dump({"ok": True}))


@bp.get("/ready")
def ready() -> Response:
    """Takes no workspace lock; 503 in the same shape when it is not."""
    readiness: Readiness = current_app.extensions["memgw.readiness"]
    checks = readiness.checks()
    ok = all(check.ok for check in checks.values())
    answer = jsonify(READY.dump({"ok": ok, "checks": {name: check.told() for name, check in checks.items()}}))
    answer.status_code = 200 if ok else 503
    return answer


@bp.get("/metrics")
def counted() -> Response:
    """Takes no workspace lock; text for Prometheus."""
    census: Census = current_app.extensions["memgw.census"]
    return Response(metrics.render(census.take()), content_type=metrics.CONTENT_TYPE)


@bp.post("/query")
def query() -> Response:
    asked = read(request, QUERY)
    branch = _branch(asked)
    deadline = _deadline()
    answer = _gateway().query(
        branch,
        _question(asked),
        deadline,
        latest=asked["require_latest"],
        bodies=asked["full"],
        strict=asked["strict"],
    )
    body = _commit(branch, answer.workspace, answer.fresh, answer.degraded) | {
        "query_type": asked["query_type"],
        "results": [_result(hit, answer.landed.found.bodies) for hit in answer.landed.found.hits],
    }
    if asked["debug"]:
        more = {"qmd_command": answer.command, "mode_used": answer.landed.ask.question.query_type}
        body["debug"] = _debug(answer.workspace, answer.fresh, deadline) | more
    return jsonify(ANSWER.dump(body))


@bp.post("/sync")
def sync() -> Response:
    asked = read(request, SELECTION)
    branch = _branch(asked)
    deadline = _deadline()
    report = _gateway().sync(branch, deadline)
    body = _commit(branch, report.workspace, report.fresh, report.degraded) | {
        "changed": report.previous != report.fresh.stamp.commit,
        "previous_commit": report.previous,
        "documents": report.fresh.stamp.documents,
        "added": report.change.added,
        "modified": report.change.modified,
        "deleted": report.change.deleted,
    }
    if asked["debug"]:
        body["debug"] = _debug(report.workspace, report.fresh, deadline)
    return jsonify(SYNC.dump(body))


@bp.get("/status")
def status() -> Response:
    """Takes no lock."""
    reporter: Status = current_app.extensions["memgw.status"]
    return jsonify(STATUS.dump({"ok": True} | reporter.collect()))


@bp.get("/openapi.json")
def openapi() -> Response:
    return jsonify(document())


def _gateway() -> Gateway:
    gateway: Gateway = current_app.extensions["memgw"]
    return gateway


def _deadline() -> Deadline:
    config: Config = current_app.extensions["memgw.config"]
    g.deadline = Deadline(config.timeout_seconds, started=g.arrived)
    return g.deadline  # type: ignore[no-any-return]


def _branch(asked: dict[str, Any]) -> Branch:
    """branch > memory_profile > DEFAULT_BRANCH; a wrong profile is an error even where a branch wins."""
    config: Config = current_app.extensions["memgw.config"]
    profile = Branch.of_profile(asked["memory_profile"]) if "memory_profile" in asked else None
    branch = Branch.parse(asked["branch"]) if "branch" in asked else profile
    branch = branch or Branch.parse(config.default_branch)
    g.facts["branch"] = branch.name
    return branch


def _question(asked: dict[str, Any]) -> Question:
    return Question(
        text=asked.get("query", ""),
        query_type=QueryType(asked["query_type"]),
        limit=asked["limit"],
        min_score=asked["min_score"],
        parts=tuple(Part(Kind(part["type"]), part["query"]) for part in asked.get("queries", ())),
        expand=asked["expand"],
        intent=asked.get("intent", ""),
        candidate_limit=asked.get("candidate_limit"),
        explain=asked["explain"],
    )


def _commit(branch: Branch, workspace: Workspace, fresh: Fresh, degraded: list[Degraded]) -> dict[str, Any]:
    g.facts["commit"] = fresh.stamp.commit
    return {
        "ok": True,
        "branch": branch.name,
        "resolved_workspace": workspace.name,
        "commit_hash": fresh.stamp.commit,
        "synced_at": fresh.synced_at,
        "freshness": "fresh" if fresh.asked else "unknown",
        "qmd_collection": workspace.collection,
        "degraded": [{"code": note.code, "detail": note.detail} for note in degraded],
    }


def _result(hit: Hit, bodies: dict[str, str]) -> dict[str, Any]:
    """Nothing empty is sent."""
    texts = {"title": hit.title, "snippet": hit.snippet, "context": hit.context, "body": bodies.get(hit.path)}
    more: dict[str, Any] = {**texts, "explain": hit.explain}
    return {"path": hit.path, "docid": hit.docid, "score": hit.score, "line": hit.line} | {
        key: value for key, value in more.items() if value
    }


def _debug(workspace: Workspace, fresh: Fresh, deadline: Deadline) -> dict[str, Any]:
    try:
        pending = workspace.pending_embeddings(fresh.stamp)
    except IndexDamaged:  # another request has just replaced it
        pending = fresh.stamp.documents
    return {
        "timings_ms": deadline.timings_ms,
        "lock_wait_ms": deadline.timings_ms.get("wait", 0.0),
        "index": {"documents": fresh.stamp.documents, "pending_embeddings": pending},
    }
