"""A `TensorArray` gives what a tensor of the same numbers gives, for the calls that code makes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer._util.tensor_array import TensorArray

NUMBERS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
TIES = np.array([[1, 3, 2, 3, 1, 3]], np.float32)

CALLS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.detach().cpu().numpy(),
    "topk": lambda x: x.topk(3),
    "topk of the smallest": lambda x: x.topk(k=2, dim=0, largest=False).indices,
    "topk of a row": lambda x: x[0].topk(2).values,
    "argsort": lambda x: x.argsort(),
    "argsort descending": lambda x: x.argsort(descending=True),
    "argsort by position": lambda x: x.argsort(0, descending=False),
    "topk of none": lambda x: x.topk(0).values,
    "topk of all": lambda x: x.topk(6),
    "argsort along": lambda x: x.argsort(dim=0, descending=True),
    "sort": lambda x: x.sort(dim=1, descending=True),
    "max": lambda x: x.max(),
    "max along": lambda x: x.max(dim=1),
    "max along a position": lambda x: x.max(1).indices,
    "max kept": lambda x: x.max(dim=0, keepdim=True).values,
    "min along": lambda x: x.min(1, True),
    "sum": lambda x: x.sum(dim=1),
    "mean": lambda x: x.mean(dim=0, keepdim=True),
    "argmax": lambda x: x.argmax(dim=1),
    "argmin": lambda x: x.argmin(),
    "item": lambda x: x[1][2].item(),
    "torch.topk": lambda x: torch.topk(x[0], k=3),
    "torch.max": lambda x: torch.max(x, dim=1).values,
    "torch.cat": lambda x: torch.cat([x, torch.ones(1, 6)]),
    "with a tensor": lambda x: x + torch.ones(4, 6),
    "a tensor with it": lambda x: torch.ones(2, 4) @ x,
    "softmax": lambda x: x.softmax(dim=1),
    "unsqueeze": lambda x: x.unsqueeze(0).shape,
    "to": lambda x: x.to("cpu", torch.float64),
    "mean of a tensor": lambda x: torch.as_tensor(x).mean(),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_a_tensor(name: str) -> None:
    found, expected = CALLS[name](TensorArray.of(NUMBERS)), CALLS[name](torch.from_numpy(NUMBERS))
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
    for ours, theirs in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)


def test_as_an_array() -> None:
    array = TensorArray.of(NUMBERS.copy())
    assert np.array_equal(np.max(array, 1), NUMBERS.max(1))
    assert np.array_equal(array.max(axis=1, keepdims=True), NUMBERS.max(1, keepdims=True))
    assert np.array_equal(np.argsort(-array), np.argsort(-NUMBERS))
    assert np.array_equal(np.sort(array), np.sort(NUMBERS))
    assert array.diagonal().astype(np.float64).tolist() == NUMBERS.diagonal().tolist()
    array.sort(axis=0)
    assert np.array_equal(array, np.sort(NUMBERS, axis=0))
    for other in (copy.deepcopy(array), pickle.loads(pickle.dumps(array))):  # noqa: S301  # our own
        assert np.array_equal(other.topk(1).values, array.topk(1).values)


@pytest.mark.parametrize("descending", [False, True])
def test_equal_values_keep_their_order(descending: bool) -> None:
    ours, theirs = TensorArray.of(TIES), torch.from_numpy(TIES)
    expected = theirs.argsort(descending=descending, stable=True).tolist()
    assert ours.argsort(descending=descending, stable=True).tolist() == expected
    assert ours.sort(descending=descending, stable=True).values.tolist() == TIES[:, expected[0]].tolist()


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="k must be at most 6, got 7"):
        TensorArray.of(NUMBERS).topk(7)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = TensorArray.of(NUMBERS).nonsense


def test_without_torch() -> None:
    code = """
        import sys, numpy
        sys.modules["torch"] = None
        del sys.modules["torch"]
        from sbert_infer._util.tensor_array import TensorArray
        scores = TensorArray.of(numpy.array([[0.1, 0.9, 0.5]]))
        assert scores.cpu().to("cpu").numpy().tolist() == [[0.1, 0.9, 0.5]]
        assert scores.max(dim=1).indices.tolist() == scores.argsort(descending=True)[:, 0].tolist() == [1]
        assert not hasattr(scores, "softmax")
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", "if True:" + code], check=True)
