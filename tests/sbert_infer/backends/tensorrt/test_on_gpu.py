"""Plans on a real GPU against eager FP32 on the CPU. Needs a GPU and TensorRT: `make test-gpu`.

These tests were written without a GPU, and have not been run yet.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.artifact.plan_file import open_plan
from sbert_infer.backends.select import BackendOptions, open_backend
from tests.models.full_rows import fillings, run_in_shape, texts_of
from tests.models.graphs import cosine

pytestmark = pytest.mark.gpu

MIN_COSINE = 0.999


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBERT_INFER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def export_plan(minilm_path: Path, path: Path, **options: Any) -> Path:
    from sbert_infer.export.exporter import ExportOptions, export

    export(minilm_path, path, ExportOptions(fp16=True, max_batch_tokens=4096, **options))
    return path


@pytest.fixture(scope="module")
def plan(minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the real MiniLM as a plan with a TensorRT engine for this GPU."""
    return export_plan(minilm_path, tmp_path_factory.mktemp("plan") / "minilm.plan")


def test_every_shape(plan: Path, minilm: Any) -> None:
    with Engine(plan, strict=True) as engine:
        for shape in open_plan(plan).rows.shapes:
            for texts in fillings(shape, engine.max_seq_length):
                assert cosine(run_in_shape(engine, shape, texts), minilm.encode(texts)).min() >= MIN_COSINE


def test_alone_or_in_a_batch(plan: Path) -> None:
    texts = [text for length in (3, 9, 30, 100, 250) for text in texts_of(length, 5)]
    with Engine(plan, strict=True) as engine:
        alone = np.stack([engine.encode(text) for text in texts])
        assert cosine(engine.encode(texts), alone).min() >= 0.99999


def test_graphs_make_no_difference(plan: Path) -> None:
    texts, found = texts_of(20, 7), []
    with Engine(plan, strict=True) as engine:
        for cuda_graphs in (False, True):
            engine.pipeline.backend.close()
            engine.pipeline.backend = open_backend(
                open_plan(plan), BackendOptions(strict=True, cuda_graphs=cuda_graphs)
            )
            found += [engine.encode(texts) for _ in range(3)]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_pooling_in_the_graph_or_by_the_kernel(plan: Path, minilm_path: Path, tmp_path: Path) -> None:
    kernel = export_plan(minilm_path, tmp_path / "kernel.plan", pooling="kernel")
    texts = [text for length in (3, 30, 250) for text in texts_of(length, 5)]
    with Engine(plan, strict=True) as one, Engine(kernel, strict=True) as other:
        assert cosine(one.encode(texts), other.encode(texts)).min() >= 0.9999


def test_onnxruntime_on_the_gpu(minilm_onnx: Path, minilm: Any) -> None:
    texts = [text for length in (3, 30, 250) for text in texts_of(length, 5)]
    with Engine(minilm_onnx, device="cuda") as engine:
        assert engine.device == "cuda:0"
        assert cosine(engine.encode(texts), minilm.encode(texts)).min() >= 0.9999


def test_memory_does_not_grow(plan: Path) -> None:
    from cuda.bindings import runtime

    def free() -> int:
        error, available, _ = runtime.cudaMemGetInfo()
        assert error == runtime.cudaError_t.cudaSuccess
        return int(available)

    with Engine(plan, strict=True) as engine:

        def run_every_shape() -> None:
            for shape in open_plan(plan).rows.shapes:
                for texts in fillings(shape, engine.max_seq_length):
                    run_in_shape(engine, shape, texts)

        run_every_shape()
        before = free()
        for _ in range(10):
            run_every_shape()
        assert before - free() < 64 * 2**20


def _open(path: str, results: Any) -> None:
    with Engine(path) as engine:
        results.put((engine.info["backend"], engine.encode("a text").tolist()))


def test_processes_share_what_was_built(minilm_path: Path, tmp_path: Path) -> None:
    path = export_plan(minilm_path, tmp_path / "empty.plan", targets=[])
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_open, args=(str(path), results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join()
    assert all("tensorrt" in backend.lower() for backend, _ in found)
    np.testing.assert_allclose([vector for _, vector in found], [found[0][1]] * 3, atol=1e-3)
