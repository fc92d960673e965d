"""`sbert-export` as people type it: output, files, and one line for every mistake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sbert_infer import Engine, __version__
from sbert_infer.artifact import open_artifact
from sbert_infer.export import exporter
from sbert_infer.export.cli import main
from sbert_infer.export.families import sentence
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.precision.int8 import calibration_samples
from sbert_infer.export.report import warnings
from sbert_infer.export.verify.parity import certify
from tests.models.checkpoints import TEXTS, edit_json

MakeCheckpoint = Callable[..., Path]

SHORT = ("--max-length", "8")  # few texts to compare


def invoke(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def refused(*arguments: str | Path, code: int = 1) -> str:
    """The error of a command that must fail."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if the work starts before the request is checked."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the work was started")

    monkeypatch.setattr("sbert_infer.export.families.sentence.read_checkpoint", fail)


def test_help() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert "sbert-export model/ --int8 " in result.output
    options = (
        "--output",
        "--int8",
        "--fp16",
        "--target",
        "--lengths",
        "--max-batch-tokens",
        "--pooling",
        "--inspect",
        "--portable",
        "--max-length",
        "--calibration",
        "--min-cosine",
        "--force",
        "--quiet",
    )
    for option in (*options, "--trust-remote-code"):
        assert option in result.output
    assert invoke("-h").output == result.output


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from sbert_infer.export.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Examples:" in done.stdout


def test_version() -> None:
    assert __version__ in invoke("--version").output


def test_missing_package(monkeypatch: pytest.MonkeyPatch, make_checkpoint: MakeCheckpoint) -> None:
    for name in ("sbert_infer.export.exporter", "sbert_infer.export.families.family"):
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert refused(make_checkpoint()) == (
        "error: onnxruntime is not installed, exporting needs it: pip install 'sbert-infer[export]'\n"
    )


@pytest.mark.usefixtures("traced")
class TestOutput:
    @pytest.mark.parametrize("arguments", [(), ("--int8", "--min-cosine", "0.5")], ids=str)
    def test_default_name(self, arguments: tuple[str, ...], folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        result = invoke(f"{make_checkpoint()}/", *SHORT, *arguments)
        assert result.exit_code == 0, result.output
        name = "tiny-bert.int8.onnx" if arguments else "tiny-bert.onnx"
        assert [path.name for path in folder.iterdir()] == [name]
        assert result.stdout.startswith(name)

    def test_what_is_printed(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        result = invoke(make_checkpoint(), *SHORT)
        steps = [line.split()[0] for line in result.stderr.splitlines()]
        assert steps == ["load", "validate", "reference", "convert", "verify", "save"]
        assert "bert, mean pooling, 32 dimensions, 8 tokens" in result.stderr
        manifest = open_artifact(folder / "tiny-bert.onnx").manifest
        for part in (manifest.weights_sha256[:12], "2 of 2 attention, ", "2 of 2 gelu", "cosine min 1.000000"):
            assert part in result.stdout
        assert f"on {manifest.parity['texts']} texts of up to 8 tokens" in result.stdout

    def test_several_precisions(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        flags = ("--int8", "--fp32", "--fp16", "--target", "none", "--min-cosine", "0.5", "-o", "new")
        result = invoke(make_checkpoint(), *SHORT, *flags)
        assert result.exit_code == 0, result.output
        names = {"new/tiny-bert.onnx": "fp32", "new/tiny-bert.int8.onnx": "int8", "new/tiny-bert.plan": "fp16"}
        assert sorted(f"new/{path.name}" for path in (folder / "new").iterdir()) == sorted(names)
        assert [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "] == list(names)
        steps = [line.split()[0] for line in result.stderr.splitlines()]
        assert (steps.count("load"), steps.count("reference"), steps.count("verify")) == (1, 1, 3)
        vectors = []
        for name, precision in names.items():
            with Engine(name, device="cpu", on_truncate="ignore") as engine:
                assert engine.manifest.precision == precision
                vectors.append(engine.encode(TEXTS))
        assert 0 < abs(vectors[0] - vectors[1]).max() < 0.1
        assert invoke(make_checkpoint(), *SHORT, "-o", "alone.onnx").exit_code == 0
        with Engine("alone.onnx", on_truncate="ignore") as engine:
            assert (engine.encode(TEXTS) == vectors[0]).all()

    def test_a_refusal_costs_only_its_own_file(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        flags = ("--fp32", "--int8", "--fp16", "--target", "none", "--min-cosine", "0.99999")
        result = invoke(make_checkpoint(), *SHORT, *flags)
        assert result.exit_code == 1
        assert "8 bits are too few for this model" in result.stderr
        assert "the lowest cosine to the reference is 0." in result.stderr
        written = ["tiny-bert.onnx", "tiny-bert.plan"]  # the second one after the refusal
        assert [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "] == written
        assert sorted(path.name for path in folder.iterdir()) == written

    def test_quiet(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        assert invoke(make_checkpoint(), *SHORT, "--quiet").output == ""
        assert (folder / "tiny-bert.onnx").is_file()

    def test_into_a_folder(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        (folder / "models").mkdir()
        assert invoke(make_checkpoint(), *SHORT, "-o", "models").exit_code == 0
        assert [path.name for path in (folder / "models").iterdir()] == ["tiny-bert.onnx"]

    def test_folders_are_made(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        assert invoke(make_checkpoint(), *SHORT, "-o", "artifacts/of.mine/").exit_code == 0
        assert [path.name for path in (folder / "artifacts" / "of.mine").iterdir()] == ["tiny-bert.onnx"]
        assert invoke(make_checkpoint(), *SHORT, "-o", "new/models/tiny.onnx").exit_code == 0
        Engine(folder / "new" / "models" / "tiny.onnx").close()

    def test_relative_checkpoint(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        shutil.copytree(make_checkpoint(), folder / "my.model")
        os.chdir(folder / "my.model")
        assert invoke(".", *SHORT, "-o", "..").exit_code == 0
        assert (folder / "my.model.onnx").is_file()

    def test_existing_output(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        target = folder / "tiny-bert.onnx"
        target.write_text("mine", encoding="utf-8")
        assert refused(make_checkpoint()) == (
            "error: tiny-bert.onnx exists: give --force to replace it, or another name with -o\n"
        )
        assert target.read_text(encoding="utf-8") == "mine"
        assert invoke(make_checkpoint(), *SHORT, "--force").exit_code == 0
        Engine(target).close()

    def test_output_that_appears_meanwhile(
        self, folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = folder / "tiny-bert.onnx"

        def slow(*arguments: Any) -> Any:
            target.write_text("mine", encoding="utf-8")
            return certify(*arguments)

        monkeypatch.setattr(sentence, "certify", slow)
        assert "exists" in refused(make_checkpoint(), *SHORT, "--quiet")
        assert target.read_text(encoding="utf-8") == "mine"

    def test_lower_limit(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        assert invoke(make_checkpoint(), "--max-length", "5").exit_code == 0
        with Engine("tiny-bert.onnx", on_truncate="ignore") as engine:
            assert engine.max_seq_length == 5
            engine.encode(TEXTS)
            assert engine.last_stats.truncated == len(TEXTS)

    def test_parity_refused(self, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        target = folder / "tiny-bert.int8.onnx"
        target.write_bytes(b"old")
        arguments = ("--int8", "--min-cosine", "0.9999999", "--force", "--quiet")
        error = refused(make_checkpoint(), *SHORT, *arguments)
        assert error.startswith("error: 8 bits are too few for this model, even with 4 of 8 groups of products in FP32")
        assert "--bf16 or FP32, or accept less with --min-cosine. In 8 bits, the lowest cosine to" in error
        assert "at least 0.9999999 is needed" in error
        assert len(error.splitlines()) == 4  # with the three worst texts
        assert target.read_bytes() == b"old"
        assert list(folder.iterdir()) == [target]

    def test_calibration(self, folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []

        def spy(texts: list[str]) -> Any:
            seen.extend(texts)
            return calibration_samples(texts)

        monkeypatch.setattr(sentence, "calibration_samples", spy)
        (folder / "texts.txt").write_text("\ufeffA first text.\n\n  \nund ein zweiter\n", encoding="utf-8")
        arguments = ("--int8", "--calibration", "texts.txt", "--min-cosine", "0.1")
        assert invoke(make_checkpoint(), *SHORT, *arguments).exit_code == 0
        assert seen == ["A first text.", "und ein zweiter"]

    def test_unfused_graph_is_a_warning(
        self, folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            exporter, "count_fused", lambda *arguments: replace(count_fused(*arguments), attention=1, gelu=0)
        )
        result = invoke(make_checkpoint(), *SHORT, "--quiet")
        assert result.exit_code == 0
        assert result.output == (
            "warning: not all of the graph was fused (attention 1 of 2, gelu 0 of 2): it is right, but slower\n"
        )

    def test_portable_is_not_expected_to_be_fused(
        self, folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exporter, "count_fused", lambda *arguments: replace(count_fused(*arguments), attention=0))
        result = invoke(make_checkpoint(), *SHORT, "--portable")
        assert "warning" not in result.stderr
        assert "standard operators only" in result.stdout


@pytest.mark.usefixtures("no_work", "folder")
class TestRefusedAtOnce:
    def test_int8_and_portable(self, make_checkpoint: MakeCheckpoint) -> None:
        assert "--int8 needs operators of onnxruntime" in refused(make_checkpoint(), "--int8", "--portable")

    @pytest.mark.parametrize("cosine", ["0", "-1", "1.01", "nan"])
    def test_threshold(self, cosine: str, make_checkpoint: MakeCheckpoint) -> None:
        assert "must be above 0 and at most 1" in refused(make_checkpoint(), "--min-cosine", cosine)

    @pytest.mark.parametrize(
        ("content", "int8", "needle"),
        [
            (b"a text", False, "--calibration is for --int8 and --fp16"),
            (b"fine\ncaf\xe9\n", True, "texts.txt is not UTF-8: invalid continuation byte at byte 8"),
            (b"\xff\xfea\x00", True, "is not UTF-8"),
            (b"", True, "holds no text"),
            (b"\xef\xbb\xbf \n\n\t\n", True, "holds no text"),
        ],
    )
    def test_calibration(self, content: bytes, int8: bool, needle: str, make_checkpoint: MakeCheckpoint) -> None:
        Path("texts.txt").write_bytes(content)
        arguments = ["--calibration", "texts.txt", *(["--int8"] if int8 else [])]
        error = refused(make_checkpoint(), *arguments)
        assert needle in error
        assert len(error.splitlines()) == 1

    def test_calibration_file_is_missing(self, make_checkpoint: MakeCheckpoint) -> None:
        assert "does not exist" in refused(make_checkpoint(), "--int8", "--calibration", "no.txt", code=2)

    def test_several_precisions_in_one_file(self, make_checkpoint: MakeCheckpoint) -> None:
        error = refused(make_checkpoint(), "--fp32", "--int8", "-o", "model.onnx")
        assert error == "error: several precisions are several files: -o must name a folder, and model.onnx is none\n"
        code = "import sys; sys.modules['torch'] = None; from sbert_infer.export.cli import main; main()"
        flags = [str(make_checkpoint()), "--fp32", "--int8", "-o", "model.onnx"]
        done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)  # before torch
        assert (done.returncode, done.stderr) == (1, error)
        error = refused(make_checkpoint(), "--fp32", "--int8", "--triton-repository", "models")
        assert "--triton-repository takes one precision at a time" in error

    def test_every_output_is_checked(self, make_checkpoint: MakeCheckpoint) -> None:
        Path("tiny-bert.int8.onnx").touch()
        assert refused(make_checkpoint(), "--fp32", "--int8").startswith("error: tiny-bert.int8.onnx exists")

    def test_parent_is_a_file(self, make_checkpoint: MakeCheckpoint) -> None:
        Path("file").touch()
        error = refused(make_checkpoint(), "-o", "file/model.onnx")
        assert error.startswith("error: file/model.onnx can't be written: ")

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
    def test_unwritable_folder(self, make_checkpoint: MakeCheckpoint) -> None:
        error = refused(make_checkpoint(), "-o", "/proc/model.onnx")
        assert error.startswith("error: /proc/model.onnx can't be written: ")
        assert len(error.splitlines()) == 1

    def test_length_below_one(self, make_checkpoint: MakeCheckpoint) -> None:
        assert "--max-length" in refused(make_checkpoint(), "--max-length", "0", code=2)

    def test_no_arguments(self) -> None:
        assert "CHECKPOINT" in refused(code=2)


class TestBadCheckpoint:
    @pytest.mark.parametrize(("length", "needle"), [("2", "at least 3"), ("65", "more than the 64 tokens")])
    def test_length(self, length: str, needle: str, folder: Path, make_checkpoint: MakeCheckpoint) -> None:
        assert needle in refused(make_checkpoint(), "--max-length", length)
        assert not list(folder.iterdir())

    def test_every_problem_is_listed(self, folder: Path, copy_checkpoint: MakeCheckpoint) -> None:
        path = copy_checkpoint()
        edit_json(path / "1_Pooling" / "config.json", pooling_mode="median")
        edit_json(path / "config_sentence_transformers.json", similarity_fn_name="hamming", colour="red")
        (path / "model.safetensors").unlink()
        error = refused(path, "--quiet")
        assert error.startswith(f"error: {path}: 4 problems\n")
        for needle in ("median", "hamming", "colour", "no weights"):
            assert needle in error
        assert not list(folder.iterdir())

    def test_an_artifact_is_no_checkpoint(self, folder: Path, export_checkpoint: MakeCheckpoint) -> None:
        error = refused(export_checkpoint(), "--quiet")
        assert "a file: name the folder of a checkpoint, or a hub id" in error
        assert "--inspect" in error

    def test_broken_weights(self, folder: Path, copy_checkpoint: MakeCheckpoint) -> None:
        path = copy_checkpoint()
        (path / "model.safetensors").write_bytes(b"not weights")
        assert "can't be loaded" in refused(path, "--quiet")

    def test_not_there(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: (_ for _ in ()).throw(OSError("off")))
        assert "neither a folder here nor a model" in refused("no/such-model", "--quiet")

    def test_model_that_cannot_be_traced(
        self, folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise NotImplementedError("aten::something\nmore about it")

        monkeypatch.setattr("torch.onnx.export", fail)
        error = refused(make_checkpoint(), *SHORT, "--quiet")
        assert error == "error: bert: torch can't export this model: aten::something\n"


def test_ctrl_c(folder: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sbert_infer.export.families.sentence.load_reference", interrupt)
    assert "stopped" in refused(make_checkpoint(), *SHORT, code=130)
    assert not list(folder.iterdir())


def test_the_real_command(folder: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Nothing but our own lines: torch, transformers and the rest are silent."""
    path = make_checkpoint("albert", pooling=("mean", "lasttoken"), include_prompt=False)
    command = [sys.executable, "-m", "sbert_infer.export.cli", str(path), *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    steps = [line.split()[0] for line in done.stderr.splitlines()]
    assert steps == ["load", "validate", "reference", "convert", "verify", "save"]
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["tiny-albert.onnx", "fused", "parity", "use"]
    assert [file.name for file in folder.iterdir()] == ["tiny-albert.onnx"]


def test_a_plain_transformer_is_a_warning(tmp_path: Path, export_checkpoint: MakeCheckpoint) -> None:
    manifest = open_artifact(export_checkpoint()).manifest
    (tmp_path / "modules.json").touch()
    assert not list(warnings(str(tmp_path), manifest, portable=False))
    (tmp_path / "modules.json").unlink()
    (warning,) = warnings(str(tmp_path), manifest, portable=False)
    assert "no modules.json: taken as a plain transformer with mean pooling" in warning
    assert not list(warnings(str(tmp_path), replace(manifest, kind="reranker"), portable=False))
