"""`sbert-doctor`, on this machine and with doubles of broken installs on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sbert_infer.backends.select import READY
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.doctor import cli, trial
from sbert_infer.doctor.machine import look_at_machine
from sbert_infer.doctor.packages import look_at_packages, probe
from sbert_infer.doctor.report import make_report
from tests.doubles.packages import install, install_onnxruntime_gpu
from tests.repository.sources import ROOT

no_gpu = pytest.mark.skipif(cuda.driver_problem() is None, reason="this machine has a GPU")

KEYS = {"schema", "sbert_infer", "machine", "packages", "onnxruntimes", "problems", "notes", "artifact"}
MACHINE_KEYS = {
    *("python", "os", "cpu", "instructions", "cores", "usable_cores", "cpu_quota", "memory_gb", "memory_limit_gb"),
    *("nvidia_cards", "driver_problem", "driver_release", "driver_cuda", "gpus"),
}
ARTIFACT_KEYS = {"file", "kind", "model", "precision", "engines", "uses", "passed_over", "verified", "tuned"} | {
    "run",
    "error",
}


def doctor(*arguments: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `sbert-doctor` in a process that finds `path` before the installed packages."""
    paths = os.pathsep.join(str(each) for each in (path, ROOT) if each is not None)
    command = [sys.executable, "-m", "sbert_infer.doctor", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def report(*arguments: object, path: Path | None = None) -> dict[str, Any]:
    done = doctor("--json", *arguments, path=path)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    assert done.stderr == ""
    return found


def cures(found: dict[str, Any]) -> dict[str, str]:
    return {problem["name"]: problem["cure"] for problem in found["problems"]}


def test_the_keys_of_a_report(small_onnx: Path) -> None:
    found = report(small_onnx)
    assert found["schema"] == 1
    assert set(found) == KEYS
    assert set(found["machine"]) == MACHINE_KEYS
    assert set(found["artifact"]) == ARTIFACT_KEYS
    for package in found["packages"].values():
        assert set(package) == {"name", "version", "error", "cuda", "facts"}
    assert {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda-bindings", "torch", "triton", "openvino"} < set(
        found["packages"]
    )


@no_gpu
def test_this_machine_is_well(small_onnx: Path) -> None:
    done = doctor("--run", small_onnx)
    assert done.returncode == 0, done.stdout
    assert "there is no NVIDIA driver" in done.stdout
    assert "runs with      onnxruntime" in done.stdout
    assert "alone and in a batch: yes" in done.stdout
    assert "texts/s" in done.stdout
    assert "No problems found." in done.stdout
    assert "\x1b[" not in done.stdout  # no colours where there is no terminal


@no_gpu
def test_a_plan_and_why_it_does_not_run_on_a_gpu(small_plan: Path) -> None:
    found = report(small_plan)["artifact"]
    assert "on CPU" in found["uses"]
    (passed,) = found["passed_over"]
    assert passed["choice"] == "a GPU"
    assert passed["why"] == f"there is no NVIDIA driver: {cuda.DRIVER_CURE}"
    assert found["run"] is None


@no_gpu
def test_a_device_that_is_not_there(small_onnx: Path) -> None:
    found = report(small_onnx, "--device", "cuda")
    assert found["artifact"]["uses"] is None
    assert "can't run on cuda: there is no NVIDIA driver" in found["problems"][0]["what"]
    assert doctor(small_onnx, "--device", "tpu").returncode == 1


def test_a_file_that_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    found = report(tmp_path / "model.onnx")
    assert [problem["name"] for problem in found["problems"]] == ["artifact"]


@pytest.mark.parametrize("arguments", [["--run"], ["--device", "cpu"], ["missing.onnx"], ["--nonsense"]])
def test_wrong_options(arguments: list[str]) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert "Usage:" in done.stderr


def test_help_has_examples() -> None:
    done = doctor("--help")
    assert done.returncode == 0
    assert "sbert-doctor --run model.onnx" in done.stdout


@no_gpu
def test_requirements_need_a_gpu() -> None:
    done = doctor("--requirements")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no GPU: there is no NVIDIA driver\n"


def test_requirements_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    monkeypatch.setattr(cuda, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(cuda, "compute_capability", lambda device: "sm90")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    done = CliRunner().invoke(cli.main, ["--requirements"])
    assert done.exit_code == 0
    assert "tensorrt-cu12==11.4.0.106" in done.output.splitlines()


# --------------------------------------------------------------------------------------------------
# Broken installs


@no_gpu
def test_both_onnxruntimes(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime-gpu", "1.31.1")  # the files are those of the real onnxruntime, for CPUs
    found = report(path=tmp_path)
    assert found["onnxruntimes"] == ["onnxruntime", "onnxruntime-gpu"]
    assert cures(found)["two-onnxruntimes"] == "pip install --force-reinstall --no-deps onnxruntime-gpu"


def test_an_onnxruntime_of_two_versions(tmp_path: Path, small_onnx: Path) -> None:
    install_onnxruntime_gpu(tmp_path)
    (tmp_path / "onnxruntime/__init__.py").write_text("from onnxruntime.capi import gone")
    found = report(small_onnx, path=tmp_path)
    assert cures(found)["broken-onnxruntime"] == "pip install --force-reinstall --no-deps onnxruntime-gpu"
    assert "cannot import name 'gone'" in found["artifact"]["error"]
    assert cures(found)["artifact"] == cures(found)["broken-onnxruntime"]


def test_no_onnxruntime(tmp_path: Path, small_onnx: Path) -> None:
    """A path that holds only what the runtime itself needs."""
    site = Path(sys.modules["numpy"].__file__ or "").parents[1]
    for entry in site.iterdir():
        if entry.name.split("-")[0].split(".")[0] in ("numpy", "tokenizers", "filelock", "click", "tqdm"):
            (tmp_path / entry.name).symlink_to(entry)
    code = (
        "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"
        f" + [{str(tmp_path)!r}, {str(ROOT)!r}];"
        "from sbert_infer.doctor.cli import main; main()"
    )
    command = [sys.executable, "-I", "-c", code, "--json", str(small_onnx)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert cures(found)["no-onnxruntime"] == "pip install 'sbert-infer[cpu]'"
    assert found["packages"]["torch"]["version"] is None
    assert "onnxruntime is not installed: pip install" in found["artifact"]["error"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it crashed (SIGSEGV)"),
        ("import sys; sys.exit('gone')", "gone"),
        ("print('a greeting'); __version__ = '9.1'", None),
    ],
)
def test_a_package_may_do_anything_when_it_is_imported(source: str, why: str | None, tmp_path: Path) -> None:
    install(tmp_path, "triton", "9.1", {"triton/__init__.py": source})
    answer, error = probe("triton", [str(tmp_path), *sys.path])
    assert error == why
    if why is None:
        assert answer == {"version": "9.1", "facts": {}}


def test_a_crash_of_a_backend_is_reported(tmp_path: Path, small_onnx: Path) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    install(tmp_path, "onnxruntime", "1.31.1", {"onnxruntime/__init__.py": crash})
    found = report(small_onnx, path=tmp_path)
    assert found["artifact"]["error"] == "it crashed (SIGSEGV)"
    assert {"broken-onnxruntime", "artifact"} <= set(cures(found))


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.doubles.cuda import Machine, double_driver

    driver = double_driver(Machine(), name="NVIDIA L4", capability=89, version=12040)
    monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
    monkeypatch.syspath_prepend(install_onnxruntime_gpu(tmp_path))
    found = make_report(look_at_machine(), look_at_packages(), None)
    assert found["machine"]["driver_cuda"] == [12, 4]
    assert found["machine"]["gpus"] == [{"name": "NVIDIA L4", "target": "sm89", "memory_gb": 25.8}]
    too_old = {each["what"].split()[0]: each["cure"] for each in found["problems"] if each["name"] == "driver-too-old"}
    assert too_old["cuda-bindings"] == "update to driver 580 or newer, or pip install 'cuda-bindings<13'"
    assert "pip install tensorrt-rtx-cu12" in too_old["tensorrt_rtx"]
    assert "'onnxruntime-gpu[cuda,cudnn]<1.27'" in too_old["onnxruntime-gpu"]


def test_a_report_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    monkeypatch.setattr("socket.gethostname", lambda: "alices-laptop")
    artifact = trial._nothing(Path("/home/alice/model.onnx")) | {
        "error": f"/home/alice/model.onnx on alices-laptop, in {sys.prefix}/lib"
    }
    text = json.dumps(make_report(look_at_machine(), look_at_packages(), artifact))
    assert "alice" not in text
    assert sys.prefix not in text
    assert "~/model.onnx on <host>, in <environment>/lib" in text


# --------------------------------------------------------------------------------------------------
# Running


def test_an_onnx_file_beside_a_gpu(
    small_onnx: Path, export_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "driver_problem", lambda: None)
    (passed,) = trial.try_artifact(small_onnx)["passed_over"]
    assert passed["choice"] == "onnxruntime on the GPU"
    assert 'give device="cuda", or export the model with --fp16' in passed["why"]
    (passed,) = trial.try_artifact(export_checkpoint("bert", int8=True))["passed_over"]
    assert passed["why"] == "an ONNX file runs on the CPU: export the model with --fp16"
    monkeypatch.setattr(cuda, "driver_problem", lambda: "there is no NVIDIA driver")
    assert trial.try_artifact(small_onnx)["passed_over"] == []


def test_every_kind_of_model_runs(
    small_onnx: Path, reranker_onnx: Path, small_plan: Path, export_checkpoint: Callable[..., Path]
) -> None:
    for path in (small_onnx, reranker_onnx, small_plan, export_checkpoint("bert", int8=True)):
        found = trial.try_artifact(path, "cpu", run=True)
        assert found["error"] is None
        assert found["passed_over"] == []
        assert all(check["passed"] for check in found["run"]["checks"])
        assert found["run"]["texts_per_s"] > 0


def test_sparse_and_multi_vector_encoders_run(once: Callable[..., Path], tmp_path: Path) -> None:
    from sbert_infer.export.exporter import export
    from tests.models.multi_vectors import write_multi_vector
    from tests.models.sparse_encoders import write_splade

    for write in (write_splade, write_multi_vector):
        name = write.__name__
        path = once(
            f"doctor {name}",
            f"{name}.onnx",
            lambda target, write=write: export(write(tmp_path / write.__name__), target),
        )
        found = trial.try_artifact(path, "cpu", run=True)
        assert found["error"] is None
        assert all(check["passed"] for check in found["run"]["checks"])


def test_a_bad_file_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no artifact")
    (tmp_path / "folder.onnx").mkdir()
    for name in ("bad.onnx", "folder.onnx"):
        artifact = trial.try_artifact(tmp_path / name)
        (found,) = (
            each
            for each in make_report(look_at_machine(), look_at_packages(), artifact)["problems"]
            if each["name"] == "artifact"
        )
        assert found["what"].partition(" is a folder")[0].count(name) == 1
    crashed = trial._nothing(Path("bad.onnx")) | {"error": "it crashed (SIGSEGV)", "passed_over": []}
    problems = make_report(look_at_machine(), look_at_packages(), crashed)["problems"]
    assert "bad.onnx: it crashed (SIGSEGV)" in [each["what"] for each in problems]


def test_a_plan_that_could_run_better_is_a_problem_only_where_there_is_a_gpu() -> None:
    passed = [{"choice": "TensorRT", "why": "TensorRT is not installed"}]
    plan = trial._nothing(Path("model.plan")) | {"uses": "onnxruntime", "passed_over": passed}
    machine, packages = look_at_machine(), look_at_packages()
    for problem, names in (("there is no NVIDIA driver", []), (None, ["not-the-best"])):
        found = make_report(replace(machine, driver_problem=problem), packages, plan)["problems"]
        assert [each["name"] for each in found if each["name"] == "not-the-best"] == names


def test_an_engine_that_is_built_here_is_no_problem(
    small_plan: Path, lab: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    there = lab()
    there.install(small_plan)
    machine = replace(look_at_machine(), driver_problem=None)
    packages = look_at_packages()

    def look(run: bool) -> tuple[dict[str, Any], list[str], list[str]]:
        found = make_report(machine, packages, trial.try_artifact(small_plan, run=run))
        assert found["artifact"]["error"] is None
        assert "not-the-best" not in cures(found)
        notes = [note["consequence"] for note in found["notes"] if note["name"] == "not-ready"]
        news = [line for line in capsys.readouterr().out.splitlines() if line.startswith("news: ")]
        return found["artifact"], notes, news

    artifact, notes, news = look(run=False)
    assert artifact["uses"] == "TensorRT, with an engine that is built at first use (minutes) and cached"
    assert (notes, news) == (["one is built at first use, which may take minutes"], [])
    artifact, notes, news = look(run=True)
    assert "cuda:0" in artifact["uses"]
    assert all(check["passed"] for check in artifact["run"]["checks"])
    assert (notes, len(news)) == (["one was built and cached"], 1)
    assert there.built == 1
    assert [call[0] for call in there.machine.calls].count("deserialize_cuda_engine") == 1  # opened once
    for run in (False, True):  # from the cache
        _, notes, news = look(run)
        assert (notes, news) == ([], [])
    assert there.built == 1


def test_what_takes_minutes_is_announced_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other process ends only when its line was passed on."""
    seen = tmp_path / "seen"
    code = f"""
import pathlib, sys, time
print("something else")
print("news: this may take minutes", flush=True)
print("e" * 10**6, file=sys.stderr)
for _ in range(600):
    if pathlib.Path({str(seen)!r}).exists():
        print('{{"uses": "TensorRT"}}')
        sys.exit(0)
    time.sleep(0.05)
sys.exit("nobody has seen it")
"""
    echo = click.echo

    def see(*args: Any, **options: Any) -> None:
        echo(*args, **options)
        seen.touch()

    monkeypatch.setattr(trial, "_START", code)
    monkeypatch.setattr(click, "echo", see)
    assert trial.try_in_process(Path("model.plan"), None, run=True) == {"uses": "TensorRT"}
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "this may take minutes\n")


def test_the_best_way_that_failed_is_named_and_not_the_engine_that_was_not_ready() -> None:
    passed = [{"choice": READY, "why": "it holds none"}, {"choice": "TensorRT", "why": "building failed"}]
    plan = trial._nothing(Path("model.plan")) | {"uses": "onnxruntime", "passed_over": passed}
    found = make_report(replace(look_at_machine(), driver_problem=None), look_at_packages(), plan)["problems"]
    whats = [problem["what"] for problem in found if problem["name"] == "not-the-best"]
    assert whats == ["model.plan does not run with TensorRT: building failed"]


def test_wrong_vectors_are_noticed(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from sbert_infer import Engine

    def wrong(self: Engine, texts: list[str]) -> Any:
        return np.full((len(texts), 4), np.nan if len(texts) == 1 else 1, np.float32)

    monkeypatch.setattr(Engine, "encode", wrong)
    artifact = trial.try_artifact(small_onnx, "cpu", run=True)
    assert not any(check["passed"] for check in artifact["run"]["checks"])
    found = make_report(look_at_machine(), look_at_packages(), artifact)
    assert [problem["name"] for problem in found["problems"]].count("wrong-vectors") == 3
