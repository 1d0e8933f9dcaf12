"""The files below deploy/: they parse, and name options, routes, paths and times that exist."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from deploy.dockerfiles import interpolated, stage_of
from rootstock._version import __version__
from rootstock.cli.main import app
from rootstock.config import ServerConfig
from rootstock.options import parse_seconds
from rootstock.server.access.guard import OPEN_PATHS
from rootstock.server.http.listen import GRACE_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def serve() -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands["serve"]


@pytest.fixture(scope="module")
def variables(serve: Any) -> set[str]:
    """Returns the environment variables of `rootstock serve`."""
    return {str(parameter.envvar) for parameter in serve.params if parameter.envvar}


@pytest.fixture(scope="module")
def image() -> dict[str, list[str]]:
    """Returns the arguments of each kind of instruction in the server's stage."""
    found: dict[str, list[str]] = {}
    for instruction in stage_of(DEPLOY / "Dockerfile", "server"):
        found.setdefault(instruction.name, []).append(instruction.rest)
    return found


@pytest.fixture(scope="module")
def compose() -> Json:
    found: Json = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return found


@pytest.fixture(scope="module")
def stateful() -> Json:
    service, pods, found = yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())
    assert (service["kind"], pods["kind"], found["kind"]) == ("Service", "Service", "StatefulSet")
    for each in (service, pods):
        assert each["spec"]["selector"] == found["spec"]["template"]["metadata"]["labels"]
        assert each["metadata"]["name"] != "rootstock", "it would set ROOTSTOCK_PORT"
    assert pods["spec"]["clusterIP"] == "None"
    assert found["spec"]["serviceName"] == pods["metadata"]["name"]
    spec: Json = found["spec"]
    return spec


def seconds(text: str) -> float:
    return parse_seconds(text, "--drain-timeout")


class Container(NamedTuple):
    """A container of a YAML file below deploy/, whoever starts it."""

    file: str
    name: str
    settings: Json
    pod: Json | None = None  # of Kubernetes; None: a service of Docker Compose
    needs_token: bool = False  # the pod, because one of its containers asks Kubernetes


def documents() -> Iterator[tuple[str, Json]]:
    """Yields each document of the YAML files, with the name of its file."""
    for path in sorted(DEPLOY.rglob("*.y*ml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.relative_to(DEPLOY).as_posix(), document


def mappings(value: Any) -> Iterator[Json]:
    """Yields each mapping in a document, at any depth; one before those in it."""
    if isinstance(value, dict):
        yield value
        value = [*value.values()]
    for part in value if isinstance(value, list) else ():
        yield from mappings(part)


def containers() -> Iterator[Container]:
    for file, document in documents():
        for name, service in document.get("services", {}).items():
            yield Container(file, name, service)
        heads: list[Json] = []  # pods to which KubeRay's operator adds a container
        for part in mappings(document):
            if part.get("enableInTreeAutoscaling"):
                heads.append(part["headGroupSpec"]["template"]["spec"])
                yield Container(file, "autoscaler", part.get("autoscalerOptions", {}), heads[-1], True)
            for kind in ("initContainers", "containers", "ephemeralContainers"):
                for each in part.get(kind, ()):
                    yield Container(file, each["name"], each, part, part in heads)


# ---- image


def test_the_image_copies_files_that_exist_and_are_sent_to_the_builder(image: dict[str, list[str]]) -> None:
    sent = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {source for rest in image["COPY"] for source in rest.split()[:-1]}
    assert copied == sent
    assert all((ROOT / source).exists() for source in copied)


def test_the_image_runs_a_command_of_rootstock_as_a_plain_user(
    image: dict[str, list[str]], serve: Any
) -> None:
    [entry], [command], [user] = image["ENTRYPOINT"], image["CMD"], image["USER"]
    assert entry == '["/opt/rootstock/venv/bin/rootstock"]'
    assert command == f'["{serve.name}"]'
    assert user.split(":")[0] not in ("0", "root")
    assert image["STOPSIGNAL"] == ["SIGTERM"]


def test_the_images_variables_are_options_and_its_directories_are_made(
    image: dict[str, list[str]], variables: set[str]
) -> None:
    environment = dict(rest.split("=", 1) for rest in image["ENV"])
    assert {name for name in environment if name.startswith("ROOTSTOCK_")} <= variables
    assert image["EXPOSE"] == [environment["ROOTSTOCK_PORT"]]
    [made] = [rest for rest in image["RUN"] if rest.startswith("mkdir")]
    [volume] = image["VOLUME"]
    for value in environment.values():
        if value.startswith("/"):
            assert value in made.split()
            assert value.startswith(f"{volume}/")
    [check] = image["HEALTHCHECK"]
    assert "'/readyz'" in check
    assert "/readyz" in OPEN_PATHS


# ---- compose


def test_the_compose_file_builds_the_servers_stage_with_options_that_exist(
    compose: Json, variables: set[str]
) -> None:
    server = compose["services"]["rootstock"]
    build = server["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert stage_of(ROOT / build["dockerfile"], build["target"])
    assert set(server["environment"]) <= variables
    stop = seconds(server["stop_grace_period"])
    assert stop >= seconds(server["environment"]["ROOTSTOCK_DRAIN_TIMEOUT"]) + GRACE_S


def test_the_compose_files_paths_exist_and_its_ports_are_of_this_machine(compose: Json) -> None:
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service["volumes"]:
            source = volume.split(":")[0] if not volume.startswith("${") else None
            if source is not None and source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif source is not None:
                assert source in compose["volumes"], source
        assert set(service.get("depends_on", ())) <= set(compose["services"])


def test_prometheus_and_grafana_reach_each_other_and_the_server(compose: Json) -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target
        for job in scraped["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    ]
    server = compose["services"]["rootstock"]
    for target in targets:
        host, _, port = target.partition(":")
        assert f":{port}" in compose["services"][host]["ports"][0]
        assert interpolated(server["environment"]["ROOTSTOCK_ALLOWED_HOSTS"], {}) == host
    for source in (DEPLOY / "grafana" / "provisioning" / "datasources").glob("*.yml"):
        for one in yaml.safe_load(source.read_text())["datasources"]:
            asked = compose["services"][one["url"].split("//")[1].split(":")[0]]
            assert "ports" not in asked, "it has no login, and accepts any Host header"
    for file in scraped["rule_files"]:
        assert (DEPLOY / "prometheus" / file).exists()


@pytest.mark.parametrize("container", list(containers()), ids=lambda one: f"{one.file} {one.name}")
def test_the_containers_have_no_rights_that_they_do_not_need(
    container: Container, image: dict[str, list[str]]
) -> None:
    settings, pod = container.settings, container.pod
    if pod is None:
        assert settings["cap_drop"] == ["ALL"]
        assert settings["read_only"] is True
        assert settings["security_opt"] == ["no-new-privileges:true"]
        assert settings["tmpfs"] == ["/tmp"]
        assert not {"privileged", "cap_add", "network_mode", "pid"} & set(settings)
        return
    assert settings.get("securityContext") == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    [user, group] = map(int, image["USER"][0].split(":"))
    assert pod.get("securityContext") == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "fsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    mounted = {mount["mountPath"]: mount["name"] for mount in settings["volumeMounts"]}
    assert {"name": mounted["/tmp"], "emptyDir": {}} in pod["volumes"], "the root is read-only"
    assert image["VOLUME"][0] in mounted
    assert all(volume.keys() == {"name", "emptyDir"} for volume in pod["volumes"])
    assert container.needs_token or pod["automountServiceAccountToken"] is False


def test_each_image_of_the_files_is_of_a_container_whose_rights_are_tested() -> None:
    """Ray's configuration of a cluster, for example, could have containers in its section `docker`."""
    tested = list(containers())
    assert {"compose.yml", "kubernetes.yml", "kuberay.yml"} <= {one.file for one in tested}
    for file, document in documents():
        for part in mappings(document):
            if "image" in part:
                assert any(one.file == file and one.settings == part for one in tested), part["image"]


def test_images_are_named_by_a_whole_version(compose: Json, stateful: Json) -> None:
    [server] = stateful["template"]["spec"]["containers"]
    base = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    others = [service["image"] for service in compose["services"].values() if "image" in service]
    assert server["image"] == f"rootstock:{__version__}"
    for image_name in (*base, *others):
        assert re.search(r":v?\d+\.\d+\.\d+(-|$)", image_name), image_name


def test_the_compose_file_asks_for_a_password_of_grafana(compose: Json) -> None:
    value = compose["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    with pytest.raises(ValueError, match="GRAFANA_PASSWORD"):
        interpolated(value, {})
    with pytest.raises(ValueError, match="GRAFANA_PASSWORD"):
        interpolated(value, {"GRAFANA_PASSWORD": ""})
    assert interpolated(value, {"GRAFANA_PASSWORD": "s3cret"}) == "s3cret"


# ---- systemd


def test_the_unit_starts_a_command_with_options_that_exist(serve: Any) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (DEPLOY / "rootstock.service").read_text()
    unit.read_string(text)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert (program, command) == ("/opt/rootstock/venv/bin/rootstock", serve.name)
    known = {name for parameter in serve.params for name in parameter.opts}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert set(given) <= known
    assert given["--disk-dir"].startswith(f"/var/cache/{service['CacheDirectory']}/")
    assert service["KillSignal"] == "SIGTERM"
    environment = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE))
    for name in ("HOME", "HF_HOME", "NUMBA_CACHE_DIR"):
        assert environment[name].startswith(f"/var/cache/{service['CacheDirectory']}/")
    assert float(service["TimeoutStopSec"]) >= seconds(given["--drain-timeout"]) + GRACE_S


# ---- Kubernetes


def test_the_manifests_probes_are_open_routes_and_its_times_fit(stateful: Json) -> None:
    pod = stateful["template"]["spec"]
    [server] = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] in OPEN_PATHS
        assert server[probe]["httpGet"]["port"] in [port["name"] for port in server["ports"]]
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"  # a server that drains is not restarted
    environment = {each["name"]: each.get("value") for each in server["env"]}
    drain = seconds(environment["ROOTSTOCK_DRAIN_TIMEOUT"])
    before = float(server["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= before + drain + GRACE_S
    assert pod["enableServiceLinks"] is False  # it would set ROOTSTOCK_PORT


def test_the_manifest_uses_the_images_command_user_and_volume(
    stateful: Json, image: dict[str, list[str]], variables: set[str]
) -> None:
    pod = stateful["template"]["spec"]
    [server] = pod["containers"]
    assert server["args"] == ["serve"]
    assert {each["name"] for each in server["env"]} <= variables
    assert [port["containerPort"] for port in server["ports"]] == [int(image["EXPOSE"][0])]
    security = pod["securityContext"]
    assert image["USER"] == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    [mount, temporary], [claim] = server["volumeMounts"], stateful["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert temporary["mountPath"] == "/tmp"
    assert pod["volumes"] == [{"name": temporary["name"], "emptyDir": {}}]
    assert image["VOLUME"] == [mount["mountPath"]]


def test_the_default_drain_is_shorter_than_what_orchestrators_wait() -> None:
    assert ServerConfig().drain_timeout_s <= 30
