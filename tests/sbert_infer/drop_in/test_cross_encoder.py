"""`Reranker` has the attributes and arguments of `CrossEncoder`, old ones included."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer import Reranker, SbertInferWarning
from tests.models.checkpoints import TEXTS
from tests.models.cross_encoders import PAIRS, cross_encoder

QUERY, DOCUMENTS = TEXTS[0], list(TEXTS[1:5])


@pytest.fixture
def both(reranker_onnx: Path, reranker_checkpoint: Path) -> Iterator[tuple[Reranker, Any]]:
    """The same model in both libraries, for one test."""
    with Reranker(reranker_onnx, on_truncate="ignore") as reranker:
        yield reranker, cross_encoder(reranker_checkpoint)


def assert_same_scores(both: tuple[Reranker, Any], **options: Any) -> None:
    found, expected = (model.predict(PAIRS, **options) for model in both)
    assert type(found) is type(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The `max_length` property:DeprecationWarning")
def test_max_length(both: tuple[Reranker, Any], reranker_onnx: Path) -> None:
    whole = both[0].predict(PAIRS)
    for model in both:
        model.max_length = 9
        assert model.max_length == model.max_seq_length == 9
    assert_same_scores(both)
    assert not np.allclose(both[0].predict(PAIRS), whole)
    for wrong in (4, 100_000):
        with pytest.raises(ValueError, match=f"max_seq_length must be .* got {wrong}"):
            both[0].max_length = wrong
    with Reranker(reranker_onnx, max_length=9, on_truncate="ignore") as other:
        np.testing.assert_array_equal(other.predict(PAIRS), both[0].predict(PAIRS))
    with copy.deepcopy(both[0]) as copied:
        assert copied.max_length == 9


@pytest.mark.parametrize("activation", [torch.nn.Identity(), torch.nn.Sigmoid(), torch.nn.Tanh(), torch.relu, None])
def test_activations(both: tuple[Reranker, Any], reranker_onnx: Path, activation: Any) -> None:
    assert_same_scores(both, activation_fn=activation)
    assert_same_scores(both, activation_fct=activation)
    if activation is not None:  # to the constructor None means the model's own
        with Reranker(reranker_onnx, activation_fn=activation, on_truncate="ignore") as other:
            expected = both[1].predict(PAIRS, activation_fn=activation)
            np.testing.assert_allclose(other.predict(PAIRS), expected, rtol=0, atol=1e-5)
    for model in both:
        model.activation_fn = activation
        assert model.activation_fn is activation
    assert_same_scores(both)
    assert both[0].default_activation_function is activation


@pytest.mark.parametrize("wrong", ["relu", 3, torch.nn.Sigmoid])
def test_what_is_no_activation(both: tuple[Reranker, Any], wrong: Any) -> None:
    for call in (
        lambda: setattr(both[0], "activation_fn", wrong),
        lambda: both[0].predict(PAIRS, activation_fn=wrong),
        lambda: both[0].predict([], activation_fct=wrong),
    ):
        with pytest.raises(ValueError, match="activation_fn must be 'identity', 'sigmoid' or a function of a tensor"):
            call()


def test_modules_of_torch_are_known_by_name(reranker_onnx: Path) -> None:
    """Nothing imports torch for them: only a stand-in for the class is here."""
    code = f"""
import sys
from sbert_infer import Reranker
kinds = {{"Sigmoid": "torch.nn.modules.activation", "Identity": "torch.nn.modules.linear"}}
call = lambda self, x: 1 / 0
with Reranker({str(reranker_onnx)!r}) as reranker:
    for name, module in kinds.items():
        function = type(name, (), {{"__module__": module, "__call__": call}})()
        assert (reranker.predict([("a", "b")], activation_fn=function) ==
                reranker.predict([("a", "b")], activation_fn=name.lower())).all()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompts(both: tuple[Reranker, Any], reranker_onnx: Path) -> None:
    assert both[0].prompts.items() >= both[1].prompts.items()
    for model in both:
        model.prompts = {"topic": "about: "}
        model.default_prompt_name = "topic"
    assert_same_scores(both)
    assert_same_scores(both, prompt="")
    with Reranker(reranker_onnx, prompts={"topic": "about: "}, default_prompt_name="topic") as other:
        assert other.predict(PAIRS[0]) == both[0].predict(PAIRS[0])


def test_rank(both: tuple[Reranker, Any]) -> None:
    calls: list[dict[str, Any]] = [
        {"num_workers": 2, "activation_fct": torch.nn.Identity()},
        {"top_k": 2, "return_documents": True, "prompt": "about: "},
        {"convert_to_tensor": False, "convert_to_numpy": False, "apply_softmax": False},
    ]
    for options in calls:
        found, expected = (model.rank(QUERY, DOCUMENTS, **options) for model in both)
        assert [hit | {"score": 0} for hit in found] == [hit | {"score": 0} for hit in expected]
        scores = [[hit["score"] for hit in hits] for hits in (found, expected)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)
    for name in ("convert_to_tensor", "convert_to_numpy", "apply_softmax"):
        with pytest.warns(SbertInferWarning, match=f"{name}.* no effect: scores are of type float"):
            assert both[0].rank(QUERY, DOCUMENTS, **dict[str, Any]({name: True})) == both[0].rank(QUERY, DOCUMENTS)


def test_predict(both: tuple[Reranker, Any]) -> None:
    assert_same_scores(both, num_workers=4)
    for pair in (PAIRS[3], list(PAIRS[3])):
        found, expected = (model.predict(pair) for model in both)
        assert type(found) is type(expected)
        assert found == pytest.approx(expected, abs=1e-5)
    with pytest.raises(TypeError, match="Reranker has no option 'max_len'; settings: prompts"):
        Reranker(both[0].artifact, max_len=3)
