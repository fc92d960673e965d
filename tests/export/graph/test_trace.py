"""An exported graph gives the vectors of sentence-transformers, is fused, and opens anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from sentence_transformers import SentenceTransformer

import sbert_infer
from sbert_infer import Engine
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.graph.fuse import fuse
from sbert_infer.export.graph.operators import _plain_attention, fused_operators, plain_operators
from sbert_infer.export.graph.trace import OPSET, convert
from sbert_infer.export.reference.encoder import load_reference
from tests.export.cases import CASES
from tests.models.checkpoints import FAMILIES, LAYERS, ODD_TEXTS, TEXTS
from tests.models.graphs import Array, assert_close, constants, cosine, nodes, open_session, run, tokens

MakeCheckpoint = Callable[..., Path]

MIN_COSINE, MAX_ABS = 0.99999, 2e-5
ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
PORTABLE = ("mpnet", "albert")
ONE_LAYER = {"num_hidden_layers": 1}  # is enough where there is a conversion for one test only


def assert_same(vectors: Array, expected: Array) -> None:
    assert cosine(vectors, expected).min() >= MIN_COSINE
    assert_close(vectors, expected, MAX_ABS)


@pytest.fixture(scope="module", params=[*FAMILIES, *(f"{family}-portable" for family in PORTABLE)])
def exported(
    request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint
) -> tuple[Path, Path, bool]:
    """A checkpoint, its artifact, and whether that is the portable one."""
    family, portable = request.param.removesuffix("-portable"), request.param.endswith("-portable")
    options = CASES[family]
    return make_checkpoint(family, **options), export_checkpoint(family, portable=portable, **options), portable


def test_vectors(exported: tuple[Path, Path, bool]) -> None:
    checkpoint, path, _ = exported
    model = SentenceTransformer(str(checkpoint), device="cpu")
    with Engine(path, on_truncate="ignore") as engine:
        for prompt in (None, "", *filter(None, engine.prompts.values())):
            expected = model.encode(ALL_TEXTS, prompt=prompt)
            assert_same(engine.encode(ALL_TEXTS, prompt=prompt), expected)
            if prompt is None:
                assert_same(np.stack([engine.encode(text) for text in ALL_TEXTS]), expected)
        assert len(np.unique(engine.encode(TEXTS).round(2), axis=0)) == len(TEXTS), "the texts must be told apart"


def test_manifest_says_what_the_checkpoint_says(exported: tuple[Path, Path, bool]) -> None:
    checkpoint, path, _ = exported
    model = SentenceTransformer(str(checkpoint), device="cpu")
    with Engine(path) as engine:
        manifest = engine.manifest
    saved = (manifest.prompts, manifest.default_prompt_name, manifest.similarity, manifest.truncate_dim)
    assert saved == (model.prompts, model.default_prompt_name, model.similarity_fn_name, model.truncate_dim)
    assert manifest.max_length == model.max_seq_length
    assert manifest.padding_side == model.tokenizer.padding_side
    (pooling,) = (module for module in model if type(module).__name__ == "Pooling")
    assert manifest.include_prompt == pooling.include_prompt
    assert manifest.parity["min_cosine"] > MIN_COSINE
    assert manifest.parity["max_length"] == manifest.max_length


def test_fused_nodes(exported: tuple[Path, Path, bool]) -> None:
    _, path, portable = exported
    model = onnx.load(path)
    with Engine(path) as engine:
        fusion = engine.manifest.fusion
    found = {
        "attention": len(nodes(model, "MultiHeadAttention")),
        "gelu": len(nodes(model, "BiasGelu", "Gelu", "FastGelu")),
    }
    assert found.items() <= fusion.items()
    assert fusion["layers"] == fusion["gelu_layers"] == LAYERS
    if portable:
        assert set(found.values()) == {0}
        return
    assert found["attention"] == found["gelu"] == LAYERS
    assert len(nodes(model, "LayerNormalization")) >= 2 * LAYERS
    assert not nodes(model, "Softmax", "SkipLayerNormalization")
    # Connected to the products directly: no reshapes to heads and back, biases in the operator.
    made_by = {output: node.op_type for node in model.graph.node for output in node.output}
    for node in nodes(model, "MultiHeadAttention"):
        inner = [made_by[name] for name in node.input[:3]]
        assert inner == (["Add"] * 3 if "mpnet" in path.name and not node.input[3] else ["MatMul"] * 3)


def test_opens_in_plain_onnxruntime(exported: tuple[Path, Path, bool], tmp_path: Path) -> None:
    _, path, portable = exported
    alone = tmp_path / "elsewhere.onnx"
    alone.write_bytes(path.read_bytes())
    session = open_session(alone)
    with Engine(path) as engine:
        manifest = engine.manifest
        expected = engine.encode(TEXTS, prompt="", truncate_dim=manifest.dim)
    assert {value.name: value.shape for value in session.get_inputs()} == {
        "input_ids": ["batch", "length"],
        "attention_mask": ["batch", "length"],
    }
    optional = [value.name for value in session.get_overridable_initializers()]
    assert optional == ([] if manifest.include_prompt else ["prompt_length"])
    (output,) = session.get_outputs()
    assert (output.name, output.shape, output.type) == ("sentence_embedding", ["batch", manifest.dim], "tensor(float)")
    assert_same(run(alone, tokens(path, TEXTS)), expected)
    onnx.checker.check_model(onnx.load(alone), full_check=portable)


def test_operators_of_the_graph(exported: tuple[Path, Path, bool]) -> None:
    _, path, portable = exported
    model = onnx.load(path)
    domains = {node.domain for node in model.graph.node} | {entry.domain for entry in model.opset_import}
    assert domains == ({""} if portable else {"", "com.microsoft"})
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET
    assert not model.functions
    assert (model.producer_name, model.producer_version) == ("sbert-infer", sbert_infer.__version__)


def test_nothing_of_this_machine_in_the_file(exported: tuple[Path, Path, bool]) -> None:
    checkpoint, path, _ = exported
    content = path.read_bytes()
    for trace in (b"site-packages", b".py", b"Traceback", b"stack_trace", bytes(checkpoint.parent), bytes(Path.cwd())):
        assert trace not in content
    model = onnx.load(path)
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


def test_a_row_of_padding_gives_no_nan(exported: tuple[Path, Path, bool]) -> None:
    _, path, _ = exported
    inputs = tokens(path, ["some text", *TEXTS[:2]])
    expected = run(path, inputs)
    inputs["attention_mask"][0] = 0
    vectors = run(path, inputs)
    assert np.isfinite(vectors).all()
    assert_close(vectors[1:], expected[1:], 1e-6)


def test_a_prompt_over_everything_gives_no_nan(export_checkpoint: MakeCheckpoint) -> None:
    path = export_checkpoint("albert", **CASES["albert"])
    inputs = tokens(path, TEXTS[:2])
    whole, none = (run(path, {**inputs, "prompt_length": np.array(length)}) for length in (0, 99))
    assert np.isfinite(none).all()
    assert np.abs(whole - none).max() > 0.1
    np.testing.assert_array_equal(whole, run(path, inputs))  # the default is 0


def test_lower_case_and_truncation(export_checkpoint: MakeCheckpoint) -> None:
    with Engine(export_checkpoint("roberta", **CASES["roberta"])) as engine:
        np.testing.assert_array_equal(engine.encode("SHIPS Pass"), engine.encode("ships pass"))
        assert engine.encode("a").shape == (24,)
        assert np.abs(engine.encode("a") - engine.encode("a", prompt="")).max() > 0.01  # the default prompt


def test_layouts_give_identical_vectors(export_checkpoint: MakeCheckpoint) -> None:
    new = Engine(export_checkpoint(), on_truncate="ignore")
    old = Engine(export_checkpoint(layout="old"), on_truncate="ignore")
    assert new.manifest.weights_sha256 != old.manifest.weights_sha256  # safetensors and .bin
    np.testing.assert_array_equal(new.encode(ALL_TEXTS), old.encode(ALL_TEXTS))


def test_shared_weights_are_stored_once(make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint) -> None:
    path = export_checkpoint("albert", **CASES["albert"])
    stored = sum(array.nbytes for array in constants(onnx.load(path)).values())
    reference = load_reference(read_checkpoint(make_checkpoint("albert", **CASES["albert"])))
    assert stored < 1.1 * sum(4 * parameter.numel() for parameter in reference.parameters())


def test_shortest_limit(make_checkpoint: MakeCheckpoint) -> None:
    reference = load_reference(read_checkpoint(make_checkpoint(config=ONE_LAYER), max_length=3))
    model = ir.to_proto(convert(reference))
    ids, mask = reference.tokenize(["a", *TEXTS])
    vectors = run(model, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    assert_same(vectors, reference.encode(["a", *TEXTS]))


# -------------------------------------------------------------------------------------------------
# operators and fusion


@pytest.mark.parametrize("operators", [fused_operators, plain_operators])
@pytest.mark.parametrize("family", ["bert", "mpnet", "albert"])
def test_the_model_is_left_as_it_was(family: str, operators: Any, make_checkpoint: MakeCheckpoint) -> None:
    reference = load_reference(read_checkpoint(make_checkpoint(family)))
    config: Any = reference.encoder.config
    before, attention = reference.encode(TEXTS), config._attn_implementation

    def fail() -> None:
        with operators(reference.encoder):
            patched = [module for module in reference.encoder.modules() if "forward" in vars(module)]
            assert patched or config._attn_implementation != attention
            raise RuntimeError("tracing failed")

    with pytest.raises(RuntimeError, match="tracing failed"):
        fail()
    assert config._attn_implementation == attention
    assert not any("forward" in vars(module) for module in reference.encoder.modules())
    np.testing.assert_array_equal(reference.encode(TEXTS), before)


def test_portable_attention_is_two_products_and_a_softmax(export_checkpoint: MakeCheckpoint) -> None:
    """TensorRT recognises this, but not the export of `scaled_dot_product_attention`."""
    model = onnx.load(export_checkpoint("mpnet", portable=True, **CASES["mpnet"]))
    made_by = {output: node for node in model.graph.node for output in node.output}
    softmaxes = nodes(model, "Softmax")
    assert len(softmaxes) == LAYERS
    for node in softmaxes:
        scores = made_by[node.input[0]]
        assert scores.op_type == "Add"
        assert "MatMul" in [made_by[name].op_type for name in scores.input]
        assert [user.op_type for user in model.graph.node if node.output[0] in user.input] == ["MatMul"]
    assert not nodes(model, "IsNaN", "GatherND")
    numbers = [array for array in constants(model).values() if array.dtype == np.float32]
    assert min(float(array.min()) for array in numbers) >= -1e4


@pytest.mark.parametrize("portable", [False, True])
def test_causal_attention(portable: bool, make_checkpoint: MakeCheckpoint) -> None:
    reference = load_reference(read_checkpoint(make_checkpoint(config=ONE_LAYER)))
    bidirectional = reference.encode(TEXTS)
    config: Any = reference.encoder.config
    config.is_decoder, config.use_cache = True, False
    expected = reference.encode(TEXTS)
    assert np.abs(expected - bidirectional).max() > 0.01
    ids, mask = reference.tokenize(TEXTS)
    model = ir.to_proto(convert(reference, portable=portable))
    assert_same(run(model, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}), expected)


def test_plain_attention_is_that_of_torch() -> None:
    """Fewer heads for keys and values, a scale, a bias by position, and a boolean mask."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, bias = (
        torch.randn(2, heads, 5, width, generator=generator) for heads, width in ((6, 4), (2, 4), (2, 4), (6, 5))
    )
    mask = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
    out, _ = _plain_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3, position_bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias.masked_fill(~mask, -torch.inf), scale=0.3, enable_gqa=True
    )
    np.testing.assert_allclose(out, expected.transpose(1, 2), atol=1e-6)


def attention_graph(width: int, shape: str) -> onnx.ModelProto:
    """x [batch, length, width] -> `shape` -> [batch, ?, 8] -> attention with itself."""
    text = f"""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        graph (float[batch, length, {width}] x) => (float[batch, rows, 8] y)
        <int64[4] heads = {{0, {shape}}}, int64[3] flat = {{0, -1, 8}}, float[8] bias = {{1, 2, 3, 4, 5, 6, 7, 8}},
         float[batch, rows, 8] q>
        {{
            split = Reshape(x, heads)
            q = Reshape(split, flat)
            k = Add(q, bias)
            y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, k)
        }}
    """
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize(("width", "shape"), [(8, "-1, 2, 4"), (16, "-1, 4, 4")])
def test_reshapes_that_do_not_cancel_stay(width: int, shape: str) -> None:
    model = attention_graph(width, shape)
    x = np.random.default_rng(0).normal(size=(2, 3, width)).astype(np.float32)
    expected = open_session(model).run(["y"], {"x": x})[0]
    fused = ir.to_proto(fuse(ir.from_proto(model)))
    assert_close(open_session(fused).run(["y"], {"x": x})[0], expected, 1e-6)
