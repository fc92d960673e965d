"""Mean pooling as a caller sees it, on the CPU: values, the torch operators, and refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from sbert_infer.kernels.mean_pool import mean_pool, mean_pool_packed, mean_pool_spans

HIDDEN = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
STARTS, ENDS = torch.tensor([0, 2, 4]), torch.tensor([3, 7, 4])


@pytest.mark.parametrize("normalize", [False, True])
def test_as_sentence_transformers(normalize: bool) -> None:
    models = pytest.importorskip("sentence_transformers.models")
    features = {"token_embeddings": HIDDEN, "attention_mask": MASK}
    wanted = models.Pooling(12, pooling_mode="mean")(features)
    if normalize:
        wanted = models.Normalize()(wanted)
    torch.testing.assert_close(mean_pool(HIDDEN, MASK, normalize), wanted["sentence_embedding"], atol=1e-7, rtol=1e-6)


def test_spans_are_slices() -> None:
    pooled = mean_pool_spans(HIDDEN[0], STARTS, ENDS)
    torch.testing.assert_close(pooled[0], HIDDEN[0, 0:3].mean(0))
    torch.testing.assert_close(pooled[1], HIDDEN[0, 2:7].mean(0))
    assert torch.equal(pooled[2], torch.zeros(12))


@pytest.mark.parametrize("normalize", [False, True])
def test_packed_is_padded_without_padding(normalize: bool) -> None:
    keep = MASK.bool()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)]).int()
    packed = mean_pool_packed(HIDDEN[keep], cu_seqlens, normalize, longest=5)
    torch.testing.assert_close(packed, mean_pool(HIDDEN, keep, normalize))


def test_padding_never_leaks() -> None:
    poisoned = HIDDEN.masked_fill(MASK[:, :, None] == 0, float("nan"))
    assert torch.equal(mean_pool(poisoned, MASK, normalize=True), mean_pool(HIDDEN, MASK, normalize=True))


def test_halves_are_added_in_single_precision() -> None:
    """2049 ones: an FP16 sum stops at 2048."""
    hidden = torch.ones(1, 2049, 1, dtype=torch.float16)
    pooled = mean_pool(hidden, torch.ones(1, 2049, dtype=torch.bool))
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1
    assert mean_pool(hidden, torch.ones(1, 2049, dtype=torch.bool), out_dtype=torch.float16).dtype == torch.float16


# As a torch operator ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_operators_are_well_formed(dtype: torch.dtype) -> None:
    operators = torch.ops.sbert_infer
    torch.library.opcheck(operators.mean_pool.default, (HIDDEN.to(dtype), MASK, True, torch.float16))
    torch.library.opcheck(operators.mean_pool_spans.default, (HIDDEN[0].to(dtype), STARTS, ENDS, True, dtype, 5))
    torch.library.opcheck(operators.mean_pool_spans.default, (HIDDEN[0].to(dtype), STARTS, ENDS, False, dtype, None))


class Pooler(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Any:
        return mean_pool(hidden * 2, mask, normalize=True), mean_pool_spans(hidden[0] + 1, starts, ends)


def assert_same(got: Any, wanted: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(Pooler(), fullgraph=True, backend=backend, dynamic=True)
    for length in (7, 5, 3):
        arguments = HIDDEN[:, :length], MASK[:, :length], STARTS, ENDS
        assert_same(compiled(*arguments), Pooler()(*arguments))


def test_exports_with_dynamic_shapes() -> None:
    auto = torch.export.Dim.AUTO
    shapes = {"hidden": {0: auto, 1: auto}, "mask": {0: auto, 1: auto}, "starts": {0: auto}, "ends": {0: auto}}
    program = torch.export.export(Pooler(), (HIDDEN, MASK, STARTS, ENDS), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes]
    assert "sbert_infer.mean_pool.default" in names
    assert "sbert_infer.mean_pool_spans.default" in names
    arguments = HIDDEN[:2, :5], MASK[:2, :5], STARTS[:2], ENDS[:2]
    assert_same(program.module()(*arguments), Pooler()(*arguments))


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "mask", "error", "message"),
    [
        (HIDDEN[0], MASK, ValueError, r"hidden must have shape \[batch, length, hidden\], got \[7, 12\]"),
        (HIDDEN, MASK[0], ValueError, r"mask must have shape \[batch, length\], got \[7\]"),
        (HIDDEN, MASK[:, :6], ValueError, r"mask must have shape .* = \[3, 7\] like hidden, got \[3, 6\]"),
        (HIDDEN.double(), MASK, TypeError, "hidden must be one of .*torch.float32, got torch.float64"),
        (HIDDEN, MASK.float(), TypeError, "mask must be one of torch.bool, .*, got torch.float32"),
        (HIDDEN.to("meta"), MASK, ValueError, "mask must be on the device of hidden, meta, got cpu"),
    ],
)
def test_refuses(hidden: torch.Tensor, mask: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mean_pool(hidden, mask)


@pytest.mark.parametrize(
    ("hidden", "starts", "ends", "error", "message"),
    [
        (HIDDEN, STARTS, ENDS, ValueError, r"hidden must have shape \[tokens, hidden\], got \[3, 7, 12\]"),
        (HIDDEN[0], STARTS[None], ENDS, ValueError, r"starts must have shape \[spans\], got \[1, 3\]"),
        (HIDDEN[0], STARTS, ENDS[:2], ValueError, "starts and ends must be equally many, got 3 and 2"),
        (
            HIDDEN[0],
            STARTS.float(),
            ENDS,
            TypeError,
            "starts must be one of torch.int32, torch.int64, got torch.float32",
        ),
        (HIDDEN[0], STARTS, ENDS.short(), TypeError, "ends must be one of torch.int32, torch.int64, got torch.int16"),
    ],
)
def test_refuses_spans(
    hidden: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mean_pool_spans(hidden, starts, ends)


def test_refuses_other_results() -> None:
    with pytest.raises(TypeError, match=r"out_dtype must be one of .*, got torch\.bfloat16"):
        mean_pool(HIDDEN, MASK, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape \[sequences \+ 1\], got \[0\]"):
        mean_pool_packed(HIDDEN[0], torch.zeros(0, dtype=torch.int32))


def test_only_a_gpu_needs_triton() -> None:
    """Without Triton the CPU pools, and a GPU says what is missing."""
    code = """
import sys
from dataclasses import replace
sys.modules["triton"] = None  # as if it were not installed
import torch
from sbert_infer.kernels import mean_pool as module
assert module.mean_pool(torch.ones(1, 2, 3), torch.ones(1, 2).bool()).tolist() == [[1, 1, 1]]
try:
    module._kernels()
except ModuleNotFoundError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "pooling on a GPU needs Triton: pip install triton\n", run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_benchmark_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from sbert_infer.kernels import benchmark

    assert benchmark.main() == 1
    assert "no GPU found" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(1, 64, 16, 64), (3, 40, 8, 7), (2, 12, 24, 1)], ids=str)
def test_the_rivals_of_the_benchmark_pool_the_same(shape: tuple[int, int, int, int]) -> None:
    from sbert_infer.kernels.benchmark import PackedTokens

    packed = PackedTokens.make(*shape, dtype=torch.float32, device="cpu")
    packed = replace(packed, segments=max(packed.segments, shape[1] // shape[3]))
    wanted = packed.by_kernel(packed.longest)
    assert wanted.shape == (shape[0] * (shape[1] // shape[3]), shape[2])
    torch.testing.assert_close(packed.by_eager(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(packed.by_graph(), wanted, atol=1e-6, rtol=1e-5)
