"""What deploy/ says about the server is true: options, ports, paths, metrics and their labels."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sbert_infer import __version__
from sbert_infer.serve.cli import main
from sbert_infer.serve.settings import ModelFile, Settings
from tests.repository.sources import ROOT
from tests.sbert_infer.serve.conftest import Running, start

DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.gpu")
KUBERNETES = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
# Labels that Prometheus and its operator add, and that of histograms.
ADDED_LABELS = {"instance", "job", "namespace", "pod", "le"}
KEY, ADMIN_KEY = "a key", "an admin key"


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def manifest(kind: str) -> Any:
    (found,) = [each for file in KUBERNETES if (each := load(str(file.relative_to(DEPLOY)))).get("kind") == kind]
    return found


def container() -> Any:
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def server(export_checkpoint: Callable[..., Path]) -> Iterator[Running]:
    models = (ModelFile(export_checkpoint("bert")),)
    settings = Settings(models=models, port=0, keys=(KEY,), admin_keys=(ADMIN_KEY,), cache_mb=1)
    running = start(settings)
    running.post("/embed", {"inputs": "a text"})
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert running.client.post("/admin/reload", headers=admin).is_success
    yield running
    running.stop()


@pytest.fixture(scope="module")
def labels(server: Running) -> dict[str, set[str]]:
    """Metric -> its labels, as the server shows them."""
    found: dict[str, set[str]] = {}
    lines = [line for line in server.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    for line in lines:
        name, inside = re.match(r"(\w+)(?:\{(.*)\})? ", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', inside or ""))
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    return found


def expressions() -> dict[str, str]:
    """Where -> an expression for Prometheus."""
    panels = {
        f"{panel['title']}: {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    }
    variables = {f"${each['name']}": each["query"]["query"] for each in dashboard()["templating"]["list"]}
    alerts = {
        rule["alert"]: rule["expr"] for group in load("monitoring/alerts.yaml")["groups"] for rule in group["rules"]
    }
    adapter = {"adapter": load("kubernetes/monitored/prometheus-adapter.yaml")["rules"]["custom"][0]["seriesQuery"]}
    return {**panels, **variables, **alerts, **adapter}


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:(?:sbert|process)_\w+|up\b)", expression))


def labels_of(expression: str) -> set[str]:
    matched = [re.findall(r"(\w+)\s*[!=]=?~?\s*\"", inside) for inside in re.findall(r"\{(.*?)\}", expression)]
    grouped = [re.findall(r"\w+", inside) for inside in re.findall(r"\bby \((.*?)\)", expression)]
    return {label for labels in (*matched, *grouped) for label in labels}


@pytest.mark.parametrize("where", expressions())
def test_metrics_and_labels_exist(where: str, labels: dict[str, set[str]]) -> None:
    expression = expressions()[where]
    used = metrics_of(expression)
    assert used
    assert used <= set(labels) | {"up"}  # Prometheus' own
    assert labels_of(expression) <= ADDED_LABELS.union(*(labels[name] for name in used - {"up"}))


def test_wrong_metrics_and_labels_are_found() -> None:
    expression = 'sum by (le, kind) (rate(sbert_gone_bucket{state!="x", model=~"$model"}[5m])) / upper'
    assert metrics_of(expression) == {"sbert_gone_bucket"}
    assert labels_of(expression) == {"le", "kind", "state", "model"}


def test_the_autoscaler_follows_a_metric_of_the_adapter(labels: dict[str, set[str]]) -> None:
    names = [each["pods"]["metric"]["name"] for each in manifest("HorizontalPodAutoscaler")["spec"]["metrics"][:1]]
    assert names == ["sbert_queue_tokens"]
    assert metrics_of(expressions()["adapter"]) == set(names) <= set(labels)


def test_a_server_that_is_gone_raises_an_alert() -> None:
    """All other alerts need its series."""
    down = expressions()["SbertServerDown"]
    (job,) = load("monitoring/prometheus.yaml")["scrape_configs"]
    assert set(re.findall(r'job="(.*?)"', down)) == {job["job_name"]}
    assert manifest("Service")["metadata"]["name"] == job["job_name"]  # which the operator takes
    assert "absent(" in down


def test_both_files_of_alerts_agree() -> None:
    assert manifest("PrometheusRule")["spec"]["groups"] == load("monitoring/alerts.yaml")["groups"]


def test_the_dashboard_shows_each_lane_and_no_probes_as_latency() -> None:
    shown = expressions()
    assert "by (instance, model, class)" in shown["Tokens that wait: A"]
    assert "sbert_class_seconds_bucket" in shown["Latency of calls by class, p95: A"]
    latencies = [each for each in shown.values() if "sbert_http_request_seconds_bucket" in each]
    assert len(latencies) == 4
    for probe in ("/health/live", "/health/ready", "/ping", "/metrics"):
        for each in latencies:
            (left_out,) = re.findall(r'route!~"(.*?)"', each)
            assert re.fullmatch(left_out, probe)


def test_panels_do_not_overlap() -> None:
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_arguments_are_options_of_the_server() -> None:
    known = {name for option in main.params for name in option.opts}
    used = [*container()["args"], *load("compose.yaml")["services"]["sbert-serve"]["command"]]
    flags = {each.partition("=")[0] for each in used if each.startswith("-")}
    assert "--drain-s" in flags
    assert flags <= known


@pytest.mark.parametrize("file", DOCKERFILES)
def test_variables_are_options_of_the_server(file: str) -> None:
    text = (DEPLOY / file).read_text(encoding="utf-8")
    used = set(re.findall(r"SBERT_SERVE_(\w+)=", text))
    assert {"HOST", "PORT", "MODELS"} <= used
    assert used <= {str(option.name).upper() for option in main.params}


@pytest.mark.parametrize("file", DOCKERFILES)
def test_images_run_as_the_user_and_on_the_port_of_the_manifests(file: str) -> None:
    text = (DEPLOY / file).read_text(encoding="utf-8")
    user = manifest("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    port = container()["ports"][0]["containerPort"]
    assert f"\nUSER {user}:{user}\n" in text
    assert f"\nEXPOSE {port}\n" in text
    assert f"SBERT_SERVE_PORT={port} " in text


def test_everything_that_images_copy_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = {
        source
        for file in DOCKERFILES
        for source in re.findall(r"^COPY (\w\S+/\S+) ", (DEPLOY / file).read_text(), re.M)
    }
    assert copied == {"deploy/healthcheck.py"}
    assert copied <= sent
    assert {"pyproject.toml", "constraints.txt", "sbert_infer", "export", "kernels", "bench"} <= sent
    assert [name for name in sent if not (ROOT / name).exists()] == []


def test_probes_are_routes_that_need_no_key(server: Running) -> None:
    paths = {container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    for path in paths:
        assert server.client.get(path, headers={"authorization": ""}).status_code == 200
    assert container()["ports"][0]["name"] == "http"
    assert server.client.get("/metrics", headers={"authorization": ""}).status_code == 401


def test_a_pod_has_time_to_drain() -> None:
    args = dict(each.removeprefix("--").split("=") for each in container()["args"] if "=" in each)
    grace = manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert float(args["drain-delay-s"]) + float(args["drain-s"]) < grace
    service = load("compose.yaml")["services"]["sbert-serve"]
    assert float(service["command"][-1]) < float(service["stop_grace_period"].removesuffix("s"))


def test_selectors_find_the_pods() -> None:
    pod = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == pod
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == pod
    assert manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == pod
    assert manifest("Service")["spec"]["selector"] == pod
    assert manifest("ServiceMonitor")["spec"]["selector"]["matchLabels"] == manifest("Service")["metadata"]["labels"]
    assert (
        manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        == manifest("Deployment")["metadata"]["name"]
    )


def test_prometheus_needs_no_key_and_clients_do_not_see_metrics() -> None:
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert f"--metrics-port={ports['metrics']}" in container()["args"]
    assert {each["name"] for each in manifest("Service")["spec"]["ports"]} == ports.keys()
    assert all(each["targetPort"] == each["name"] for each in manifest("Service")["spec"]["ports"])
    (endpoint,) = manifest("ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    rules = manifest("NetworkPolicy")["spec"]["ingress"]
    allowed = {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}
    assert allowed["metrics"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert allowed.keys() == ports.keys()
    assert not any(source in allowed["http"] for source in allowed["metrics"])


def test_a_pod_has_no_privileges() -> None:
    own = container()["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert manifest("Deployment")["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    assert load("compose.yaml")["services"]["sbert-serve"]["read_only"] is True


def test_kustomizations_list_what_is_there() -> None:
    for folder in ("base", "monitored"):
        listed = load(f"kubernetes/{folder}/kustomization.yaml")["resources"]
        files = {file.name for file in KUBERNETES if file.parent.name == folder}
        values_of_helm = {"prometheus-adapter.yaml"}
        assert {name for name in listed if name != "../base"} == files - {"kustomization.yaml"} - values_of_helm


def test_keys_are_not_in_the_repository() -> None:
    (secret,) = load("kubernetes/base/kustomization.yaml")["secretGenerator"]
    assert secret["name"] == manifest("Deployment")["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"]
    for file in secret["files"]:
        ignored = subprocess.run(["git", "check-ignore", f"deploy/kubernetes/base/{file}"], cwd=ROOT, check=False)
        assert ignored.returncode == 0
    assert "--api-key-file=/keys/keys.txt" in container()["args"]
    assert secret["files"] == ["keys.txt"]


def test_images_have_the_version_of_the_package() -> None:
    assert load("compose.yaml")["services"]["sbert-serve"]["image"] == f"sbert-serve:{__version__}"
    assert load("kubernetes/base/kustomization.yaml")["images"] == [{"name": "sbert-serve", "newTag": __version__}]


def test_files_that_compose_mounts_exist() -> None:
    mounts = [each for service in load("compose.yaml")["services"].values() for each in service["volumes"]]
    files = [each.partition(":")[0] for each in mounts if isinstance(each, str) and each.startswith("./")]
    assert len(files) == 5
    assert all((DEPLOY / file).is_file() for file in files)


def healthcheck(port: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SBERT_SERVE_PORT": str(port)}
    command = [sys.executable, str(DEPLOY / "healthcheck.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_health_check_tells_the_living_from_the_dead(server: Running) -> None:
    assert healthcheck(int(server.url.rpartition(":")[2])).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but it does not listen
        dead = healthcheck(free.getsockname()[1])
    assert dead.returncode == 1
    assert "does not respond" in dead.stderr
