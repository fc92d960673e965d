"""8-bit graphs: independent of the batch, no saturation, outliers smoothed, no FP32 products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from sbert_infer import Engine
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.precision import int8
from sbert_infer.export.precision.keep_back import AIM
from sbert_infer.export.reference.encoder import load_reference
from tests.models.checkpoints import LAYERS, ODD_TEXTS, TEXTS, WIDTH
from tests.models.exports import export_graph
from tests.models.graphs import Array, constants, cosine, nodes, run, tokens

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
ALONE_OR_NOT = 1e-6
LIMIT = 24  # tokens: the certificate of a short one is quick
OUTLIER = 5  # a channel

# Natural texts, none of which is used for calibration by default.
SENTENCES = (
    "The harbour was quiet before the storm arrived.",
    "How many calories are in a slice of rye bread?",
    "Install the package, then restart the service.",
    "A man in a blue coat is feeding pigeons in the park.",
    "Shares of the airline dropped after the strike was announced.",
    "Mitochondria produce most of the cell's energy.",
    "I would not recommend this hotel to anyone.",
    "The treaty was signed in Vienna in 1815.",
    "My laptop gets very hot while charging.",
    "She won the 400 metres by a hundredth of a second.",
    "Can you translate this letter into Portuguese?",
    "The recipe calls for two eggs and a pinch of salt.",
)


@pytest.fixture(scope="module")
def minilm(minilm_path: Path, minilm_graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real MiniLM's 8-bit artifact, for short texts."""
    path = tmp_path_factory.mktemp("minilm-int8") / "minilm.int8.onnx"
    export_graph(minilm_path, path, ExportOptions(int8=True, max_length=LIMIT), lambda kind: minilm_graph)
    return path


@pytest.fixture(params=["bert", "albert", "minilm"])
def artifact(request: pytest.FixtureRequest, export_checkpoint: MakeCheckpoint) -> Path:
    if request.param == "minilm":
        path: Path = request.getfixturevalue("minilm")
        return path
    return export_checkpoint(request.param, int8=True)


def test_vectors_do_not_depend_on_the_batch(artifact: Path) -> None:
    with Engine(artifact, on_truncate="ignore") as engine:
        together = engine.pipeline.run_together(ALL_TEXTS)
        alone = np.stack([engine.encode(text) for text in ALL_TEXTS])
        backwards = engine.encode(ALL_TEXTS[::-1][:7])[::-1]
    assert np.abs(together - alone).max() <= ALONE_OR_NOT
    assert np.abs(together[-7:] - backwards).max() <= ALONE_OR_NOT


def test_weights_cannot_saturate(artifact: Path) -> None:
    model = onnx.load(artifact)
    arrays = constants(model)
    products = nodes(model, "MatMulIntegerToFloat")
    assert products
    for node in products:
        weight, steps = arrays[node.input[1]], arrays[node.input[3]]
        assert weight.dtype == np.int8
        most = np.abs(weight.astype(int)).max(axis=0)
        assert most.max() <= int8.WEIGHT_MAX
        assert most.min() >= int8.WEIGHT_MAX - 5  # every column uses nearly all of it
        assert steps.shape == weight.shape[1:]
        assert len(np.unique(steps)) > 1
    assert 2 * 255 * int8.WEIGHT_MAX < 2**15


def test_no_fp32_weights_are_left(artifact: Path) -> None:
    model = onnx.load(artifact)
    left = {name: array for name, array in constants(model).items() if array.dtype == np.float32 and array.ndim > 1}
    looked_up = {node.input[0] for node in nodes(model, "Gather")}
    assert set(left) <= looked_up, "only the embedding tables"
    assert not nodes(model, "MatMul", "Gemm")
    assert not {tensor.name for tensor in model.graph.initializer} - {
        name for node in model.graph.node for name in node.input
    }


def test_smaller_than_fp32(minilm: Path, minilm_path: Path) -> None:
    fp32 = sum(file.stat().st_size for file in minilm_path.glob("*.safetensors"))
    table = 30522 * 384 * 4  # bytes of the word embeddings, which are looked up and stay
    assert minilm.stat().st_size - table < 0.35 * (fp32 - table)


def test_shared_weights_stay_shared(export_checkpoint: MakeCheckpoint) -> None:
    model = onnx.load(export_checkpoint("albert", int8=True))
    products = nodes(model, "MatMulIntegerToFloat")
    assert len(products) == 6 * LAYERS + 1  # and the projection of the embeddings
    assert len({node.input[1] for node in products}) == 6 + 1
    smooth = [array for name, array in constants(model).items() if name.endswith("int8.smooth")]
    assert len(smooth) == 3 * LAYERS + 1  # not what comes out of a GELU


def test_the_real_minilm_stays_close(minilm: Path, minilm_path: Path) -> None:
    reference = load_reference(read_checkpoint(minilm_path, max_length=LIMIT))
    with Engine(minilm) as engine:
        cosines = cosine(engine.encode(SENTENCES), reference.encode(SENTENCES))
        parity = engine.manifest.parity
    assert cosines.min() >= 0.985
    assert cosines.mean() >= 0.995
    assert cosines.max() < 0.999999, "or nothing was rounded"
    assert parity["min_cosine"] >= parity["threshold"] == AIM
    assert "kept_fp32" not in parity
    assert parity["batch_max_abs"] <= ALONE_OR_NOT


def test_zeros_stay_zeros() -> None:
    model = product_graph(np.eye(4, dtype=np.float32))
    x = np.array([[[0, 0, 0, 0], [1, -2, 3, -4]], [[1e-30, 0, 0, 0], [0, 0, 0, 5]]], np.float32)
    y = run(quantized(model, [product_batch(x)]), product_batch(x))
    np.testing.assert_array_equal(y[x == 0], 0)
    np.testing.assert_allclose(y, x, rtol=0, atol=0.03)


def test_what_comes_out_of_a_gelu_is_rounded_twice_as_finely() -> None:
    """The few negative values are not cut off."""
    x = np.linspace(-6, 6, 4 * 100, dtype=np.float32).reshape(1, 100, 4)
    x[..., 0] = 6  # so that every token has a large value: its step is then 6 / 223, not 6 / 127
    model = product_graph(np.eye(4, dtype=np.float32))
    model.graph.node[0].input[0] = "activated"
    model.graph.node.insert(0, onnx.helper.make_node("Gelu", ["x"], ["activated"], domain="com.microsoft"))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("activated", 1, ["batch", "length", 4]))
    batch = product_batch(x)
    difference = np.abs(run(quantized(model, [batch]), batch) - run(model, batch))
    assert 6 / 255 / 4 < difference.max() < 6 / 223 * 0.51


def test_a_batch_of_padding_is_no_evidence() -> None:
    batch = product_batch(np.ones((1, 2, 4), np.float32))
    nothing = {**batch, "attention_mask": np.zeros((1, 2), np.int64)}
    model = product_graph(np.diag([1, 2, 3, 4]).astype(np.float32))
    assert quantized(model, [batch]) == quantized(model, [nothing, batch])


def test_progress_is_all_of_the_work() -> None:
    model = ir.from_proto(product_graph(np.eye(4, dtype=np.float32)))
    batches, done = [product_batch(np.ones((length, 2, 4), np.float32)) for length in (1, 3)], list[int]()
    int8.round_products(model, batches, done.append)
    assert len(done) == 2 + 1  # the batches, and the product
    assert sum(done) == int8.rounding_work(model, batches)


def product_graph(weight: Array) -> onnx.ModelProto:
    """x [batch, length, in] @ weight."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        graph (float[batch, length, {len(weight)}] x, int64[batch, length] attention_mask)
            => (float[batch, length, {weight.shape[1]}] sentence_embedding)
        {{
            product = MatMul(x, weight)
            sentence_embedding = Identity(product)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    return model


def product_batch(x: Array) -> dict[str, Any]:
    return {"x": x, "attention_mask": np.ones(x.shape[:2], np.int64)}


# -------------------------------------------------------------------------------------------------
# smoothing


def quantized(model: onnx.ModelProto, batches: Sequence[int8.Batch]) -> onnx.ModelProto:
    graph = ir.from_proto(model)
    return ir.to_proto(int8.quantize(graph, int8.round_products(graph, batches)))


def unsmoothed(largest: Array, weights: list[Array]) -> Array:
    return np.ones(len(weights[0]), np.float32)


def test_smoothing_tames_an_outlying_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x, weight = (random.normal(size=size).astype(np.float32) for size in ((3, 7, WIDTH), (WIDTH, 16)))
    x[..., OUTLIER] *= 40
    weight[OUTLIER] /= 40
    model, inputs = product_graph(weight), product_batch(x)
    errors = []
    for smoothing in (int8._smoothing, unsmoothed):
        monkeypatch.setattr(int8, "_smoothing", smoothing)
        errors.append(np.abs(run(quantized(model, [inputs]), inputs) - x @ weight).mean())
    assert errors[0] < 0.2 * errors[1]


def test_smoothing_helps_the_real_minilm(minilm: Path, minilm_graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = onnx.load(minilm_graph)
    inputs, calibration = tokens(minilm, SENTENCES), [tokens(minilm, TEXTS)]
    expected = run(graph, inputs)
    smoothed = run(quantized(graph, calibration), inputs)
    monkeypatch.setattr(int8, "_smoothing", unsmoothed)
    plain = run(quantized(graph, calibration), inputs)
    error, plain_error = (1 - cosine(vectors, expected).mean() for vectors in (smoothed, plain))
    assert 0 < error < 0.8 * plain_error


@pytest.mark.usefixtures("traced")
def test_calibration_texts_are_used(
    make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.onnx"
    options = ExportOptions(int8=True, calibration=["Rain fell on the tin roof."], min_cosine=0.5)
    export(make_checkpoint(), path, options)
    tuned, default = (
        {name: array for name, array in constants(onnx.load(p)).items() if name.endswith("int8.smooth")}
        for p in (path, export_checkpoint(int8=True))
    )
    assert tuned.keys() == default.keys()
    assert len(tuned) == 3 * LAYERS
    assert all(np.abs(tuned[name] / default[name] - 1).max() > 0.01 for name in tuned)


def test_smoothing_is_square_root_of_the_ratio() -> None:
    weight = np.array([[1, -4], [0.25, 0]], np.float32)
    smooth = int8._smoothing(np.array([1, 100], np.float32), [weight, weight[:, :1]])
    assert smooth[0] / smooth[1] == pytest.approx((4 / 1) ** 0.5 / (0.25 / 100) ** 0.5)
    assert smooth.prod() == pytest.approx(1)  # scaling all channels alike would change nothing
