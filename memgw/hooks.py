"""`POST /hooks/push`: a forge tells that a branch was pushed. It is believed in nothing but which branch to ask of."""

from time import time

from flask import Response, current_app, g, jsonify, request

from memgw import bodies, forges
from memgw.branch import Branch
from memgw.config import Config
from memgw.errors import HooksOff
from memgw.forges import Delivery, Reason, Told
from memgw.gateway import Gateway
from memgw.pushes import Pushes
from memgw.replays import Replays
from memgw.schemas import HookOut, PushIn
from memgw.views import bp

FORM = "application/x-www-form-urlencoded"

PATH, ENDPOINT = "/hooks/push", f"{bp.name}.push"

PUSH, HOOK = PushIn(), HookOut()


@bp.post(PATH)
def push() -> Response:
    """Answers at once; the work is done behind it, and nothing is looked at before it is known who sent it."""
    told = _told(_delivery())
    answer = {"ok": True, "outcome": "ignored" if told.reason else "accepted"}
    if told.branch:
        answer["branch"] = told.branch.name
    if told.reason:
        answer["reason"] = told.reason
    g.facts |= {key: value for key, value in answer.items() if key != "ok"}
    response = jsonify(HOOK.dump(answer))
    response.status_code = 202
    return response


def _delivery() -> Delivery:
    config: Config = current_app.extensions["memgw.config"]
    headers = {name.lower(): value for name, value in request.headers.items()}
    g.facts["forge"] = forges.sender(headers)
    if not config.hook_secrets:
        raise HooksOff("hooks are not taken: MEMGW_HOOK_SECRET is not set")
    body = bodies.whole(request, config.hook_max_bytes)
    form = request.mimetype == FORM
    delivery = forges.authenticate(
        headers, body, form=form, secrets=config.hook_secrets, window=config.hook_window_seconds, now=time()
    )
    if not form:
        bodies.require_json(request)
    return delivery


def _told(delivery: Delivery) -> Told:
    """What becomes of it; what is taken is remembered, so that it is taken once."""
    if not forges.may_be_push(delivery):
        return Told(reason=Reason.NOT_A_PUSH)
    data = bodies.parse(delivery.payload)
    if not forges.is_push(delivery, data.get("object_kind")):
        return Told(reason=Reason.NOT_A_PUSH)
    told = forges.told(**bodies.load(data, PUSH))
    if not told.branch or told.reason:
        return told
    if not _is_served(told.branch):
        return Told(told.branch, Reason.NOT_SERVED)
    replays: Replays = current_app.extensions["memgw.replays"]
    pushes: Pushes = current_app.extensions["memgw.pushes"]
    with replays.once(delivery.mark, delivery.until):
        pushes.take(told.branch, g.arrived)
    return told


def _is_served(branch: Branch) -> bool:
    """Whether somebody is likely to ask for it: a profile stands for it, it is the default, or it was asked for."""
    config: Config = current_app.extensions["memgw.config"]
    gateway: Gateway = current_app.extensions["memgw"]
    known = branch.has_profile or branch.name == config.default_branch
    return known or gateway.workspace(branch).record.load() is not None
