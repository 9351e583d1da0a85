"""The layers, read from the source: who may know what."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import memgw

FOLDER = Path(memgw.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))

HTTP = {"app", "views", "hooks", "bodies", "schemas", "inputs", "problems", "openapi"}

# package → modules that may import it
OWNERS = {
    "flask": HTTP,
    "marshmallow": HTTP,
    "werkzeug": HTTP,
    "apispec": HTTP,
    "subprocess": {"proc"},
    "filelock": {"locks"},
    "git": {"gitcmd"},
    "sqlite3": {"index"},
    "dotenv": {"config"},
    "ssl": {"lsrefs"},
    "prometheus_client": {"metrics", "books"},
    "socket": {"host", "lsrefs"},
}

ENTRANCES = {"wsgi", "gunicorn_conf", "mcp", "hostd", "background"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    """Full names of all that a module imports, wherever it does so: `os`, `memgw.proc`, `memgw.errors.ToolError`."""
    return frozenset(name for node in ast.walk(tree(module)) for name in imported(node))


def imported(node: ast.AST) -> list[str]:
    """The same, of one statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def own(module: str) -> set[str]:
    """Modules of memgw that a module imports."""
    parts = [name.split(".") for name in imports(module)]
    return {names[1] for names in parts if names[0] == "memgw" and len(names) > 1 and names[1] in MODULES}


def reach(module: str) -> set[str]:
    """Modules of memgw that a module imports, and those that these import, and so on."""
    seen: set[str] = set()
    todo = own(module)
    while todo:
        seen |= todo
        todo = set().union(*map(own, todo)) - seen
    return seen


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def handlers(module: str) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree(module)) if isinstance(node, ast.ExceptHandler))


def test_all_modules_are_looked_at() -> None:
    assert {"app", "gateway", "index", "proc", "workspace"} <= set(MODULES)
    assert "memgw.proc" in imports("gitcmd")
    assert {"proc", "errors", "deadline"} <= own("gitcmd")
    assert {"gitcmd", "proc"} <= reach("app")


@pytest.mark.parametrize("package", OWNERS)
def test_an_outside_thing_is_known_to_its_owners_only(package: str) -> None:
    knowing = {module for module in MODULES if any(name.split(".")[0] == package for name in imports(module))}
    assert knowing <= OWNERS[package]
    assert knowing


def test_git_is_spoken_to_by_few() -> None:
    assert {module for module in MODULES if "gitcmd" in own(module)} == {
        "gitconfig",
        "mirror",
        "objects",
        "remote",
        "worktree",
    }


def test_no_other_way_to_start_processes_is_used() -> None:
    ways = (
        "os.system",
        "os.popen",
        "os.fork",
        "os.posix_spawn",
        "os.exec",
        "os.spawn",
        "pty.",
        "multiprocessing.",
        "asyncio.",
    )
    for module in set(MODULES) - OWNERS["subprocess"]:
        names = {dotted(node) for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)} | imports(module)
        assert not [name for name in names if f"{name}.".startswith(ways)], module


def test_below_http_nothing_leads_up_to_it() -> None:
    for module in (
        "gateway",
        "workspace",
        "mirror",
        "remote",
        "worktree",
        "qmd",
        "index",
        "state",
        "locks",
        "proc",
        "results",
        "forges",
        "pushes",
        "replays",
    ):
        assert not reach(module) & (HTTP | {"status", "readiness", "census", "config", "wsgi"}), module


def test_the_words_know_of_nothing_below_them() -> None:
    allowed: dict[str, set[str]] = {
        "errors": set(),
        "branch": {"errors"},
        "deadline": {"errors"},
        "results": {"errors"},
        "environ": set(),
        "files": {"errors"},
        "logs": {"errors"},
        "documents": set(),
        "refs": set(),
        "lsrefs": set(),
        "proc": {"errors"},
        "locks": {"deadline", "errors", "files"},
        "metrics": {"books", "errors"},
        "forges": {"branch", "errors"},
        "books": {"files"},
    }
    assert {module: own(module) - below for module, below in allowed.items() if own(module) - below} == {}


def test_the_environment_is_read_at_the_entrances_only() -> None:
    reading = set()
    for module in MODULES:
        names = {dotted(node) for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)} | imports(module)
        if any(f"{name}.".startswith(("os.environ.", "os.environb.", "os.getenv.")) for name in names):
            reading.add(module)
    assert {"wsgi", "gunicorn_conf"} <= reading <= ENTRANCES


def test_what_names_the_folder_of_the_metrics_runs_before_anything_reads_it() -> None:
    assert "metrics" not in reach("config") | reach("files")
    at_once = {name for node in tree("gunicorn_conf").body for name in imported(node)}
    assert "memgw.config.load_or_exit" in at_once
    assert not [name for name in at_once if name.startswith(("memgw.metrics", "memgw.app", "memgw.wsgi"))]


def test_no_module_imports_itself_by_a_detour() -> None:
    assert [module for module in MODULES if module in reach(module)] == []


def test_errors_are_caught_by_name() -> None:
    for module in MODULES:
        for handler in handlers(module):
            assert handler.type is not None, f"{module}:{handler.lineno}"
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            for kind in kinds:
                assert dotted(kind) != "Exception", f"{module}:{handler.lineno}"
                if dotted(kind) == "BaseException":  # to clean up, never to go on
                    last = handler.body[-1]
                    assert isinstance(last, ast.Raise), f"{module}:{handler.lineno}"
                    assert last.exc is None, f"{module}:{handler.lineno}"


def test_nothing_suppresses_all_errors() -> None:
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
                assert not {dotted(kind) for kind in node.args} & {"Exception", "BaseException"}, module


def test_an_error_of_a_tool_is_translated_with_its_cause() -> None:
    for module in MODULES:
        for handler in handlers(module):
            for node in ast.walk(handler):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    assert node.cause is not None, f"{module}:{node.lineno}"


def test_modules_are_short_and_say_what_they_are() -> None:
    for module in MODULES:
        assert ast.get_docstring(tree(module)), module
        assert len((FOLDER / f"{module}.py").read_text("utf-8").splitlines()) <= 300, module


def test_no_module_is_a_drawer_or_hides_one_of_the_standard_library() -> None:
    assert not {"utils", "helpers", "core", "services", "manager", "common", "git", "logging", "json"} & set(MODULES)
