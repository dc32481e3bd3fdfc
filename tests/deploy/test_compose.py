"""The Compose stack, checked as far as it can be without containers.

Valid by the Compose specification, everything it mounts is there and accepted by Prometheus's and
Alertmanager's own checkers, every address is loopback and meets its other end, and our commands
and settings are ones that the product knows. Not shown here: that the containers start.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import tomllib
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from servoscope.cli.main import build_parser
from servoscope.cli.settings import parse_settings

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
#: Of the host, not of the repository: sockets of plug-ins.
HOST_PATHS = {"/run/servoscope", "/run/user"}
LOOPBACK = "127.0.0.1"

Node = dict[str, Any]


def read_yaml(path: Path) -> Node:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def with_defaults(text: str) -> str:
    """``${NAME:-default}`` → default, ``${NAME:?message}`` → NAME: what Compose would put in."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{(\w+):\?[^}]*\}", r"\1", text)


@pytest.fixture(scope="module")
def compose() -> Node:
    loaded: Node = yaml.safe_load(with_defaults((ROOT / "docker-compose.yml").read_text("utf-8")))
    return loaded


@pytest.fixture(scope="module")
def validator() -> Validator:
    """The Compose specification's own schema, as check-jsonschema ships it."""
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text("utf-8"))
    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def services(compose: Node) -> dict[str, Node]:
    found: dict[str, Node] = compose["services"]
    return found


def binds(service: Node) -> list[Node]:
    return [volume for volume in service.get("volumes", []) if volume["type"] == "bind"]


def local_path(compose: Node, service: str, inside: str) -> Path:
    """Where the file lies here that a container sees as ``inside``."""
    for bind in binds(services(compose)[service]):
        target = PurePosixPath(bind["target"])
        if PurePosixPath(inside).is_relative_to(target):
            return ROOT.joinpath(bind["source"], PurePosixPath(inside).relative_to(target))
    raise AssertionError(f"{service}: nothing is mounted at {inside}")


def flag(service: Node, name: str) -> str:
    (value,) = [
        word.removeprefix(f"{name}=") for word in service["command"] if word.startswith(f"{name}=")
    ]
    return str(value)


def listeners(compose: Node) -> dict[str, str]:
    """Service → the address it listens on."""
    found = services(compose)
    grafana = found["grafana"]["environment"]
    return {
        "sidecar": f"{LOOPBACK}:{flag(found['sidecar'], '--port')}",
        "collector": f"{flag(found['collector'], '--listen')}:{flag(found['collector'], '--port')}",
        "prometheus": flag(found["prometheus"], "--web.listen-address"),
        "alertmanager": flag(found["alertmanager"], "--web.listen-address"),
        "grafana": f"{grafana['GF_SERVER_HTTP_ADDR']}:{grafana['GF_SERVER_HTTP_PORT']}",
    }


def run_checker(*command: str) -> str:
    program = shutil.which(command[0])
    assert program, f"{command[0]} is missing: apt-get install prometheus prometheus-alertmanager"
    run = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


# ---- the specification ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["docker-compose.yml", "deploy/compose/gpu.yml"])
def test_valid_by_the_compose_specification(validator: Validator, name: str) -> None:
    for text in ((ROOT / name).read_text("utf-8"), with_defaults((ROOT / name).read_text("utf-8"))):
        assert [e.message for e in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("services", "grafana", "imagee"), "x", "imagee"),
        (("services", "grafana", "cap_drop"), "ALL", "ALL"),
        (("services", "sidecar", "healthcheck", "retries"), [], "is not of type"),
        (("volumes",), ["grafana-data"], "grafana-data"),
    ],
)
def test_the_schema_refuses_a_wrong_file(
    compose: Node,
    validator: Validator,
    path: tuple[str, ...],
    value: Any,
    named: str,
) -> None:
    wrong = copy.deepcopy(compose)
    node = wrong
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    messages = [error.message for error in validator.iter_errors(wrong)]
    assert any(re.search(named, message) for message in messages), messages


def test_override_files_change_only_services_that_exist(compose: Node) -> None:
    assert set(read_yaml(COMPOSE / "gpu.yml")["services"]) <= set(services(compose))


# ---- mounts --------------------------------------------------------------------------------------
def test_every_mount_exists_and_is_read_only(compose: Node) -> None:
    for name, service in services(compose).items():
        for bind in binds(service):
            if bind["source"] in HOST_PATHS:
                assert bind["bind"]["create_host_path"] is True
                continue
            assert (ROOT / bind["source"]).exists(), f"{name}: {bind['source']}"
            assert bind["read_only"] is True, f"{name}: {bind['source']}"


def test_every_named_volume_is_declared_and_used(compose: Node) -> None:
    used = [
        volume["source"]
        for service in services(compose).values()
        for volume in service.get("volumes", [])
        if volume["type"] == "volume"
    ]
    assert sorted(used) == sorted(compose["volumes"])


def test_secrets_cannot_be_committed_by_accident() -> None:
    ignored = (COMPOSE / "secrets" / ".gitignore").read_text("utf-8").split()
    assert ignored == ["*", "!.gitignore", "!README.md"]


# ---- addresses -----------------------------------------------------------------------------------
def test_everything_listens_on_loopback_and_no_port_twice(compose: Node) -> None:
    addresses = listeners(compose)
    assert set(addresses) == set(services(compose))
    for address in addresses.values():
        assert re.fullmatch(rf"{re.escape(LOOPBACK)}:\d{{4,5}}", address)
    assert len(set(addresses.values())) == len(addresses)
    assert flag(services(compose)["alertmanager"], "--cluster.listen-address") == ""


def test_on_the_host_network_no_port_is_published(compose: Node) -> None:
    for name, service in services(compose).items():
        assert service["network_mode"] == "host", name
        assert "ports" not in service, name
        assert "networks" not in service, name


def test_a_health_check_asks_the_address_its_service_listens_on(compose: Node) -> None:
    for name, address in listeners(compose).items():
        test = " ".join(services(compose)[name]["healthcheck"]["test"])
        assert f"http://{address}/" in test, name


def test_prometheus_scrapes_and_alerts_to_what_is_started(compose: Node) -> None:
    config = read_yaml(COMPOSE / "prometheus.yml")
    addresses = listeners(compose)
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]
    }
    assert jobs == {
        "servoscope-sidecar": [addresses["sidecar"]],
        "servoscope-collector": [addresses["collector"]],
        "prometheus": [addresses["prometheus"]],
        "alertmanager": [addresses["alertmanager"]],
    }
    (alertmanagers,) = config["alerting"]["alertmanagers"]
    assert alertmanagers["static_configs"][0]["targets"] == [addresses["alertmanager"]]


def test_the_sidecar_pushes_to_the_collector(compose: Node) -> None:
    collector = flag(services(compose)["sidecar"], "--collector")
    assert collector == f"http://{listeners(compose)['collector']}"


def test_grafana_reads_what_is_started(compose: Node) -> None:
    provisioned = local_path(compose, "grafana", "/etc/grafana/provisioning/datasources")
    addresses = listeners(compose)
    found = {
        source["type"]: source
        for path in provisioned.glob("*.yaml")
        for source in read_yaml(path)["datasources"]
    }
    assert found["prometheus"]["url"] == f"http://{addresses['prometheus']}"
    assert found["prometheus"]["isDefault"] is True
    assert found["alertmanager"]["url"] == f"http://{addresses['alertmanager']}"
    scrape = read_yaml(COMPOSE / "prometheus.yml")["global"]["scrape_interval"]
    assert found["prometheus"]["jsonData"]["timeInterval"] == scrape


def test_grafana_is_given_the_generated_dashboards(compose: Node) -> None:
    provisioned = local_path(compose, "grafana", "/etc/grafana/provisioning/dashboards")
    (path,) = provisioned.glob("*.yaml")
    (provider,) = read_yaml(path)["providers"]
    folder = local_path(compose, "grafana", provider["options"]["path"])
    uids = [json.loads(f.read_text("utf-8"))["uid"] for f in folder.glob("*.json")]
    assert uids == ["servoscope-overview"]
    environment = services(compose)["grafana"]["environment"]
    home = environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert local_path(compose, "grafana", home).is_file()


# ---- what Prometheus and Alertmanager say themselves ---------------------------------------------
def test_promtool_accepts_config_and_rules(compose: Node, tmp_path: Path) -> None:
    config_path = flag(services(compose)["prometheus"], "--config.file")
    config = read_yaml(local_path(compose, "prometheus", config_path))
    here = []
    for pattern in config["rule_files"]:
        folder, glob = PurePosixPath(pattern).parent, PurePosixPath(pattern).name
        local = local_path(compose, "prometheus", str(folder))
        assert list(local.glob(glob)), f"no rule file matches {pattern}"
        here.append(str(local / glob))
    rewritten = tmp_path / "prometheus.yml"
    rewritten.write_text(yaml.safe_dump(config | {"rule_files": here}), encoding="utf-8")
    said = run_checker("promtool", "check", "config", str(rewritten))
    assert "SUCCESS" in said
    assert re.search(r"[1-9]\d* rules found", said)


def test_the_rules_watch_the_job_that_prometheus_scrapes(compose: Node) -> None:
    rules = local_path(compose, "prometheus", "/etc/prometheus/rules")
    text = "\n".join(path.read_text("utf-8") for path in rules.glob("*.yaml"))
    assert 'up{job=~"servoscope-sidecar"}' in text


def test_amtool_accepts_the_routes(compose: Node) -> None:
    inside = flag(services(compose)["alertmanager"], "--config.file")
    path = local_path(compose, "alertmanager", inside)
    said = run_checker("amtool", "check-config", str(path))
    assert "SUCCESS" in said


def test_secret_files_that_the_routes_name_are_mounted_and_explained(compose: Node) -> None:
    inside = flag(services(compose)["alertmanager"], "--config.file")
    text = local_path(compose, "alertmanager", inside).read_text("utf-8")
    explained = (COMPOSE / "secrets" / "README.md").read_text("utf-8")
    named = re.findall(r"_file: (\S+)", text)
    assert named
    for path in named:
        assert local_path(compose, "alertmanager", path).parent == COMPOSE / "secrets"
        assert f"`{PurePosixPath(path).name}`" in explained


# ---- hardening -----------------------------------------------------------------------------------
def test_images_are_pinned_and_services_confined(compose: Node) -> None:
    for name, service in services(compose).items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["restart"] == "unless-stopped", name
        assert "privileged" not in service, name
        assert service["healthcheck"]["retries"] >= 3, name


def test_only_the_sidecar_has_capabilities_and_each_is_explained(compose: Node) -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    for name, service in services(compose).items():
        if name != "sidecar":
            assert "cap_add" not in service, name
            assert "pid" not in service, name
    added = services(compose)["sidecar"]["cap_add"]
    assert added == ["NET_RAW", "SYS_PTRACE", "DAC_OVERRIDE"]
    for capability in added:
        assert re.search(rf"- {capability} # \w+", text)


def test_grafana_has_no_default_password() -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert "${GRAFANA_ADMIN_PASSWORD:?" in text


# ---- our own image -------------------------------------------------------------------------------
def test_our_commands_and_settings_are_ones_the_product_knows(compose: Node) -> None:
    for name in ("sidecar", "collector"):
        service = services(compose)[name]
        args = build_parser(only=name).parse_args([str(word) for word in service["command"]])
        assert args.command == name
        parse_settings("", service.get("environment", {}))
    sidecar = parse_settings("", services(compose)["sidecar"]["environment"]).sidecar
    assert sidecar.port_attempts == 1


def test_the_collector_keeps_its_state_where_it_may_write(compose: Node) -> None:
    collector = services(compose)["collector"]
    state = collector["environment"]["SERVOSCOPE_STATE"]
    assert state in [volume["target"] for volume in collector["volumes"]]
    uid = collector["user"].split(":")[0]
    assert f"-o {uid} -g {uid} {state}" in (COMPOSE / "Dockerfile").read_text("utf-8")


def test_the_image_is_built_from_every_source_root(compose: Node) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    dockerfile = (COMPOSE / "Dockerfile").read_text("utf-8")
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, flags=re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert {package.split("/")[0] for package in packages} <= copied
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= copied
    let_in = (COMPOSE / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_in, name
    build = services(compose)["sidecar"]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_the_image_is_what_the_product_asks_for(compose: Node) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    dockerfile = (COMPOSE / "Dockerfile").read_text("utf-8")
    bases = re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)
    assert set(bases) == {"python:3.11-slim-bookworm"}
    (extra,) = re.findall(r"\$\{wheel\}\[(\w+)\]", dockerfile)
    assert extra in project["optional-dependencies"]
    assert services(compose)["sidecar"]["image"] == f"servoscope:{project['version']}"
    assert 'ENTRYPOINT ["servoscope"]' in dockerfile
    assert "servoscope" in project["scripts"]
