"""compose.yaml and compose.gpu.yaml: what Compose may be told, and what we promise of each container."""

import json
import re
import subprocess
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft7Validator

from memgw.config import ROOT, Config

SERVICES = ["gateway", "qmd", "warmup"]

OF_THE_IMAGE = {
    "MEMGW_DATA_DIR", "MEMGW_BIND", "MEMGW_MCP_HOST", "MEMGW_MCP_PORT", "MEMGW_QMD", "MEMGW_NODE",
}  # fmt: skip
"""Settings that mean something else in a container than in .env."""

REQUIRED = {"GIT_REMOTE_URL": "https://git.example.com/memory.git"}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@cache
def read(name: str) -> Any:
    """Read by the YAML library that qmd brings along."""
    parsed = "require('yaml').parse(require('fs').readFileSync(0, 'utf8'), {merge: true})"
    script = f"process.stdout.write(JSON.stringify({parsed}))"
    node = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher[0]
    done = subprocess.run(
        [node, "-e", script], cwd=ROOT / "qmd", input=(ROOT / name).read_bytes(), capture_output=True, check=True
    )
    return json.loads(done.stdout)


def service(name: str, **environ: str) -> Any:
    """A service as Compose sees it."""
    return interpolated(read("compose.yaml")["services"][name], REQUIRED | environ)


def interpolated(node: Any, environ: dict[str, str]) -> Any:
    """All values with their variables put in, as Compose does it."""

    def value(found: re.Match[str]) -> str:
        name, kind, more = found.groups()
        if environ.get(name):
            return environ[name]
        assert kind == "-", f"{name}: {more}"
        return str(more)

    if isinstance(node, dict):
        return {key: interpolated(inner, environ) for key, inner in node.items()}
    if isinstance(node, list):
        return [interpolated(inner, environ) for inner in node]
    return VARIABLE.sub(value, node) if isinstance(node, str) else node


def settings() -> set[str]:
    return {item.metadata["name"] for item in fields(Config)}


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if re.match("[A-Z]", line))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_files_are_what_the_compose_specification_allows(name: str) -> None:
    schema = Draft7Validator(json.loads((ROOT / "tests" / "compose" / "compose-spec.json").read_text("utf-8")))
    assert [error.message for error in schema.iter_errors(read(name))] == []
    spoilt = {**read(name), "services": {"qmd": {**read(name)["services"]["qmd"], "readonly": True}}}
    assert not schema.is_valid(spoilt)


def test_there_are_the_three_services() -> None:
    assert sorted(read("compose.yaml")["services"]) == SERVICES
    assert [name for name in SERVICES if "profiles" in service(name)] == ["warmup"]
    assert service("warmup")["profiles"] == ["warmup"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_do_no_more_than_it_has_to(name: str) -> None:
    told = service(name)
    assert told["read_only"] is True
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert told["user"] == "10001:10001"
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(told)
    assert [place.split(":")[0] for place in told["tmpfs"]] == ["/tmp"]
    another = service(name, MEMGW_UID="1000", MEMGW_GID="100")
    assert another["user"] == "1000:100"
    assert (another["build"]["args"]["UID"], another["build"]["args"]["GID"]) == ("1000", "100")


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_stays_and_ends_and_logs_as_it_has_to(name: str) -> None:
    told = service(name)
    assert told["restart"] == "unless-stopped"
    assert told["init"] is True
    assert told["logging"]["options"] == {"max-size": "20m", "max-file": "5"}
    gunicorn_waits = Config.load(REQUIRED).timeout_seconds + 10
    assert int(told["stop_grace_period"].removesuffix("s")) > gunicorn_waits
    assert service(name, MEMGW_STOP_SECONDS="920")["stop_grace_period"] == "920s"


def test_health_is_looked_at_by_what_is_in_the_image() -> None:
    for name in ("gateway", "qmd"):
        assert service(name)["healthcheck"]["test"] == ["CMD", "python", "bin/health.py", name]
    assert service("warmup")["healthcheck"] == {"disable": True}
    assert service("warmup")["entrypoint"] == ["/opt/memgw/bin/warmup.sh"]


def test_the_gateway_does_not_wait_for_qmd_to_be_well() -> None:
    assert service("gateway")["depends_on"] == {"qmd": {"condition": "service_started", "required": False}}
    assert service("warmup")["depends_on"] == {"gateway": {"condition": "service_healthy"}}
    assert "depends_on" not in service("qmd")


def test_ports_are_on_loopback_unless_the_operator_says_otherwise() -> None:
    assert service("gateway")["ports"] == ["127.0.0.1:8787:8787"]
    assert service("qmd")["ports"] == ["127.0.0.1:8181:8181"]
    assert "ports" not in service("warmup")
    assert service("gateway", MEMGW_BIND="10.0.0.7:80")["ports"] == ["10.0.0.7:80:8787"]
    assert service("qmd", MEMGW_MCP_HOST="10.0.0.7", MEMGW_MCP_PORT="81")["ports"] == ["10.0.0.7:81:8181"]
    for name in ("gateway", "qmd"):  # podman-compose takes the container's own value for the variable of that name
        published = set(VARIABLE.findall(str(read("compose.yaml")["services"][name]["ports"])))
        assert not {variable for variable, *_ in published} & set(service(name)["environment"])


@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_reaches_the_containers_under_its_name(name: str) -> None:
    told = service(name)["environment"]
    fixed = {"MEMGW_BIND"} if name == "warmup" else set()
    assert set(told) == settings() - OF_THE_IMAGE | fixed
    values = {variable: f"of {variable}" for variable in settings()}
    for variable in set(told) - fixed:
        assert service(name, **values)["environment"][variable] == f"of {variable}"
        assert told[variable] == REQUIRED.get(variable, "")
    Config.load(told)


def test_what_is_not_handed_on_the_images_say() -> None:
    recipe = (ROOT / "Dockerfile").read_text("utf-8")
    said = dict(re.findall(r"(MEMGW_\w+)=(\S+)", recipe))
    assert said == {"MEMGW_DATA_DIR": "/data", "MEMGW_MCP_HOST": "0.0.0.0", "MEMGW_BIND": "0.0.0.0:8787"}  # noqa: S104
    defaults = Config.load(REQUIRED)
    assert defaults.mcp_port == 8181
    assert set(said) | {"MEMGW_MCP_PORT", "MEMGW_QMD", "MEMGW_NODE"} == OF_THE_IMAGE


def test_the_example_names_all_that_compose_asks_for_with_its_default() -> None:
    text = (ROOT / "compose.yaml").read_text("utf-8") + (ROOT / "compose.gpu.yaml").read_text("utf-8")
    asked = {name: more for name, kind, more in VARIABLE.findall(text) if kind == "-"}
    own = set(asked) - settings()
    assert set(example()) == settings() | own
    assert {name: example()[name] for name in own} == {name: asked[name] for name in own}
    assert "?" in [kind for name, kind, _ in VARIABLE.findall(text) if name == "GIT_REMOTE_URL"]


def test_gateway_and_qmd_share_their_data_and_keep_it() -> None:
    shared = service("gateway")["volumes"]
    assert service("qmd")["volumes"] == shared
    places = {place: source for source, place, *_ in (volume.split(":") for volume in shared)}
    assert places == {
        "/data": "data",
        "/var/lib/qmd/cache": "qmd-cache",
        "/var/lib/qmd/config": "qmd-config",
        "/opt/memgw/data": "./data",
        "/home/memgw": "git-home",
    }
    assert [volume for volume in shared if volume.endswith(":ro")] == [
        "./data:/opt/memgw/data:ro",
        "git-home:/home/memgw:ro",
    ]
    assert set(read("compose.yaml")["volumes"]) == {"data", "qmd-cache", "qmd-config", "git-home"}
    assert "/srv/memgw:/data" in service("qmd", MEMGW_DATA_VOLUME="/srv/memgw")["volumes"]
    assert "volumes" not in service("warmup")


def test_only_the_override_asks_for_a_gpu_and_only_for_qmd() -> None:
    for name in SERVICES:
        assert "deploy" not in service(name)
        assert "GPU" not in service(name)["build"]["args"]
    over = interpolated(read("compose.gpu.yaml"), {})
    assert list(over) == ["services"]
    assert list(over["services"]) == ["qmd"]
    qmd = over["services"]["qmd"]
    assert qmd["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    ]
    assert qmd["build"]["args"] == {"GPU": "cuda"}
    assert qmd["image"] != service("qmd")["image"]
    assert qmd["environment"]["NVIDIA_VISIBLE_DEVICES"] == "all"
