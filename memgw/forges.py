"""Hooks of forges: who sends one, whether it knows the secret, and which branch it tells of. Pure.

Header names are in lower case. How each forge signs, by its own documentation or source:

- GitHub: HMAC-SHA256 of the body as it is sent, in hex (docs.github.com, "Validating webhook deliveries").
- Gitea, Forgejo: the same of the JSON, also where that is sent as a form (services/webhook/deliver.go).
- GitLab: a token in plain text; or, in the way of standardwebhooks.com, HMAC-SHA256 of an id, the time and the body.
"""

import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from memgw.branch import Branch
from memgw.errors import HookUnauthorized, InvalidBranch

SIGNING_PREFIX = "whsec_"

UNKNOWN = "unknown"

SYSTEM_HOOK = "System Hook"
"""Of a whole GitLab: what it tells stands in its body."""

FORM_BYTES = 262_144
"""A longer form is not unpacked before it is known who sent it: that takes twenty times its room."""

_SLACK_SECONDS = 10.0
"""One that is let in at the last moment is looked for a moment later."""

# the event's header; Forgejo sends Gitea's too, and both send GitHub's
_EVENTS = {
    "forgejo": "x-forgejo-event",
    "gitea": "x-gitea-event",
    "gitlab": "x-gitlab-event",
    "github": "x-github-event",
}

_PUSHES = {"forgejo": ("push",), "gitea": ("push",), "gitlab": ("Push Hook", SYSTEM_HOOK), "github": ("push",)}

# the first that is there counts
_SIGNATURES = {
    "forgejo": ("x-forgejo-signature", "x-gitea-signature", "x-hub-signature-256"),
    "gitea": ("x-gitea-signature", "x-hub-signature-256"),
    "github": ("x-hub-signature-256",),
}


class Reason(StrEnum):
    """Why a hook is left alone."""

    NOT_A_PUSH = "not_a_push"
    NOT_A_BRANCH = "not_a_branch"
    TAG = "tag"
    DELETED = "deleted"
    NOT_SERVED = "not_served"


@dataclass(frozen=True)
class Delivery:
    """A hook from somebody who knows the secret. `payload`: its JSON, not looked at yet. `mark`: equal for what is sent
    twice; worth remembering until the moment `until`."""

    forge: str
    event: str
    payload: bytes
    mark: str
    until: float


@dataclass(frozen=True)
class Told:
    """What a push event tells: of a branch, which is left alone when there is a `reason`."""

    branch: Branch | None = None
    reason: Reason | None = None


def sender(headers: Mapping[str, str]) -> str:
    """Which forge says that it sends this: github, gitlab, gitea, forgejo or UNKNOWN."""
    return next((forge for forge, header in _EVENTS.items() if header in headers), UNKNOWN)


def authenticate(
    headers: Mapping[str, str], body: bytes, *, form: bool, secrets: Sequence[str], window: float, now: float
) -> Delivery:
    """The delivery, if it was made by somebody who knows one of `secrets`. `form`: the body is a form. `window`: the
    seconds that a signed time may be off, and that others are worth remembering. `now`: of time.time().

    Raises HookUnauthorized.
    """
    forge = sender(headers)
    if forge == UNKNOWN:
        raise HookUnauthorized("it has no header of a forge that is known here, such as X-GitHub-Event")
    if forge == "gitlab":
        payload = body
        mark, until = _of_gitlab(headers, body, secrets, window, now)
    else:
        signed, payload = _of_others(headers, body, forge, form, secrets)
        mark, until = sha256(signed).hexdigest(), now + window
    return Delivery(forge, headers[_EVENTS[forge]], payload, mark, until)


def may_be_push(delivery: Delivery) -> bool:
    """Whether it is worth a look at the payload."""
    return delivery.event in _PUSHES[delivery.forge]


def is_push(delivery: Delivery, kind: object) -> bool:
    """Whether one that may be a push is one. `kind`: `object_kind` of its payload, if it has that."""
    return delivery.event != SYSTEM_HOOK or kind == "push"


def told(ref: str, after: str) -> Told:
    """What the fields of a push event say."""
    if ref.startswith("refs/tags/"):
        return Told(reason=Reason.TAG)
    if not ref.startswith("refs/heads/"):
        return Told(reason=Reason.NOT_A_BRANCH)
    try:
        branch = Branch.parse(ref.removeprefix("refs/heads/"))
    except InvalidBranch:
        return Told(reason=Reason.NOT_A_BRANCH)
    return Told(branch, Reason.DELETED if re.fullmatch("0+", after) else None)


def _of_others(
    headers: Mapping[str, str], body: bytes, forge: str, form: bool, secrets: Sequence[str]
) -> tuple[bytes, bytes]:
    """What was signed, and the JSON in it."""
    name = next((name for name in _SIGNATURES[forge] if headers.get(name)), "")
    if not name:
        raise HookUnauthorized("it is not signed with SHA-256: give the forge the secret of MEMGW_HOOK_SECRET")
    prefix = "sha256=" if name == "x-hub-signature-256" else ""
    if _any_equal(headers[name], [prefix + _hmac(secret.encode(), body).hex() for secret in secrets]):
        return body, _unpacked(body) if form else body
    if form and forge != "github" and len(body) <= FORM_BYTES:
        inner = _unpacked(body)
        if _any_equal(headers[name], [prefix + _hmac(secret.encode(), inner).hex() for secret in secrets]):
            return inner, inner
    raise HookUnauthorized("its signature is not that of its body with a secret that is known here")


def _of_gitlab(
    headers: Mapping[str, str], body: bytes, secrets: Sequence[str], window: float, now: float
) -> tuple[str, float]:
    """Mark and until. Where a signature can be checked, no token makes up for a wrong one."""
    keys = [signing_key(secret) for secret in secrets if secret.startswith(SIGNING_PREFIX)]
    if keys and "webhook-signature" in headers:
        return _of_standard(headers, body, keys, window, now)
    if not headers.get("x-gitlab-token"):
        raise HookUnauthorized("it has no token: give the forge the secret of MEMGW_HOOK_SECRET")
    if not _any_equal(headers["x-gitlab-token"], secrets):
        raise HookUnauthorized("its token is not a secret that is known here")
    return sha256(body).hexdigest(), now + window


def _of_standard(
    headers: Mapping[str, str], body: bytes, keys: Sequence[bytes], window: float, now: float
) -> tuple[str, float]:
    name, moment = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    signed = f"{name}.{moment}.".encode() + body
    expected = ["v1," + b64encode(_hmac(key, signed)).decode() for key in keys]
    if not any([_any_equal(given, expected) for given in headers["webhook-signature"].split()]):
        raise HookUnauthorized("its signature is not that of its id, time and body with a secret that is known here")
    if not re.fullmatch("[0-9]{1,12}", moment) or abs(now - int(moment)) > window:
        raise HookUnauthorized(f"the time that it was signed at is more than {window:g} seconds from this machine's")
    return sha256(b"id " + name.encode()).hexdigest(), int(moment) + window + _SLACK_SECONDS


def signing_key(secret: str) -> bytes:
    """The key in a `whsec_…`, of 24 bytes or more. Raises ValueError when it is none."""
    key = b64decode(secret.removeprefix(SIGNING_PREFIX), validate=True)
    if len(key) < 24:
        raise ValueError("too short")
    return key


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _any_equal(given: str, expected: Sequence[str]) -> bool:
    """In a time that tells nothing but the lengths."""
    return any([hmac.compare_digest(given.encode(), one.encode()) for one in expected])


def _unpacked(form: bytes) -> bytes:
    """The JSON in a forge's form, which has this field and no other; of anything else nothing."""
    name, _, value = form.partition(b"=")
    return unquote_to_bytes(value.replace(b"+", b" ")) if name == b"payload" and b"&" not in value else b""
