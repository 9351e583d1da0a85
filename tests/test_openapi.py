"""The OpenAPI document: whole in itself, and true to the tables and schemas that the code uses."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from marshmallow import Schema

from memgw import __version__, schemas
from memgw.app import create_app
from memgw.config import Config
from memgw.openapi import document
from memgw.problems import CODES, TABLE
from memgw.views import bp

ANSWERS = {
    ("/query", "post"): (schemas.AnswerOut, {200, 400, 404, 413, 415, 422, 500, 502, 503, 504, 507}),
    ("/sync", "post"): (schemas.SyncOut, {200, 400, 404, 413, 415, 422, 500, 502, 503, 504, 507}),
    ("/hooks/push", "post"): (schemas.HookOut, {202, 400, 401, 404, 409, 413, 415, 422, 500, 503, 507}),
    ("/status", "get"): (schemas.StatusOut, {200, 500}),
    ("/health", "get"): (schemas.HealthOut, {200}),
    ("/ready", "get"): (schemas.ReadyOut, {200, 500, 503}),
    ("/metrics", "get"): (None, {200}),
    ("/openapi.json", "get"): (None, {200}),
}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolve(reference: str) -> dict[str, Any]:
    assert reference.startswith("#/")
    node: Any = document()
    for name in reference.removeprefix("#/").split("/"):
        node = node[name.replace("~1", "/").replace("~0", "~")]
    assert isinstance(node, dict)
    return node


def schema_of(content: dict[str, Any], media_type: str) -> dict[str, Any]:
    assert list(content) == [media_type]
    return resolve(content[media_type]["schema"]["$ref"])


def fields_of(schema: type[Schema]) -> set[str]:
    return set(schema().fields)


def test_it_says_what_it_is_and_is_plain_json() -> None:
    assert re.fullmatch(r"3\.1\.\d+", document()["openapi"])
    assert document()["info"]["title"] == "memgw"
    assert document()["info"]["version"] == __version__
    assert json.loads(json.dumps(document(), allow_nan=False)) == document()


def test_every_endpoint_of_the_application_is_in_it(environ: dict[str, str]) -> None:
    app = create_app(Config.load(environ), environ)
    served = {
        (rule.rule, method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert {(path, method) for path, method, _ in operations()} == served == set(ANSWERS)
    assert {rule.endpoint.partition(".")[0] for rule in app.url_map.iter_rules()} == {bp.name}


def test_every_reference_leads_somewhere() -> None:
    found = set(references(document()))
    assert len(found) >= 7
    assert all(map(resolve, found))
    named = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert named == found


def test_every_operation_has_a_name_of_its_own_and_says_what_it_does() -> None:
    names = [operation.get("operationId") for path, _, operation in operations() if path != "/openapi.json"]
    assert None not in names
    assert len(set(names)) == len(names)
    assert all(operation["summary"] for _, _, operation in operations())


@pytest.mark.parametrize(("path", "method"), ANSWERS)
def test_an_operation_lists_the_statuses_it_can_end_with(path: str, method: str) -> None:
    assert {int(status) for status in document()["paths"][path][method]["responses"]} == ANSWERS[path, method][1]


def test_the_statuses_and_codes_of_failures_are_those_of_the_table() -> None:
    told: dict[int, list[str]] = {}
    for path, _, operation in operations():
        for status, answer in operation["responses"].items():
            assert answer["description"]
            if (path, status) == ("/ready", "503"):  # no failure, but the answer
                assert schema_of(answer["content"], "application/json") == resolve("#/components/schemas/ReadyOut")
            elif not status.startswith("2"):
                assert set(schema_of(answer["content"], "application/problem+json")["properties"]) == fields_of(
                    schemas.ProblemOut
                )
                told[int(status)] = answer["description"].split(" or ")
    assert told == {status: codes for status, codes in CODES.items() if status != 405}
    assert set(TABLE.values()) <= {(status, code) for status, codes in told.items() for code in codes}


@pytest.mark.parametrize(("path", "method"), [key for key, (schema, _) in ANSWERS.items() if schema])
def test_the_answer_is_described_by_the_schema_that_makes_it(path: str, method: str) -> None:
    schema = ANSWERS[path, method][0]
    assert schema
    answers = document()["paths"][path][method]["responses"]
    [done] = [answer for status, answer in answers.items() if status.startswith("2")]
    described = schema_of(done["content"], "application/json")
    assert set(described["properties"]) == fields_of(schema)
    assert set(described["required"]) == {name for name, field in schema().fields.items() if field.required}


@pytest.mark.parametrize(("path", "schema"), [("/query", schemas.QueryIn), ("/sync", schemas.SelectionIn)])
def test_the_question_is_described_by_the_schema_that_reads_it(path: str, schema: type[Schema]) -> None:
    body = document()["paths"][path]["post"]["requestBody"]
    assert body["required"] is True
    described = schema_of(body["content"], "application/json")
    assert set(described["properties"]) == fields_of(schema)
    assert described["additionalProperties"] is False
    assert all(field["description"] for field in described["properties"].values())


def test_of_a_push_only_what_is_read_is_described() -> None:
    body = document()["paths"]["/hooks/push"]["post"]["requestBody"]
    described = schema_of(body["content"], "application/json")
    assert set(described["required"]) == fields_of(schemas.PushIn) == {"ref", "after"}
    assert described.get("additionalProperties") is not False
    told = resolve("#/components/schemas/HookOut")["properties"]
    assert told["reason"]["enum"] == ["not_a_push", "not_a_branch", "tag", "deleted", "not_served"]


def test_the_limits_of_a_question_are_told() -> None:
    fields = resolve("#/components/schemas/QueryIn")["properties"]
    assert "required" not in resolve("#/components/schemas/QueryIn")  # query or queries
    assert fields["query"]["maxLength"] == schemas.MAX_QUERY == 1024
    assert (fields["limit"]["minimum"], fields["limit"]["maximum"], fields["limit"]["default"]) == (1, 50, 10)
    assert (fields["min_score"]["minimum"], fields["min_score"]["maximum"]) == (0, 1)
    assert fields["query_type"]["enum"] == ["search", "vsearch", "query", "deep_search"]
    assert [fields[name]["default"] for name in ("require_latest", "full", "debug")] == [True, False, False]
    assert "default" not in fields["query"]


def test_what_can_be_null_says_so() -> None:
    workspace = resolve("#/components/schemas/WorkspaceOut")["properties"]
    assert workspace["commit"]["type"] == ["string", "null"]
    assert workspace["bytes"]["type"] == "integer"
    assert {"type": "null"} in workspace["last_error"]["anyOf"]
    assert resolve("#/components/schemas/SyncOut")["properties"]["previous_commit"]["type"] == ["string", "null"]
