"""Who sends a hook, whether the secret made it, and what it tells."""

import hmac
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from memgw import forges
from memgw.errors import HookUnauthorized
from memgw.forges import Reason, Told, authenticate, is_push, may_be_push, sender, told
from tests.deliveries import (
    FORGES,
    NEW,
    SECRET,
    SIGNING_TOKEN,
    ZERO,
    Delivery,
    forgejo,
    gitea,
    github,
    gitlab,
    push,
    signing_gitlab,
)

NOW = 1_772_000_000.0
WINDOW = 300.0
SECRETS = (SIGNING_TOKEN, "an-older-secret-of-theirs", SECRET)


def admitted(delivery: Delivery, *secrets: str, now: float = NOW, window: float = WINDOW) -> forges.Delivery:
    headers = {name.lower(): value for name, value in delivery.headers.items()}
    form = headers["content-type"] == "application/x-www-form-urlencoded"
    return authenticate(headers, delivery.body, form=form, secrets=secrets or SECRETS, window=window, now=now)


def refused(delivery: Delivery, *secrets: str, now: float = NOW) -> str:
    with pytest.raises(HookUnauthorized) as caught:
        admitted(delivery, *secrets, now=now)
    return caught.value.detail


@pytest.mark.parametrize("forge", FORGES)
def test_what_a_forge_sends_is_known_to_be_its_own(forge: str) -> None:
    delivery = FORGES[forge]()
    found = admitted(delivery)
    assert (found.forge, found.payload, found.until) == (forge, delivery.body, NOW + WINDOW)
    assert may_be_push(found)
    assert is_push(found, None)


@pytest.mark.parametrize("make", [github, gitea, forgejo])
def test_a_form_is_unpacked_whether_the_form_or_the_json_in_it_is_signed(make: Callable[..., Delivery]) -> None:
    plain = make()
    assert admitted(make(form=True)).payload == plain.body
    assert b"\xe8\xae\xb0\xe5\xbf\x86" in plain.body


def test_githubs_own_example_of_a_signature() -> None:
    """docs.github.com, "Testing the webhook payload validation"."""
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    delivery = Delivery(
        {"X-GitHub-Event": "ping", "X-Hub-Signature-256": signature, "Content-Type": "application/json"},
        b"Hello, World!",
    )
    assert admitted(delivery, "It's a Secret to Everybody").payload == b"Hello, World!"


def test_the_example_of_standard_webhooks() -> None:
    """github.com/standard-webhooks/standard-webhooks, the test of its libraries."""
    headers = {
        "Content-Type": "application/json",
        "X-Gitlab-Event": "Push Hook",
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    delivery = Delivery(headers, b'{"test": 2432232314}')
    found = admitted(delivery, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", now=1614265330)
    assert found.until >= 1614265330 + WINDOW


@pytest.mark.parametrize("make", [*FORGES.values(), signing_gitlab])
def test_what_another_secret_made_is_refused(make: Callable[..., Delivery]) -> None:
    detail = refused(make(), "another-secret-that-is-no-good", "whsec_" + "QUJD" * 11)
    assert "that is known here" in detail


@pytest.mark.parametrize("make", [github, gitea, forgejo, signing_gitlab])
def test_a_body_that_was_tampered_with_is_refused(make: Callable[..., Delivery]) -> None:
    delivery = make(**({"at": NOW} if make is signing_gitlab else {}))
    assert admitted(delivery)
    for body in (delivery.body.replace(b"main", b"evil"), delivery.body + b" ", delivery.body[:-1], b""):
        assert refused(delivery.saying(body))


@pytest.mark.parametrize("make", [github, gitea, forgejo])
@pytest.mark.parametrize("body", [b"payload=%7B%7D", b"payload={}&payload={}", b"x={}", b"=", b"&", b"payload"])
def test_a_form_that_was_tampered_with_is_refused(make: Callable[..., Delivery], body: bytes) -> None:
    assert refused(make(form=True).saying(body))


def test_a_form_with_more_than_the_payload_is_refused_where_only_the_payload_is_signed() -> None:
    delivery = gitea(form=True)
    assert refused(delivery.saying(delivery.body + b"&x=1"))
    assert refused(delivery.saying(b"x=1&" + delivery.body))


def test_a_long_form_is_not_unpacked_before_it_is_known_who_sent_it() -> None:
    long = push(commits=1000)
    assert refused(gitea(long, form=True))
    assert admitted(github(long, form=True)).payload
    assert admitted(gitea(long)).payload


@pytest.mark.parametrize(
    "delivery",
    [
        github().but(X_Hub_Signature_256=None),
        github().but(X_Hub_Signature_256=""),
        gitea().but(X_Gitea_Signature="", X_Hub_Signature_256=""),
        forgejo().but(X_Forgejo_Signature=None, X_Gitea_Signature=None, X_Hub_Signature_256=None),
    ],
)
def test_sha1_alone_and_no_signature_at_all_are_refused(delivery: Delivery) -> None:
    assert "X-Hub-Signature" in delivery.headers
    assert "not signed with SHA-256" in refused(delivery)


def test_githubs_hash_without_its_name_or_with_another_is_refused() -> None:
    good = github().headers["X-Hub-Signature-256"]
    for wrong in (
        good.removeprefix("sha256="),
        good.replace("256", "1"),
        good[:-1],
        good + "0",
        good.upper(),
        "sha256=",
        "\xff",
    ):
        assert refused(github().but(X_Hub_Signature_256=wrong))


def test_of_several_signatures_the_forges_own_counts_and_no_other_makes_up_for_it() -> None:
    body = push()
    assert refused(forgejo(body).but(X_Forgejo_Signature="0" * 64))
    assert refused(gitea(body).but(X_Gitea_Signature="0" * 64))
    assert admitted(gitea(body).but(X_Gitea_Signature=None)).forge == "gitea"
    assert admitted(forgejo(body).but(X_Forgejo_Signature=None)).forge == "forgejo"


def test_a_gitlab_without_token_and_signature_is_refused() -> None:
    assert "it has no token" in refused(gitlab(token=None))
    assert refused(gitlab(token=SECRET + "x"))
    assert refused(gitlab(token=SECRET[:-1]))


def test_a_signature_that_can_be_checked_is_not_passed_over_for_a_token() -> None:
    both = gitlab(signing=SIGNING_TOKEN, at=NOW)
    assert admitted(both).mark != admitted(both, SECRET).mark
    assert refused(both.but(webhook_signature="v1,AAAA"))
    assert refused(both.but(webhook_signature=""))
    assert admitted(both, SECRET), "no secret to check a signature with"
    assert refused(both.but(X_Gitlab_Token=None), SECRET)


def test_one_of_several_signatures_of_a_gitlab_is_enough() -> None:
    delivery = signing_gitlab(at=NOW)
    good = delivery.headers["webhook-signature"]
    assert admitted(delivery.but(webhook_signature=f"v1a,AAAA v1,BBBB {good}"))
    assert refused(delivery.but(webhook_signature=good.replace("v1,", "v2,")))


@pytest.mark.parametrize(
    ("off", "fits"), [(0, True), (-300, True), (300, True), (-302, False), (302, False), (-86_400, False)]
)
def test_a_signed_time_has_to_be_of_now(off: int, fits: bool) -> None:
    delivery = signing_gitlab(at=NOW + off)
    if fits:
        assert admitted(delivery).until > NOW + off + WINDOW
    else:
        assert "more than 300 seconds" in refused(delivery)


@pytest.mark.parametrize("moment", ["", "x", "1.0", "-1", "1e9", "９", "9" * 13, " 1772000000"])
def test_a_time_that_is_none_is_refused_even_when_it_is_signed(moment: str) -> None:
    body = gitlab().body
    signature = hmac.digest(forges.signing_key(SIGNING_TOKEN), f"id.{moment}.".encode() + body, "sha256")
    headers = {
        "webhook_id": "id",
        "webhook_timestamp": moment,
        "webhook_signature": "v1," + b64encode(signature).decode(),
    }
    assert refused(gitlab(token=None).but(**headers))


def test_a_repeat_has_the_same_mark_and_nothing_else_has() -> None:
    delivery = github()
    repeats = [delivery, delivery.but(X_GitHub_Delivery="another"), delivery.but(X_GitHub_Event="create")]
    assert len({admitted(one).mark for one in repeats}) == 1
    as_gitea = delivery.but(X_Gitea_Event="push", X_Gitea_Signature=delivery.headers["X-Hub-Signature-256"][7:])
    assert admitted(as_gitea).mark == admitted(delivery).mark
    assert admitted(gitea(form=True)).mark == admitted(gitea()).mark
    assert admitted(github(push(after="4" * 40))).mark != admitted(delivery).mark


def test_of_a_signed_time_the_signed_id_is_the_mark() -> None:
    first, again = (signing_gitlab(at=NOW + off, name="one") for off in (0, 5))
    assert admitted(first).mark == admitted(again).mark
    assert admitted(signing_gitlab(at=NOW, name="two")).mark != admitted(first).mark


@pytest.mark.parametrize(
    ("headers", "forge"),
    [
        ({}, "unknown"),
        ({"x-hub-signature-256": "x"}, "unknown"),
        ({"x-gitlab-token": "x"}, "unknown"),
        ({"x-github-event": ""}, "github"),
        ({"x-github-event": "push", "x-gogs-event": "push"}, "github"),
    ],
)
def test_who_sends_is_told_by_the_event(headers: dict[str, str], forge: str) -> None:
    assert sender(headers) == forge
    with pytest.raises(HookUnauthorized):
        authenticate(headers, b"{}", form=False, secrets=SECRETS, window=WINDOW, now=NOW)


@pytest.mark.parametrize(
    "delivery",
    [
        github(event="ping"), github(event="create"), github(event="delete"), github(event=""), github(event="Push"),
        gitea(event="create"), forgejo(event="repository"), gitlab(event="Tag Push Hook"), gitlab(event="Note Hook"),
        gitlab(event="push"), github(event="System Hook"),
    ],
)  # fmt: skip
def test_other_events_are_no_push(delivery: Delivery) -> None:
    assert not may_be_push(admitted(delivery))


def test_a_system_hook_of_a_gitlab_says_in_its_body_what_it_is() -> None:
    delivery = admitted(gitlab(event="System Hook"))
    assert may_be_push(delivery)
    assert is_push(delivery, "push")
    for kind in (None, "tag_push", 5, ["push"]):
        assert not is_push(delivery, kind)


@pytest.mark.parametrize(
    ("ref", "after", "branch", "reason"),
    [
        ("refs/heads/main", NEW, "main", None),
        ("refs/heads/memory/2026-03", NEW, "memory/2026-03", None),
        ("refs/heads/task/记忆", NEW, "task/记忆", None),
        ("refs/heads/main", ZERO, "main", Reason.DELETED),
        ("refs/heads/main", "0" * 64, "main", Reason.DELETED),
        ("refs/heads/main", "", "main", None),
        ("refs/tags/v1", NEW, None, Reason.TAG),
        ("refs/tags/v1", ZERO, None, Reason.TAG),
        ("refs/notes/commits", NEW, None, Reason.NOT_A_BRANCH),
        ("main", NEW, None, Reason.NOT_A_BRANCH),
        ("", NEW, None, Reason.NOT_A_BRANCH),
        ("refs/heads/", NEW, None, Reason.NOT_A_BRANCH),
        ("refs/heads/--upload-pack=touch x", NEW, None, Reason.NOT_A_BRANCH),
        ("refs/heads/a..b", NEW, None, Reason.NOT_A_BRANCH),
        ("refs/heads/\ud800", NEW, None, Reason.NOT_A_BRANCH),
        ("refs/heads/" + "a" * 300, NEW, None, Reason.NOT_A_BRANCH),
    ],
)
def test_what_a_push_tells(ref: str, after: str, branch: str | None, reason: Any) -> None:
    found = told(ref, after)
    assert (found.branch.name if found.branch else None, found.reason) == (branch, reason)
    assert isinstance(found, Told)
