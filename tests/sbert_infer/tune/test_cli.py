"""`sbert-tune`: what it tries, leaves out, chooses and refuses. How long a round takes is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sbert_infer import Engine, Reranker, SbertInferWarning
from sbert_infer.backends.base import Batch
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.opening import Opened
from sbert_infer.tune.cli import main
from sbert_infer.tune.trial import Bench
from tests.models.multi_vectors import export_multi_vector
from tests.models.sparse_encoders import splade_onnx


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """Start as on a new machine, on which 8 bits take half as long as everything else."""
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    run, taken = Bench._seconds, {"int8": 1.0}

    def fake(self: Bench, opened: Opened) -> float:
        run(self, opened)
        return taken.get(opened.artifact.manifest.precision, 2.0)

    monkeypatch.setattr(Bench, "_seconds", fake)
    return taken


@pytest.fixture(scope="session")
def exact(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert")


@pytest.fixture(scope="session")
def int8(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert", int8=True)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def tune(*arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def chosen(report: dict[str, Any]) -> dict[str, Any]:
    (entry,) = [entry for entry in report["tried"] if entry["chosen"]]
    return dict(entry)


def test_the_fastest_that_is_near_enough(exact: Path, int8: Path) -> None:
    report = tune(exact, int8, "--min-cosine", 0.9)
    first, second, *others = report["tried"]
    assert (first["cosine"] > 1 - 1e-6, first["ratio"]) == (True, 1)
    assert chosen(report) == second
    assert (second["file"], second["precision"], second["ratio"]) == (int8.name, "int8", 2)
    assert all(each["file"] == int8.name and each["ratio"] == 2 for each in others)  # no faster, so not chosen
    with Engine(exact, compute="auto") as engine, Engine(int8) as other:
        assert engine.info["precision"] == "int8"
        assert engine.info["compute"].startswith(f"{int8.name} with onnxruntime ")
        assert "2.00x the default, lowest cosine 0.9" in engine.info["compute"]
        assert np.array_equal(engine.encode(["one text"]), other.encode(["one text"]))
    with Engine(exact) as engine:
        assert (engine.info["precision"], engine.info["compute"]) == ("fp32", None)

    near = (1 + second["cosine"]) / 2
    report = tune(exact, int8, "--min-cosine", near)
    assert (chosen(report), report["tried"][1]["left_out"]) == (report["tried"][0], f"cosine below {near:g}")
    with Engine(exact, compute="auto") as engine:
        assert engine.info["precision"] == "fp32"


def test_a_slow_one_that_is_near_enough(exact: Path, int8: Path, seconds: dict[str, float]) -> None:
    report = tune(int8, exact, "--min-cosine", 1 - 1e-6)
    assert report["tried"][0]["left_out"]
    assert chosen(report) == report["tried"][1]
    assert chosen(report)["ratio"] == 0.5


def test_nothing_is_near_enough(int8: Path) -> None:
    done = invoke(int8, "--min-cosine", 1)
    assert done.exit_code == 1
    assert "left out: cosine below 1" in done.stdout
    assert done.stderr.startswith("error: nothing has a cosine of at least 1, the nearest 0.9")
    with pytest.warns(SbertInferWarning, match=f"has chosen nothing .*; run: sbert-tune {int8}"):
        Engine(int8, compute="auto").close()


def test_the_table(exact: Path, int8: Path, tmp_path: Path) -> None:
    done = invoke(exact, int8, "--min-cosine", 0.9)
    assert done.exit_code == 0
    assert done.stderr == ""  # no bar, since this is no terminal
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["file", "runs", "with", "tokens", "cosine", "texts/s", "ratio"]
    assert [line.split()[0] for line in lines if line.startswith("*")] == ["*"]
    assert lines[-2].startswith(f"chosen: {int8.name} with onnxruntime ")
    assert lines[-1].startswith(f'used by: Engine("{exact.name}", compute="auto")')


@pytest.mark.parametrize("column", [None, "body"])
def test_texts_of_a_file(exact: Path, tmp_path: Path, column: str | None) -> None:
    file = tmp_path / ("corpus" if column is None else "corpus.jsonl")
    rows = [f"text {number} of the file" for number in range(90)]
    lines = rows if column is None else [json.dumps({"body": row}) for row in rows]
    file.write_text("\n".join(lines), encoding="utf-8")
    report = tune(exact, "--texts", file, *([] if column is None else ["--text-column", column]))
    assert report["texts"]["source"] == file.name
    assert column is None or report["choice"]["command"].endswith(f"--texts {file} --text-column body")


def test_other_kinds(once: Callable[..., Path], reranker_onnx: Path, tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("one\ntwo\nthree\n", encoding="utf-8")
    for path in (reranker_onnx, export_multi_vector(once)[1], splade_onnx(once)):
        for texts in ([], ["--texts", file]):
            report = tune(path, *texts)
            assert chosen(report)["cosine"] > 1 - 1e-5
    with Reranker(reranker_onnx, compute="auto") as reranker:
        assert reranker.info["compute"]


def test_a_plan_runs_on_the_cpu(exact: Path, export_checkpoint: Callable[..., Path]) -> None:
    plan = export_checkpoint("bert", fp16=True)
    report = tune(exact, plan, "--min-cosine", 0.99)
    assert report["tried"][1]["file"] == plan.name
    assert report["tried"][1]["left_out"] is None


def test_a_vector_that_depends_on_its_batch(int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxBackend.run

    def mixed(self: OnnxBackend, batch: Batch, *args: Any, **options: Any) -> Any:
        found = run(self, batch, *args, **options)
        if self.threads > 1 and len(batch.ids) > 1:  # so little that the self-check allows it in 8 bits
            odd = np.sin(np.arange(found[0].shape[1], dtype=np.float32))
            lengths = np.linalg.norm(found[0], axis=1, keepdims=True) / np.linalg.norm(odd)
            found[0] = found[0] + np.float32(0.02) * lengths * odd
        return found

    monkeypatch.setattr(OnnxBackend, "run", mixed)
    monkeypatch.setattr("sbert_infer.tune.candidates.usable_cores", lambda: 2)
    report = tune(int8, "--min-cosine", 0.5)
    threaded = [entry for entry in report["tried"] if entry["threads"] == 2]
    assert threaded
    assert all("depends on its batch" in entry["left_out"] for entry in threaded)


def test_refusals(exact: Path, reranker_onnx: Path, small_onnx: Path, tmp_path: Path) -> None:
    words, empty = tmp_path / "words.onnx", tmp_path / "empty.txt"
    words.write_text("sbert-infer is a word that this text begins with, and so it goes on\n" * 9, encoding="utf-8")
    empty.write_text("\n\n", encoding="utf-8")
    one = tmp_path / "one.txt"
    one.write_text("one\n", encoding="utf-8")
    for arguments, message in (
        ([words], f"{words}: a text, not an artifact"),
        ([tmp_path / "none.onnx"], f"{tmp_path / 'none.onnx'}: No such file or folder: give"),
        ([exact, small_onnx], f"{small_onnx} is of another checkpoint than {exact}: its "),
        ([exact, "--texts", empty], f"{empty} has no texts"),
        ([reranker_onnx, "--texts", one], f"{one} has one text, and a reranker needs pairs"),
    ):
        done = invoke(*arguments)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {message}")
        assert done.stderr.count("\n") == 1
    assert invoke(exact, "--texts", tmp_path / "none.txt").exit_code == 2
    assert invoke(exact, "--min-cosine", 2).exit_code == 2
    assert invoke().exit_code == 2
    assert "prompts" in invoke(exact, small_onnx).stderr


def test_an_error_that_is_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(names: object) -> None:
        raise OSError("the connection\nwas lost")

    monkeypatch.setattr("sbert_infer.tune.cli.open_artifacts", fail)
    done = invoke("owner/model")
    assert (done.exit_code, done.stderr) == (1, "error: the connection was lost\n")


def test_a_folder_that_cannot_be_written(exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "file"))
    done = invoke(exact)
    assert done.exit_code == 1
    assert "the choice can't be kept: set SBERT_INFER_CACHE" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
def test_ctrl_c(exact: Path) -> None:
    code = "import sys; from sbert_infer.tune import cli; from sbert_infer.tune.trial import Bench\n"
    code += "Bench._seconds = lambda *_: (print('timing', flush=True), __import__('time').sleep(60))\n"
    code += "cli.main([sys.argv[1]])"
    command = [sys.executable, "-c", code, str(exact)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "timing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors.strip()) == (130, "interrupted: nothing was remembered")


def test_warnings_do_not_fill_the_screen(export_checkpoint: Callable[..., Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tune(export_checkpoint("bert", fp16=True), "--min-cosine", 0.99)  # by default it warns that there is no GPU
