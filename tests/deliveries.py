"""What forges send to a webhook: their documented headers and fields, signed as each of them signs."""

import hmac
import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha1
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

SECRET = "a-secret-of-the-tests"  # noqa: S105  of nobody else
SIGNING_TOKEN = "whsec_" + b64encode(b"32 bytes that only the forge has").decode()

ZERO = "0" * 40
OLD, NEW = "1" * 40, "2" * 40


@dataclass(frozen=True)
class Delivery:
    """One POST."""

    headers: dict[str, str]
    body: bytes

    def but(self, **headers: str | None) -> "Delivery":
        """With other headers (`_` stands for `-`); None leaves one out."""
        named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
        kept = {name: value for name, value in self.headers.items() if name.lower() not in named}
        return replace(self, headers=kept | {name: value for name, value in named.items() if value is not None})

    def saying(self, body: bytes) -> "Delivery":
        """Tampered with."""
        return replace(self, body=body)


def commit(name: str = NEW) -> dict[str, Any]:
    """As GitHub tells of one."""
    person = {"name": "Ada", "email": "ada@example.com", "username": "ada"}
    return {
        "id": name,
        "tree_id": "3" * 40,
        "distinct": True,
        "message": "Déploiement: 记忆 \U0001f680\n\nA longer story of what was changed and why it had to be.",
        "timestamp": "2026-03-01T12:00:00+01:00",
        "url": f"https://github.example/team/memory/commit/{name}",
        "author": person,
        "committer": person,
        "added": ["runbooks/deploy.md"],
        "removed": [],
        "modified": ["notes/today.md", "notes/yesterday.md"],
    }


def push(ref: str = "refs/heads/main", before: str = OLD, after: str = NEW, commits: int = 1) -> dict[str, Any]:
    """What GitHub's, Gitea's and Forgejo's payloads have in common."""
    return {
        "ref": ref,
        "before": before,
        "after": after,
        "repository": {
            "id": 186853002,
            "name": "memory",
            "full_name": "team/memory",
            "private": True,
            "owner": {"login": "team", "id": 21031067},
            "html_url": "https://github.example/team/memory",
            "clone_url": "https://github.example/team/memory.git",
            "ssh_url": "git@github.example:team/memory.git",
            "default_branch": "main",
        },
        "pusher": {"name": "ada", "email": "ada@example.com"},
        "sender": {"login": "ada", "id": 7, "type": "User"},
        "commits": [commit() for _ in range(commits)],
        "head_commit": None if after == ZERO else commit(after),
    }


def github(
    payload: dict[str, Any] | None = None, *, event: str = "push", form: bool = False, secret: str = SECRET
) -> Delivery:
    """Both signatures are over the body as it is sent."""
    payload = push() if payload is None else payload
    zeros = {"created": payload.get("before") == ZERO, "deleted": payload.get("after") == ZERO, "forced": False}
    body = _json(payload | zeros | {"base_ref": None, "compare": "https://github.example/compare"})
    if form:
        body = urlencode({"payload": body.decode()}).encode()
    return Delivery(
        {
            "Content-Type": "application/x-www-form-urlencoded" if form else "application/json",
            "User-Agent": "GitHub-Hookshot/044aadd",
            "X-GitHub-Delivery": str(uuid4()),
            "X-GitHub-Event": event,
            "X-GitHub-Hook-ID": "292430182",
            "X-Hub-Signature": "sha1=" + hmac.new(secret.encode(), body, sha1).hexdigest(),
            "X-Hub-Signature-256": "sha256=" + hmac.digest(secret.encode(), body, "sha256").hex(),
        },
        body,
    )


def gitea(
    payload: dict[str, Any] | None = None,
    *,
    event: str = "push",
    form: bool = False,
    secret: str = SECRET,
    forgejo: bool = False,
) -> Delivery:
    """The signature is over the JSON, in a form, too."""
    payload = push() if payload is None else payload
    body = _json(payload | {"compare_url": "https://gitea.example/compare", "total_commits": 1})
    signature, name = hmac.digest(secret.encode(), body, "sha256").hex(), str(uuid4())
    headers = {"X-Hub-Signature-256": f"sha256={signature}", "X-Hub-Signature": "sha1=" + "0" * 40}
    for forge in ("GitHub", "Gogs", "Gitea", *(["Forgejo"] if forgejo else [])):
        headers |= {f"X-{forge}-Delivery": name, f"X-{forge}-Event": event, f"X-{forge}-Event-Type": event}
        if forge != "GitHub":
            headers[f"X-{forge}-Signature"] = signature
    if form:
        body = urlencode({"payload": body.decode()}).encode()
    headers["Content-Type"] = "application/x-www-form-urlencoded" if form else "application/json"
    return Delivery(headers, body)


def forgejo(
    payload: dict[str, Any] | None = None, *, event: str = "push", form: bool = False, secret: str = SECRET
) -> Delivery:
    return gitea(payload, event=event, form=form, secret=secret, forgejo=True)


def gitlab(
    payload: dict[str, Any] | None = None,
    *,
    event: str = "Push Hook",
    token: str | None = SECRET,
    signing: str | None = None,
    at: float | None = None,
    name: str | None = None,
) -> Delivery:
    """With a token, or a signature of id, time and body, or both."""
    kind = {"Tag Push Hook": "tag_push"}.get(event, "push")
    common = push() if payload is None else payload
    name = name or str(uuid4())
    body = _json(
        {
            "object_kind": kind,
            "event_name": kind,
            "before": common.get("before"),
            "after": common.get("after"),
            "ref": common.get("ref"),
            "ref_protected": True,
            "checkout_sha": None if common.get("after") == ZERO else common.get("after"),
            "user_id": 4,
            "user_name": "Ada",
            "user_username": "ada",
            "project_id": 15,
            "project": {
                "id": 15,
                "name": "Memory",
                "path_with_namespace": "team/memory",
                "git_ssh_url": "git@gitlab.example:team/memory.git",
                "git_http_url": "https://gitlab.example/team/memory.git",
                "default_branch": "main",
            },
            "commits": common.get("commits"),
            "total_commits_count": 1,
            "push_options": {},
            "repository": {"name": "Memory", "url": "git@gitlab.example:team/memory.git"},
        }
    )
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "GitLab/18.9.0",
        "X-Gitlab-Event": event,
        "X-Gitlab-Event-UUID": str(uuid4()),
        "X-Gitlab-Webhook-UUID": str(uuid4()),
        "X-Gitlab-Instance": "https://gitlab.example",
        "Idempotency-Key": name,
    }
    if token:
        headers["X-Gitlab-Token"] = token
    if signing:
        moment = str(int(time.time() if at is None else at))
        key = b64decode(signing.removeprefix("whsec_"))
        signature = hmac.digest(key, f"{name}.{moment}.".encode() + body, "sha256")
        headers |= {"webhook-id": name, "webhook-timestamp": moment}
        headers["webhook-signature"] = "v1," + b64encode(signature).decode()
    return Delivery(headers, body)


def signing_gitlab(payload: dict[str, Any] | None = None, **more: Any) -> Delivery:
    """With its newer signing token alone."""
    return gitlab(payload, token=None, signing=SIGNING_TOKEN, **more)


FORGES: dict[str, Callable[..., Delivery]] = {"github": github, "gitea": gitea, "forgejo": forgejo, "gitlab": gitlab}


def _json(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
