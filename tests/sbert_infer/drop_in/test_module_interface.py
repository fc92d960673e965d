"""An engine takes the calls that code makes because `SentenceTransformer` is a torch module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer import Engine, EngineError, TruncationError
from tests.models.checkpoints import TEXTS
from tests.models.sparse_encoders import splade_onnx


@pytest.fixture
def splade(once: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(splade_onnx(once)) as engine:
        yield engine


def test_calls_that_change_nothing(engine: Engine, minilm: Any) -> None:
    for model in (engine, minilm):
        assert model.eval() is model.to("cpu") is model.cpu() is model.float() is model
        assert model.to(torch.device("cpu")) is model.to(device="cpu", dtype=torch.float32) is model
        assert model.requires_grad_(False) is model.train(False) is model
        assert model.dtype == torch.float32
        assert (str(model.device), model.device.type, model.device.index) == ("cpu", "cpu", None)
        assert model.device == torch.device("cpu")
        assert torch.device("cpu") == model.device
        assert torch.zeros(1, device=model.device).to(model.device).device == model.device
        assert (model.supports("text"), model.supports("image"), model.modalities) == (True, False, ["text"])
        assert model.get_model_kwargs() == []
    assert engine.device == "cpu"
    assert engine.device != "cuda"
    assert "cpu" in {engine.device}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.to("cuda"), r"runs on 'cpu' and can't be moved: open Engine\(path, device='cuda'\)"),
        (lambda e: e.cuda(), "can't be moved"),
        (lambda e: e.cuda(1), "device='cuda:1'"),
        (lambda e: e.to(torch.float16), "precision is chosen when it is exported"),
        (lambda e: e.half(), "precision is chosen"),
        (lambda e: e.train(), "can't be trained"),
        (lambda e: e.requires_grad_(), "can't be trained"),
        (lambda e: e.fit([]), "can't be trained"),
        (lambda e: e[0], "no torch modules or weights"),
        (lambda e: list(e), "no torch modules or weights"),
        (lambda e: e.parameters(), "no torch modules or weights"),
        (lambda e: e.state_dict(), "no torch modules or weights"),
        (lambda e: e(["a text"]), "features that preprocess returns, got list: for texts, use encode"),
        (lambda e: e.forward({}), "for texts, use encode"),
        (lambda e: e.save("folder"), "copy that"),
        (lambda e: e.compile(), "compiled already"),
        (lambda e: e.nonsense, "no attribute 'nonsense'"),
        (lambda e: setattr(e, "trunctate_dim", 3), "would have no effect"),
        (lambda e: setattr(e, "_target_device", "cuda"), "would have no effect"),
        (lambda e: setattr(e, "device", "cuda"), "device can't be set"),
        (lambda e: setattr(e, "tokenizer", None), "tokenizer can't be set"),
        (lambda e: setattr(e, "on_truncate", "eror"), "on_truncate must be"),
    ],
)
def test_what_an_engine_can_not_do(engine: Engine, call: Any, message: str) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        call(engine)


def test_forward(small: Engine, small_reference: Any) -> None:
    """The vectors of `SentenceTransformer.forward`: whole, and without a prompt."""
    features = small.preprocess(TEXTS)
    with torch.no_grad():
        found, expected = small(features), small_reference.forward(dict(features))
        unmasked = small.forward({"input_ids": features["input_ids"][:1, :3]})["sentence_embedding"]
        with pytest.raises(TruncationError):
            small({"input_ids": torch.ones((1, small.max_seq_length + 1), dtype=torch.int64)})
    assert found.keys() >= features.keys()
    torch.testing.assert_close(found["sentence_embedding"], expected["sentence_embedding"], atol=1e-5, rtol=0)
    assert unmasked.shape == (1, small.manifest.dim)


def test_forward_has_no_gradients(small: Engine, splade: Engine) -> None:
    features = small.preprocess(TEXTS)
    with pytest.raises(EngineError, match=r"no gradients and can't be trained: call it in torch\.no_grad"):
        small(features)
    with torch.no_grad(), pytest.raises(ValueError, match="no dense encoder"):
        splade(features)


def test_hasattr_tells(engine: Engine) -> None:
    assert hasattr(engine, "encode")
    assert not hasattr(engine, "parameters")


def test_devices_by_other_names(small_onnx: Path) -> None:
    with Engine(small_onnx, device="cpu:0") as engine:
        expected = engine.encode(TEXTS)
        for device in ("cpu", "cpu:0", torch.device("cpu"), ["cpu", "cpu"]):
            assert np.array_equal(engine.encode(TEXTS, device=device), expected)
        for device in ("cuda", ["cpu", "cuda:0"]):
            with pytest.raises(ValueError, match="runs on 'cpu', got device='cuda"):
                engine.encode(TEXTS, device=device)


def test_pools(small: Engine) -> None:
    expected = small.encode(TEXTS, normalize_embeddings=True)
    pool = small.start_multi_process_pool(["cpu"] * 3)
    assert len(pool["processes"]) == 3
    for found in (
        small.encode(TEXTS, pool=pool, chunk_size=2, normalize_embeddings=True),
        small.encode_multi_process(TEXTS, pool, None, None, 4, chunk_size=5, normalize_embeddings=True),
        small.encode_multi_process(TEXTS, pool, None, None, 4, 5, False, "float32", True),
        small.encode_document(TEXTS, pool=pool, prompt_name="other", normalize_embeddings=True),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    whole = (None, None, 4, 5, False, "float32", True)
    assert small.encode_multi_process(TEXTS, pool, *whole, 8).shape == (len(TEXTS), 8)
    with pytest.raises(TypeError, match="encode_multi_process takes at most 10 positional arguments"):
        small.encode_multi_process(TEXTS, pool, *whole, 8, "more")
    small.stop_multi_process_pool(pool)
    for wrong, message in (
        ({"pool": pool}, "not be stopped"),
        ({"pool": {"processes": [1]}}, "of an engine"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            small.encode(TEXTS, **wrong)
    with pytest.raises(ValueError, match="got device='cuda:0'"):
        small.start_multi_process_pool(["cuda:0"])


def test_preprocess(small: Engine, small_reference: Any) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda model: model.preprocess(TEXTS),
        lambda model: model.tokenize(TEXTS[:2]),
        lambda model: model.preprocess(TEXTS, prompt="a prompt: "),
        lambda model: model.preprocess(["many words " * 300]),
    ]
    for call in calls:
        found, expected = call(small), call(small_reference)
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(found[name], expected[name])
    with pytest.raises(TypeError, match="a list of texts"):
        small.preprocess("one text")
    with pytest.raises(TypeError, match="text 1 must be a str, got int"):
        small.tokenize(["a", 1])  # type: ignore[list-item]


def test_constructor_options(small_onnx: Path) -> None:
    options: dict[str, Any] = {"truncate_dim": 8, "similarity_fn_name": "euclidean", "default_prompt_name": "mine"}
    with Engine(small_onnx, prompts={"mine": "my own: "}, **options) as engine:
        assert engine.encode("a").shape == (8,)
        assert engine.similarity_fn_name == "euclidean"
        assert engine.prompts["query"] == "find this: "
        assert np.array_equal(engine.encode("a"), engine.encode("a", prompt="my own: "))
    with Engine(model_name_or_path=str(small_onnx), device="cpu") as engine:
        assert engine.artifact.path == small_onnx
    with pytest.raises(TypeError, match=r"needs the path of a model$"):
        Engine()
    with pytest.raises(TypeError, match="Engine needs the path of a model, and it is given twice"):
        Engine(small_onnx, model_name_or_path=small_onnx)
    with pytest.raises(ValueError, match="prompt_name 'none' is not among"):
        Engine(small_onnx, default_prompt_name="none")
    with pytest.raises(TypeError, match="no option 'backend'"):
        Engine(small_onnx, backend="onnx")
