"""The dashboard and the alert rules in docs/: whole, and only of metrics that are exported."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memgw.config import ROOT, Config
from tests.test_metrics import exported

FUNCTIONS = {
    "sum", "min", "max", "rate", "increase", "deriv", "histogram_quantile", "min_over_time", "and", "or", "unless",
}  # fmt: skip

TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_:][\w:]*)|(?P<number>[\d.]+)|(?P<matchers>\{[^{}]*\})|(?P<range>\[[^\[\]]*\])"""
    r"""|(?P<other>[()+\-*/,]|[<>=!]=?))"""
)
LABELS = {"endpoint", "status", "step", "result", "outcome", "forge", "operation", "le", "instance", "job"}


def dashboard() -> dict[str, Any]:
    found = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def alerts() -> list[dict[str, Any]]:
    """Read by the YAML library that qmd brings along."""
    script = "process.stdout.write(JSON.stringify(require('yaml').parse(require('fs').readFileSync(0, 'utf8'))))"
    text = (ROOT / "docs" / "alerts.yaml").read_bytes()
    node = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher[0]
    done = subprocess.run([node, "-e", script], cwd=ROOT / "qmd", input=text, capture_output=True, check=True)
    [group] = json.loads(done.stdout)["groups"]
    rules = group["rules"]
    assert isinstance(rules, list)
    return rules


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for rule in alerts():
        yield rule["expr"]


def names(expression: str) -> set[str]:
    """The metrics in a PromQL expression, whose words and brackets have to be ones that are known."""
    found, at, depth = set(), 0, 0
    expression = expression.strip()
    while at < len(expression):
        token = TOKEN.match(expression, at)
        assert token, expression[at:]
        at = token.end()
        name, said = token["name"], token[0].strip()
        depth += (said == "(") - (said == ")")
        assert depth >= 0, expression
        if name == "by":
            grouped = re.compile(r"\s*\(([\w, ]+)\)").match(expression, at)
            assert grouped, expression
            assert set(grouped[1].replace(" ", "").split(",")) <= LABELS, expression
            at = grouped.end()
        elif name and name not in FUNCTIONS:
            found.add(name)
        elif token["matchers"]:
            matchers = re.findall(r'(\w+)(?:=~|!~|!=|=)"[^"]*"', said)
            assert {label for label in matchers} <= LABELS, expression
            assert len(matchers) == said.count('"') / 2
        elif token["range"]:
            assert re.fullmatch(r"\[(\d+[smh]|\$__rate_interval)\]", said), expression
    assert depth == 0, expression
    return found


def test_expressions_are_of_metrics_that_are_exported() -> None:
    used = [names(expression) for expression in expressions()]
    assert len(used) >= 20
    assert all(used)
    assert set().union(*used) <= exported()


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    used: set[str] = set().union(*map(names, expressions()))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(memgw_requests_total",
        'memgw_requests_total{path="/x"}',
        "rate(memgw_requests_total[soon])",
        "a ? b",
    ],
)
def test_a_wrong_expression_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        names(wrong)


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["title"] == board["uid"] == "memgw"
    assert board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_there_are_four_alerts_that_say_what_is_wrong_and_where_to_look() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) == 4
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", rule["for"])
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_readme_names_every_metric() -> None:
    text = Path(ROOT / "README.md").read_text("utf-8")
    told = set(re.findall(r"`(memgw_\w+)`", text))
    assert told == {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
