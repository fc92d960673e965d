"""Manifests fit Kubernetes' schemas, and a linter finds nothing in the Dockerfiles.

Both tools are in the environment of tests/clients.txt.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.test_deploy import DEPLOY, DOCKERFILES, KUBERNETES
from tests.sbert_infer.serve.real_clients import PYTHON, needs_clients

pytestmark = needs_clients

# Kustomize's, the Prometheus operator's and Helm's, which are not among Kubernetes' schemas.
OTHERS = {"kustomization.yaml", "prometheus-adapter.yaml", "prometheusrule.yaml", "servicemonitor.yaml"}
OURS = [file for file in KUBERNETES if file.name not in OTHERS]


def check(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON.with_name(tool)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("version", ["1.31.0", "1.37.0"])
def test_manifests_fit_the_schemas_of_kubernetes(version: str) -> None:
    done = check("kubernetes-validate", "--strict", "-k", version, *OURS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") == len(OURS) >= 6


def test_a_misspelt_field_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "service.yaml"
    (service,) = [file for file in OURS if file.name == "service.yaml"]
    broken.write_text(service.read_text(encoding="utf-8").replace("ports:", "portz:"), encoding="utf-8")
    done = check("kubernetes-validate", "--strict", broken)
    assert done.returncode != 0
    assert "portz" in done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing(name: str) -> None:
    done = check("hadolint", DEPLOY / name)
    assert done.returncode == 0, done.stdout
