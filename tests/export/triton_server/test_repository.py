"""The Triton repository: configurations by Triton's definition, steps by a double of the server.

The server itself does not run here: `tests/doubles/triton.py` says what stands in for it.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer import Engine
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import DataFile, Manifest
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.artifact.plan_file import (
    CPU_GRAPH,
    CUDA_GRAPH,
    MODEL,
    EngineFile,
    PackedRowsModel,
    open_plan,
    write_plan,
)
from sbert_infer.errors import ExportError
from sbert_infer.export import exporter
from sbert_infer.export.cli import main
from sbert_infer.export.options import ExportOptions
from sbert_infer.export.precision.cpu_graph import make_cpu_graph
from sbert_infer.export.precision.cuda_graph import make_cuda_graph
from sbert_infer.export.triton_server import repository as triton_repository
from sbert_infer.export.triton_server.config import model_config
from sbert_infer.export.triton_server.repository import write_repository
from sbert_infer.similarity import unit_rows
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import Shape
from tests.doubles.triton import (
    KIND_CPU,
    KIND_GPU,
    PythonModel,
    RefusedError,
    Request,
    Server,
    check_ensemble,
    read_config,
)
from tests.models.checkpoints import ODD_TEXTS, TEXTS

# A model in which every choice of prompts and dimensions shows in the vectors.
PROMPTED: dict[str, Any] = {
    "prompts": {"query": "find this: ", "document": "", "other": "sort these by topic: "},
    "default_prompt_name": "other",
    "include_prompt": False,
    "truncate_dim": 24,
    "normalize": False,
}
ALL = [*ODD_TEXTS, *TEXTS]
CLOSE = 1e-5  # of vectors about 5 long: padded to another length, sums are taken in another order


@pytest.fixture(scope="module")
def prompted(export_checkpoint: Callable[..., Path]) -> Path:
    return export_checkpoint("bert", **PROMPTED)


@pytest.fixture(scope="module")
def plan(prompted: Path, graph_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in FP16, with a TensorRT engine, which is not real."""
    path = tmp_path_factory.mktemp("plan") / "bert.plan"
    artifact, half = open_artifact(prompted), graph_of("bert", "half", **PROMPTED).read_bytes()
    fused, cuda = (ir.from_proto(onnx.load(graph_of("bert", kind, **PROMPTED))) for kind in ("fused", "cuda"))
    with path.open("wb") as file:
        write_plan(
            file,
            replace(artifact.manifest, precision="fp16"),
            artifact.tokenizer_json,
            model=half,
            cpu_graph=make_cpu_graph(fused, half),
            cuda_graph=make_cuda_graph(cuda, half),
            engines={EngineFile("tensorrt", "10.9.0", "sm89", "NVIDIA L4"): b"engine"},
            rows=PackedRowsModel(("input_ids", "segment_ids", "starts", "ends"), 32, (Shape(1, 64, 16),)),
            pooling="graph",
        )
    return path


@pytest.fixture(scope="module")
def minilm_step(prompted: Path, minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PythonModel:
    """The tokenizer step with MiniLM's real tokenizer, padding on the left, and any graph."""
    folder = tmp_path_factory.mktemp("minilm")
    content = (minilm_path / "tokenizer.json").read_text(encoding="utf-8")
    model = onnx.load(prompted)
    del model.metadata_props[:]
    plain: dict[str, Any] = {
        "max_length": 32,
        "prompts": {},
        "default_prompt_name": None,
        "padding_side": "left",
        "pad_id": 3,
    }
    with (folder / "minilm.onnx").open("w+b") as file:
        file.write(model.SerializeToString())
        append_metadata(file, replace(open_artifact(prompted).manifest, **plain), content)
    write_repository(folder / "minilm.onnx", folder / "models")
    return PythonModel(folder / "models" / "minilm_tokenizer")


@pytest.fixture(scope="module")
def minilm_tokenizer(minilm_path: Path) -> Tokenizer:
    return Tokenizer((minilm_path / "tokenizer.json").read_text(encoding="utf-8"), max_length=32)


def vectors(server: Server, name: str, *requests: Request) -> npt.NDArray[np.float32]:
    outcomes = server.infer(name, *requests)
    assert [outcome for outcome in outcomes if isinstance(outcome, RefusedError)] == []
    return np.concatenate([outcome["sentence_embedding"] for outcome in outcomes if isinstance(outcome, dict)])


def without_cuda_graph(plan: Path, target: Path) -> Path:
    """As a BF16 plan is."""
    opened = open_plan(plan)
    with target.open("wb") as file:
        write_plan(
            file,
            opened.manifest,
            opened.tokenizer_json,
            model=opened.read(MODEL),
            cpu_graph=opened.read(CPU_GRAPH),
            cuda_graph=None,
            engines={},
            rows=opened.rows,
            pooling="graph",
        )
    return target


# Vectors ------------------------------------------------------------------------------------------


def test_the_ensemble_gives_the_vectors_of_the_engine(prompted: Path, tmp_path: Path) -> None:
    served = write_repository(prompted, tmp_path / "models").served
    server = Server(tmp_path / "models")
    with Engine(prompted, on_truncate="ignore") as engine:
        expected = engine.encode(ALL)
    assert served.dim == expected.shape[1] == 24
    for requests in ([Request.of(text) for text in ALL], [Request.of(*ALL[:7]), Request.of(*ALL[7:])]):
        np.testing.assert_allclose(vectors(server, served.name, *requests), expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("graph", [CUDA_GRAPH, CPU_GRAPH])
def test_a_plan_is_served_by_onnxruntime_on_gpus(plan: Path, prompted: Path, tmp_path: Path, graph: str) -> None:
    path = plan if graph == CUDA_GRAPH else without_cuda_graph(plan, tmp_path / "bert.plan")
    repository = write_repository(path, tmp_path / "models")
    server = Server(tmp_path / "models")
    config = server.models["bert_model"].config
    assert (config.platform, config.instance_group[0].kind) == ("onnxruntime_onnx", KIND_GPU)
    assert config.optimization.graph.level == -1  # the graph is fused already
    assert ("packed rows" if graph == CUDA_GRAPH else "it runs in FP32") in repository.summary()
    (file,) = (tmp_path / "models" / "bert_model" / "1").iterdir()  # with its weights inside
    assert file.name == "model.onnx"
    assert (onnx.TensorProto.FLOAT16 in types_of_products(onnx.load(file))) == (graph == CUDA_GRAPH)
    with Engine(prompted, on_truncate="ignore") as engine:
        expected = engine.encode(ALL, normalize_embeddings=True)
    got = unit_rows(vectors(server, "bert", *map(Request.of, ALL)))
    assert (got * expected).sum(axis=1).min() > 0.9999


def types_of_products(model: onnx.ModelProto) -> set[int]:
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    return {types.get(node.output[0], 0) for node in model.graph.node if node.op_type == "MatMul"}


def test_each_request_has_its_own_prompt(prompted: Path, tmp_path: Path) -> None:
    name = write_repository(prompted, tmp_path / "models").served.name
    server = Server(tmp_path / "models")
    requests = [
        Request.of("a cat", prompt_name="query"),
        Request.of("a cat"),
        Request.of("a cat", prompt=""),
        Request.of("a cat", prompt="say it: "),
    ]
    with Engine(prompted) as engine:
        options: list[dict[str, Any]] = [{"prompt_name": "query"}, {}, {"prompt": ""}, {"prompt": "say it: "}]
        expected = np.stack([engine.encode("a cat", **each) for each in options])
    np.testing.assert_allclose(vectors(server, name, *requests), expected, rtol=0, atol=CLOSE)
    assert server.models[f"{name}_model"].shapes[-1][0] == len(requests)  # they ran together


# Requests -----------------------------------------------------------------------------------------


def test_a_bad_request_fails_alone_and_says_why(prompted: Path, tmp_path: Path) -> None:
    name = write_repository(prompted, tmp_path / "models").served.name
    server = Server(tmp_path / "models")
    good, latin1, unknown, last = server.infer(
        name, Request.of("fine"), Request.of("ok", b"caf\xe9"), Request.of("x", prompt_name="no"), Request.of("fine")
    )
    assert str(latin1) == "text 1 is not UTF-8: unexpected end of data at byte 3"
    assert str(unknown) == "prompt_name 'no' is not among the model's prompts: ['document', 'other', 'query']"
    assert isinstance(good, dict)
    assert isinstance(last, dict)
    np.testing.assert_allclose(good["sentence_embedding"], last["sentence_embedding"], rtol=0, atol=CLOSE)


def test_a_text_that_was_cut_is_reported_or_refused(prompted: Path, tmp_path: Path) -> None:
    name = write_repository(prompted, tmp_path / "models").served.name
    (outcome,) = Server(tmp_path / "models").infer(name, Request.of("short", " ".join(TEXTS)))
    assert isinstance(outcome, dict)
    assert outcome["truncated"].tolist() == [[False], [True]]
    config = tmp_path / "models" / f"{name}_tokenizer" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "report"', 'string_value: "error"'))
    (outcome,) = Server(tmp_path / "models").infer(name, Request.of("short", " ".join(TEXTS)))
    limit = open_artifact(prompted).manifest.max_length
    assert str(outcome) == f"text 1 is longer than the model's limit of {limit} tokens"
    config.write_text(config.read_text().replace('string_value: "error"', 'string_value: "ignore"'))
    with pytest.raises(ValueError, match="'report' or 'error', got 'ignore'"):
        Server(tmp_path / "models")


def test_requests_of_one_bucket_run_together(prompted: Path, tmp_path: Path) -> None:
    served = write_repository(prompted, tmp_path / "models").served
    server = Server(tmp_path / "models")
    model = server.models[f"{served.name}_model"]
    model.shapes.clear()
    vectors(server, served.name, *(Request.of(text, prompt="") for text in ("a", "a cat", "the dog", "so few words")))
    assert model.shapes == [(4, served.edges[0])]
    vectors(server, served.name, *map(Request.of, ALL))
    assert {length for _, length in model.shapes} <= set(served.edges)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=6))
def test_the_tokens_are_those_of_the_engine(
    minilm_step: PythonModel, minilm_tokenizer: Tokenizer, texts: list[str]
) -> None:
    (outcome,) = minilm_step.run([Request.of(*texts)])
    assert isinstance(outcome, dict)
    tokenized = minilm_tokenizer(texts)
    length = outcome["input_ids"].shape[1]
    assert length == (16 if tokenized.lengths.max() <= 16 else 32)
    ids, mask, _ = tokenized.padded(np.arange(len(texts)), length, 3, "left")
    np.testing.assert_array_equal(outcome["input_ids"], ids)
    np.testing.assert_array_equal(outcome["attention_mask"], mask)
    np.testing.assert_array_equal(outcome["truncated"][:, 0], tokenized.truncated)


# What runs ----------------------------------------------------------------------------------------


def test_on_cpus_each_instance_has_one_thread(prompted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_repository, "usable_cores", lambda: 3)
    served = write_repository(prompted, tmp_path / "models").served
    config = read_config(tmp_path / "models" / f"{prompted.stem}_model")
    assert (config.instance_group[0].kind, config.instance_group[0].count) == (KIND_CPU, 3)
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    assert config.optimization.graph.level == -1  # the graph is fused already
    assert "optimization" not in model_config(replace(served, fused=False))
    assert config.dynamic_batching.default_queue_policy.max_queue_size > config.max_batch_size
    assert len(config.model_warmup) == len({tuple(each.inputs["input_ids"].dims) for each in config.model_warmup}) > 1


def test_a_long_limit_does_not_let_many_long_texts_run_together(minilm_step: PythonModel, prompted: Path) -> None:
    assert minilm_step.config.max_batch_size == 32
    artifact = open_artifact(prompted)
    long = replace(artifact, manifest=replace(artifact.manifest, max_length=8192))
    assert triton_repository._served(long).max_batch == 1


def test_batches_on_gpus(plan: Path, tmp_path: Path) -> None:
    """Every length is run before the first request, in batches no larger than `Engine` runs."""
    served = write_repository(plan, tmp_path / "models").served
    configs = {name: read_config(tmp_path / "models" / name) for name in ("bert", "bert_model", "bert_tokenizer")}
    check_ensemble(configs["bert"], configs)
    model = configs["bert_model"]
    assert [each.inputs["input_ids"].dims[0] for each in model.model_warmup] == list(served.edges) == [16, 32, 64]
    assert model.max_batch_size == served.batch_tokens // 64
    assert all(each.batch_size <= model.max_batch_size for each in model.model_warmup)


@given(longest=st.integers(1, 40000))
def test_lengths_that_texts_are_padded_to(longest: int) -> None:
    edges = triton_repository._edges(longest)
    assert edges[-1] == longest
    assert list(edges) == sorted(set(edges))
    assert all(edge % 8 == 0 for edge in edges[:-1])
    assert all(after <= 2 * before for before, after in pairwise(edges))


# Files --------------------------------------------------------------------------------------------


def test_the_tokenizer_step_needs_numpy_and_tokenizers_only(prompted: Path, tmp_path: Path) -> None:
    write_repository(prompted, tmp_path / "models")
    tree = ast.parse((tmp_path / "models" / f"{prompted.stem}_tokenizer/1/model.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    third_party = {"numpy", "numpy.typing", "tokenizers", "triton_python_backend_utils"}
    assert names == third_party | {"__future__", "json", "pathlib", "typing"}


def test_a_repository_keeps_its_other_models(prompted: Path, tmp_path: Path) -> None:
    other = tmp_path / "models" / "resnet" / "config.pbtxt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    write_repository(prompted, tmp_path / "models")
    with pytest.raises(ExportError, match="exists: give --force to replace it"):
        write_repository(prompted, tmp_path / "models")
    model = tmp_path / "models" / f"{prompted.stem}_model" / "1" / "model.onnx"
    model.write_bytes(b"old")
    write_repository(prompted, tmp_path / "models", force=True)
    assert model.stat().st_size > 1000
    assert other.read_text() == "mine"
    assert len(list((tmp_path / "models").iterdir())) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


def test_a_failure_leaves_nothing_behind(prompted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton_repository, "_write_ensemble", full)
    with pytest.raises(ExportError, match="models can't be written: No space left on device"):
        write_repository(prompted, tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


def test_weights_beside_a_large_model_come_along(
    prompted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = open_artifact(prompted)
    weights = tmp_path / "model.onnx.data"
    weights.write_bytes(b"weights")
    large = replace(artifact.manifest, data_files=(DataFile(weights.name, 7, ""),))
    copy = Path(shutil.copy(prompted, tmp_path / "model.onnx"))
    monkeypatch.setattr(triton_repository, "open_artifact", lambda path: replace(artifact, path=copy, manifest=large))
    write_repository(copy, tmp_path / "models")
    assert (tmp_path / "models" / "model_model" / "1" / weights.name).read_bytes() == b"weights"


# The command --------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_the_command_takes_an_artifact(prompted: Path, tmp_path: Path) -> None:
    code, output = run(prompted, "--triton-repository", tmp_path / "models")
    assert code == 0, output
    assert f"use      tritonserver --model-repository {tmp_path / 'models'}" in output
    assert vectors(Server(tmp_path / "models"), prompted.stem, Request.of("a cat")).shape == (1, 24)


def test_the_command_refuses_what_it_would_ignore(prompted: Path, tmp_path: Path) -> None:
    code, output = run(prompted, "--int8", "--triton-repository", tmp_path / "models")
    assert (code, output) == (1, f"error: --int8 is for exporting a checkpoint, but {prompted} is a file\n")
    assert not (tmp_path / "models").exists()


def test_the_command_exports_and_writes_the_repository(
    make_checkpoint: Callable[..., Path], prompted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(
        source: str, wanted: list[tuple[Path, ExportOptions]], **options: object
    ) -> Iterator[tuple[Path, Manifest]]:
        """Replaces the export, which takes a while and is tested elsewhere."""
        for target, _ in wanted:
            yield target, open_artifact(shutil.copy(prompted, target)).manifest

    monkeypatch.setattr(exporter, "export_all", copy)
    arguments: list[str | Path] = [make_checkpoint(), "-o", tmp_path / "tiny.onnx", "--triton-repository"]
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    code, output = run(*arguments, tmp_path / "models")
    assert code == 1
    assert f"{tmp_path / 'models' / 'tiny'} exists" in output
    assert not (tmp_path / "tiny.onnx").exists()  # seen before the work began
    code, output = run(*arguments, tmp_path / "new")
    assert code == 0, output
    assert (tmp_path / "tiny.onnx").exists()
    assert vectors(Server(tmp_path / "new"), "tiny", Request.of("a cat")).shape == (1, 24)
