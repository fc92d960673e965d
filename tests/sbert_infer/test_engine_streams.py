"""Streams of vectors, one by one or into an array or file, and streams that are interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine
from tests.models.checkpoints import TEXTS
from tests.models.graphs import assert_close


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 5)


def test_encode_iter_gives_what_encode_gives(small: Engine) -> None:
    options: dict[str, Any] = {"prompt_name": "query", "normalize_embeddings": True, "truncate_dim": 7}
    vectors = list(small.encode_iter(iter(TEXTS), **options))
    np.testing.assert_allclose(np.stack(vectors), small.encode(TEXTS, **options), rtol=0, atol=1e-6)
    assert small.last_stats.texts == len(TEXTS)


def test_encode_iter_reads_no_further_than_it_must(small: Engine) -> None:
    """It reads two windows ahead, not the whole stream, so an endless stream works."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"text {read}"

    stream = small.encode_iter(endless())
    for _ in range(20):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert read == 25


def test_encode_iter_of_nothing_and_of_one_text(small: Engine) -> None:
    assert list(small.encode_iter([])) == []
    with pytest.raises(TypeError, match="got one str: use encode"):
        next(small.encode_iter("text"))


def test_bad_text_in_a_stream_is_named_by_its_place(small: Engine) -> None:
    stream = small.encode_iter([*TEXTS, None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=f"text {len(TEXTS)} must be a str, got NoneType"):
        list(stream)
    assert small.encode(["fine"]).shape == (1, 24)


def test_out_is_filled_and_returned(small: Engine, tmp_path: Path) -> None:
    out = np.lib.format.open_memmap(tmp_path / "v.npy", "w+", np.float32, (len(TEXTS), 24))
    assert small.encode((text for text in TEXTS), out=out) is out
    out.flush()
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), small.encode(TEXTS), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((11, 24), np.float32, "out has 11 rows, but there are more texts"),
        ((13, 24), np.float32, "out has 13 rows, but there were only 12 texts"),
        ((12, 32), np.float32, r"out must be float32 of shape \[texts, 24\], got float32 of \[12, 32\]"),
        ((12, 24), np.float64, "got float64"),
        ((288,), np.float32, r"of \[288\]"),
    ],
)
def test_out_that_does_not_fit(
    shape: tuple[int, ...], dtype: type[np.floating[Any]], message: str, small: Engine
) -> None:
    with pytest.raises(ValueError, match=message):
        small.encode(TEXTS, out=np.empty(shape, dtype))


@pytest.mark.parametrize("option", [{"precision": "int8"}, {"convert_to_tensor": True}, {"convert_to_numpy": False}])
def test_out_takes_float32_vectors_only(option: dict[str, Any], small: Engine) -> None:
    with pytest.raises(ValueError, match="out takes float32 vectors"):
        small.encode(TEXTS, out=np.empty((12, 24), np.float32), **option)


def test_an_interrupted_stream_leaves_the_workers_idle_and_usable(small: Engine) -> None:
    others = set(threading.enumerate())

    def interrupted() -> Iterator[str]:
        yield from TEXTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(small.encode_iter(interrupted()))
    assert small._pipeline is not None
    executor = small._pipeline._executor
    end = time.monotonic() + 30
    while executor is not None and executor._work_queue.qsize():  # workers still remove what was cancelled
        assert time.monotonic() < end
        time.sleep(0.001)
    assert small.encode(TEXTS).shape == (12, 24)
    small.close()
    assert set(threading.enumerate()) <= others


def test_a_stream_may_end_after_its_engine(small: Engine) -> None:
    stream = small.encode_iter(f"text {number}" for number in range(9000))
    next(stream)
    small.close()
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{"workers": 1}, {"workers": 3}, {"threads": 2}, {"max_batch_tokens": 16}])
def test_settings_do_not_change_the_vectors(settings: dict[str, int], small: Engine, small_onnx: Path) -> None:
    with Engine(small_onnx, **settings) as engine:  # type: ignore[arg-type]
        assert settings.items() <= engine.info.items()
        assert_close(engine.encode(TEXTS), small.encode(TEXTS), 1e-6)


def test_a_small_call_gives_every_worker_a_batch(small_onnx: Path) -> None:
    texts = [f"{text} {text}" for text in TEXTS]
    with Engine(small_onnx, workers=3, max_batch_tokens=4096) as engine:
        engine.encode(texts)
        assert engine.last_stats.batches >= 3
        engine.encode(["a", "b"])
        assert engine.last_stats.batches == 1  # too little to split
