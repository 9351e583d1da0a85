"""The endpoints. A view reads, asks the gateway, and writes down what it was told."""

from typing import Any

from flask import Blueprint, Response, current_app, g, jsonify, request

from memgw.branch import Branch
from memgw.config import Config
from memgw.deadline import Deadline
from memgw.engine import QueryType, Question
from memgw.errors import IndexDamaged
from memgw.gateway import Degraded, Fresh, Gateway
from memgw.openapi import document
from memgw.results import Hit
from memgw.schemas import AnswerOut, HealthOut, QueryIn, SelectionIn, StatusOut, SyncOut, read
from memgw.status import Status
from memgw.workspace import Workspace

bp = Blueprint("memgw", __name__)

QUERY, SELECTION = QueryIn(), SelectionIn()
ANSWER, SYNC, STATUS, HEALTH = AnswerOut(), SyncOut(), StatusOut(), HealthOut()
"""Made once: that costs more than using them."""


@bp.get("/health")
def health() -> Response:
    """Touches no lock, no Git and no qmd."""
    return jsonify(HEALTH.dump({"ok": True}))


@bp.post("/query")
def query() -> Response:
    asked = read(request, QUERY)
    branch = _branch(asked)
    deadline = _deadline()
    question = Question(asked["query"], QueryType(asked["query_type"]), asked["limit"], asked["min_score"])
    answer = _gateway().query(branch, question, deadline, latest=asked["require_latest"], bodies=asked["full"])
    body = _commit(branch, answer.workspace, answer.fresh, answer.degraded) | {
        "query_type": asked["query_type"],
        "results": [_result(hit, answer.bodies) for hit in answer.hits],
    }
    if asked["debug"]:
        body["debug"] = _debug(answer.workspace, answer.fresh, deadline) | {"qmd_command": answer.command}
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
    return {"path": hit.path, "docid": hit.docid, "score": hit.score, "line": hit.line} | {
        key: text for key, text in texts.items() if text
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
