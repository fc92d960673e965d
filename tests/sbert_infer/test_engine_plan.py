"""A plan on a machine without a GPU: the right vectors from the CPU, and a warning."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sbert_infer import Engine, EngineError, SbertInferWarning
from sbert_infer.artifact.plan_file import CPU_GRAPH, MODEL, Plan, open_plan
from sbert_infer.backends.onnxruntime_session import PlanModel, open_session
from sbert_infer.backends.tensorrt import cuda
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.full_rows import fillings, run_in_shape, texts_of
from tests.models.graphs import cosine

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]

pytestmark = pytest.mark.skipif(cuda.driver_problem() is None, reason="this machine has a GPU")


def test_vectors(small_plan: Path, small_reference: Any) -> None:
    with Engine(small_plan, device="cpu", on_truncate="ignore") as engine:
        for prompt in ("", *engine.prompts.values()):
            expected = small_reference.encode(ALL_TEXTS, prompt=prompt)
            vectors = engine.encode(ALL_TEXTS, prompt=prompt)
            assert vectors.dtype == np.float32
            assert cosine(vectors, expected).min() >= 0.9999
            assert np.abs(vectors - expected).max() > 0, "or the weights were not rounded to FP16"
            alone = np.stack([engine.encode(text, prompt=prompt) for text in ALL_TEXTS])
            np.testing.assert_allclose(alone, vectors, rtol=0, atol=2e-5)


def test_one_warning(small_plan: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Engine(small_plan) as engine:
            engine.encode(TEXTS)
            engine.encode("again")
    assert [warning.category for warning in caught] == [SbertInferWarning]
    assert caught[0].filename == __file__  # points at the line that opened it
    message = str(caught[0].message)
    assert str(small_plan) in message
    assert str(cuda.driver_problem()) in message


def test_no_word_where_the_cpu_was_asked_for(small_plan: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Engine(small_plan, device="cpu") as engine:
            assert engine.device == engine.info["device"] == "cpu"
            assert engine.info["precision"] == "fp16"
            assert engine.encode("a", device="cpu").shape == (24,)
            with pytest.raises(ValueError, match="runs on 'cpu'"):
                engine.encode("a", device="cuda")


@pytest.mark.parametrize(
    "options", [{"strict": True}, {"device": "cuda"}, {"device": "cuda:1"}, {"device": ["cuda:0"]}]
)
def test_no_cpu_where_it_was_ruled_out(options: dict[str, Any], small_plan: Path) -> None:
    with pytest.raises(EngineError, match=r"tiny-bert\.plan.*driver"):
        Engine(small_plan, **options)


def test_an_onnx_model_is_refused_on_a_gpu_that_is_not_there(small_onnx: Path) -> None:
    with pytest.raises(EngineError, match=r"\.onnx: can't run on cuda: .*driver"):
        Engine(small_onnx, device="cuda")
    with pytest.raises(ValueError, match="device must be"):
        Engine(small_onnx, device="gpu0")


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
def test_on_a_double_of_a_gpu(rtx: bool, small_plan: Path, small_reference: Any, lab: Callable[..., Any]) -> None:
    """All of the path is real but TensorRT and CUDA: the plan's own model runs on onnxruntime."""
    lab().install(small_plan, rtx=rtx)
    with pytest.warns(SbertInferWarning, match="one was built"):
        engine = Engine(small_plan, on_truncate="ignore")
    with engine:
        assert engine.device == "cuda:0"
        for prompt in ("", *engine.prompts.values()):
            vectors = engine.encode(ALL_TEXTS, prompt=prompt)
            assert cosine(vectors, small_reference.encode(ALL_TEXTS, prompt=prompt)).min() >= 0.9995
            alone = np.stack([engine.encode(text, prompt=prompt) for text in ALL_TEXTS])
            assert cosine(vectors, alone).min() >= 0.99999


def test_every_shape_on_a_double_of_a_gpu(small_plan: Path, small_reference: Any, lab: Callable[..., Any]) -> None:
    """The test of every shape on a real GPU, in the same steps."""
    lab().install(small_plan)
    with pytest.warns(SbertInferWarning, match="one was built"):
        engine = Engine(small_plan)
    with engine:
        for shape in open_plan(small_plan).rows.shapes:
            for texts in fillings(shape, engine.max_seq_length):
                vectors = run_in_shape(engine, shape, texts)
                expected = small_reference.encode(texts, prompt="")
                assert cosine(vectors, expected).min() >= 0.9995
                if len(texts) > 1:  # vectors of other texts would be noticed
                    assert cosine(vectors, np.roll(expected, 1, axis=0)).max() < 0.9995


def test_texts_that_fill_rows_are_as_long_as_they_should_be_and_differ(engine: Engine) -> None:
    for length, count in ((3, 16), (4, 256), (8, 4096), (64, 300), (250, 9)):
        texts = texts_of(length, count)
        assert len(set(texts)) == count
        assert set(engine.pipeline.tokenizer(texts).lengths.tolist()) == {length}
    with pytest.raises(ValueError, match="no 17 different texts of 3 tokens"):
        texts_of(3, 17)


def test_weights_are_stored_once(small_plan: Path) -> None:
    plan = open_plan(small_plan)
    session = open_session(PlanModel(plan, CPU_GRAPH), 1)
    assert session.get_outputs()[0].type == "tensor(float)"
    matrices = sum(parameter[0] for name, parameter in plan.members.items() if name == MODEL)
    assert plan.members[CPU_GRAPH][0] < matrices


def test_an_older_onnxruntime_reads_the_weights_from_files(small_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(small_plan, device="cpu") as engine:
        expected = engine.encode(TEXTS)
    real = onnxruntime.SessionOptions

    class Older:
        """The options without what was added in 1.24."""

        def __init__(self) -> None:
            object.__setattr__(self, "inner", real())

        def __getattr__(self, name: str) -> Any:
            if name == "add_external_initializers_from_files_in_memory":
                raise AttributeError(name)
            return getattr(self.inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.inner, name, value)

    session = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "SessionOptions", Older)
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda path, options, **more: session(path, options.inner, **more)
    )
    with Engine(small_plan, device="cpu") as engine:
        np.testing.assert_array_equal(engine.encode(TEXTS), expected)


def test_the_weights_are_there_until_the_session_is(small_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes live until the session is open: onnxruntime keeps only a bare pointer to them."""
    alive: list[weakref.ref[Any]] = []

    class Bytes(np.ndarray[Any, np.dtype[np.uint8]]):
        """Bytes that can be weakly referenced, to see when they are freed."""

    real = Plan.read

    def read(self: Plan, name: str) -> Any:
        content = real(self, name)
        if name != MODEL:
            return content
        watched = np.frombuffer(content, np.uint8).view(Bytes)
        alive.append(weakref.ref(watched))
        return watched

    opened = onnxruntime.InferenceSession

    def open_and_look(*args: Any, **options: Any) -> Any:
        assert alive[-1]() is not None, "the weights are gone"
        return opened(*args, **options)

    monkeypatch.setattr(Plan, "read", read)
    monkeypatch.setattr(onnxruntime, "InferenceSession", open_and_look)
    Engine(small_plan, device="cpu").close()
    assert len(alive) == 1
    assert alive[0]() is None  # but are not kept any longer
