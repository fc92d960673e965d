"""`sbert-export --fp16` and `--inspect`, as people type them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from sbert_infer import CorruptError, Engine
from sbert_infer.artifact.plan_file import MODEL, open_plan
from sbert_infer.export import plan_exporter as plan_export
from sbert_infer.export.cli import main
from tests.models.checkpoints import TEXTS, WIDTH

MakeCheckpoint = Callable[..., Path]

SHORT = ("--fp16", "--max-length", "8")


def invoke(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str | Path) -> str:
    """The error of a command that must fail, and write nothing."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert not list(Path.cwd().iterdir())
    return result.stderr


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    path = tmp_path / "here"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def test_a_plan_without_engines(make_checkpoint: MakeCheckpoint) -> None:
    result = invoke(make_checkpoint(), *SHORT, "--target", "none")
    assert result.exit_code == 0, result.output
    assert "none inside: one is built at first use" in result.stdout
    plan = open_plan(Path("tiny-bert.plan"))
    assert not plan.engines
    assert plan.manifest.precision == "fp16"
    assert plan.manifest.parity["min_cosine"] >= plan.manifest.parity["threshold"] == 0.999
    assert plan.rows.shapes[-1].length == plan.manifest.max_length == 8
    assert plan.rows.inputs == ("input_ids", "segment_ids", "position_ids", "starts", "ends")
    assert plan.rows.hidden == WIDTH

    report = invoke("--inspect", "tiny-bert.plan")
    assert report.exit_code == 0
    for text in (
        "plan, ",
        "fp16",
        "none inside",
        "x 8 tokens, up to 2 texts in a row",
        "cosine min",
        *plan.members,
        plan.members[MODEL][1],
    ):
        assert text in report.stdout, text

    content = bytearray(plan.path.read_bytes())
    content[content.index(b"sbert-infer", len(content) // 4)] ^= 1  # within a member
    plan.path.write_bytes(content)
    damaged = invoke("--inspect", "tiny-bert.plan")
    assert damaged.exit_code == 1
    assert "tiny-bert.plan" in damaged.stderr


@pytest.mark.usefixtures("traced")
def test_engines_are_real(make_checkpoint: MakeCheckpoint) -> None:
    pytest.importorskip("tensorrt_rtx")
    result = invoke(make_checkpoint(), *SHORT, "--target", "sm89", "--target", "SM_120")
    assert result.exit_code == 0, result.output
    plan = open_plan(Path("tiny-bert.plan"))
    assert [engine.target for engine in plan.engines] == ["sm89", "sm120"]
    contents = [plan.read(engine.name) for engine in plan.engines]
    assert min(map(len, contents)) > 10_000
    assert contents[0] != contents[1]
    assert "tensorrt_rtx" in result.stdout
    assert "sm89" in invoke("--inspect", "tiny-bert.plan").stdout


def test_a_gpu_that_is_not_known(make_checkpoint: MakeCheckpoint) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert "sm89, " in refused(make_checkpoint(), *SHORT, "--target", "sm90")
    assert "got 'sm89,'" in refused(make_checkpoint(), *SHORT, "--target", "sm89,")


def test_without_the_package_that_builds(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert "pip install" in refused(make_checkpoint(), *SHORT, "--target", "sm89")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fp16", "--portable"), "--fp16"),
        (("--bf16", "--portable"), "leave out --portable"),
        (("--target", "sm89"), "--target"),
        (("--pooling", "kernel"), "--pooling"),
        (("--max-batch-tokens", "64"), "--max-batch-tokens"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], words: str, make_checkpoint: MakeCheckpoint
) -> None:
    assert words in refused(make_checkpoint(), *arguments)


@pytest.mark.usefixtures("traced")
def test_rows_follow_the_lengths_given(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    numbers = tmp_path / "lengths.txt"
    numbers.write_text("\n".join(["40"] * 100))
    options = ("--fp16", "--target", "none", "--max-batch-tokens", "256")
    assert invoke(make_checkpoint(), *options, "--lengths", numbers).exit_code == 0
    shapes = open_plan(Path("tiny-bert.plan")).rows.shapes
    assert {shape.length for shape in shapes} == {40, 64}  # texts of 40 tokens would leave the most of 64 empty
    assert max(shape.tokens for shape in shapes) <= 256
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    result = invoke(make_checkpoint(), *options, "--calibration", texts, "--force")
    assert result.exit_code == 0
    assert "tokens, packed" in result.stderr
    assert {shape.length for shape in open_plan(Path("tiny-bert.plan")).rows.shapes} != {40, 64}


def test_lengths_that_are_no_numbers(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    numbers = tmp_path / "lengths.txt"
    numbers.write_text("12\nA whole text\n")
    error = refused(make_checkpoint(), *SHORT, "--lengths", numbers)
    assert "line 2" in error
    assert "'A whole text'" in error


def test_activations_that_fp16_can_not_hold(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    weights = load_file(path / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"] *= 1e5
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    error = refused(path, *SHORT, "--target", "none")
    assert "layer.1.output.dense" in error
    assert "65504" in error


@pytest.mark.usefixtures("traced")
def test_nothing_is_written_if_the_vectors_differ(make_checkpoint: MakeCheckpoint) -> None:
    assert "cosine" in refused(make_checkpoint(), *SHORT, "--target", "none", "--min-cosine", "0.99999999")


@pytest.mark.usefixtures("traced")
def test_a_plan_in_bf16(make_checkpoint: MakeCheckpoint) -> None:
    assert invoke(make_checkpoint(), *SHORT, "--bf16", "--target", "none").exit_code == 0
    plan = open_plan(Path("tiny-bert.plan"))
    assert plan.manifest.precision == "bf16"
    assert plan.manifest.parity["threshold"] == 0.995
    assert "bf16" in invoke("--inspect", "tiny-bert.plan").stdout


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("precision", "packed"), [((), False), (("--bf16",), True)])
def test_rounding_among_others_is_judged_by_precision(
    precision: tuple[str, ...], packed: bool, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_export, "cosine_among_others", lambda *_: 0.99951)
    result = invoke(make_checkpoint(), *SHORT, *precision, "--target", "none")
    assert result.exit_code == 0, result.output
    assert ("cosine 0.999510" in result.stderr) == (not packed)
    assert ("tokens, packed" in result.stderr) == packed
    assert {shape.segments > 1 for shape in open_plan(Path("tiny-bert.plan")).rows.shapes} == {packed}


def test_a_model_beyond_fp16_is_exported_to_bf16(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint("t5")
    weights = load_file(path / "model.safetensors")
    weights["encoder.block.1.layer.1.DenseReluDense.wo.weight"] *= 1e5  # its residual sum, not what follows the norm
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    error = refused(path, *SHORT, "--target", "none")
    assert "encoder.block.1.layer.1.DenseReluDense.wo" in error
    assert "--fp16 --bf16" in error

    result = invoke(path, *SHORT, "--bf16", "--target", "none")
    assert result.exit_code == 0, result.output
    expected = SentenceTransformer(str(path), device="cpu").encode(["a b", "c"])
    with Engine("tiny-t5.plan", device="cpu") as engine:
        vectors = engine.encode(["a b", "c"])
    assert (vectors * expected).sum(1).min() > 0.999


@pytest.mark.usefixtures("traced")
def test_bf16_for_a_gpu_that_has_none(make_checkpoint: MakeCheckpoint) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert "sm75 has no BF16" in refused(make_checkpoint(), *SHORT, "--bf16", "--target", "sm75,sm89")


@pytest.mark.usefixtures("traced")
def test_pooling_by_the_kernel(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The TensorRT engines give token vectors; the model inside the plan gives both."""
    pytest.importorskip("tensorrt_rtx")
    kept = []

    def build(*_: object, output: str, **__: object) -> bytes:
        kept.append(output)
        return b"engine"

    monkeypatch.setattr(plan_export, "build", build)
    for pooling in ("graph", "kernel"):
        options = ("--target", "sm89", "--pooling", pooling, "-o", f"{pooling}.plan")
        assert invoke(make_checkpoint(), *SHORT, *options).exit_code == 0
        assert open_plan(Path(f"{pooling}.plan")).pooling == pooling
    assert kept == ["sentence_embedding", "token_embeddings"]
    models = {open_plan(Path(f"{pooling}.plan")).read(MODEL) for pooling in ("graph", "kernel")}
    assert len(models) == 1


def test_pooling_that_the_kernel_can_not_do(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(pooling=("cls",))
    assert "cls pooling" in refused(path, *SHORT, "--target", "none", "--pooling", "kernel")


def test_the_kernel_leaves_out_prompts(make_checkpoint: MakeCheckpoint) -> None:
    """It is told which tokens to pool, so a model that pools without its prompt can use it."""
    path = make_checkpoint(include_prompt=False, prompts={"query": "Find this: "})
    result = invoke(path, *SHORT, "--target", "none", "--pooling", "kernel")
    assert result.exit_code == 0, result.output
    plan = open_plan(Path("tiny-bert.plan"))
    assert (plan.pooling, plan.manifest.include_prompt) == ("kernel", False)


@pytest.mark.usefixtures("traced")
def test_a_model_that_is_too_large(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_export, "MAX_PROTOBUF_BYTES", 1000)
    assert "2 GB" in refused(make_checkpoint(), *SHORT, "--target", "none")


def test_inspecting_an_onnx_model(export_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = export_checkpoint()
    report = invoke("--inspect", path)
    assert report.exit_code == 0
    for text in ("ONNX", "fp32", "attention", "cosine min", "every byte"):
        assert text in report.stdout
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(path.read_bytes()[:-5])
    assert invoke("--inspect", torn).exit_code == 1
    with pytest.raises(CorruptError):
        Engine(torn)
    assert invoke("--inspect", "nowhere.plan").exit_code == 1
