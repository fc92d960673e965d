"""Engines with threads, forks and other engines; closing them; and their descriptions."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sbert_infer
from sbert_infer import Engine, EngineError
from sbert_infer.backends.base import Batch
from tests.models.checkpoints import TEXTS


def run(script: str, *arguments: object) -> str:
    """Run a script in a new interpreter and return its output."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_many_threads_at_once(small_onnx: Path) -> None:
    jobs = [[f"{text} {number}" for text in TEXTS[: 1 + number % 12]] for number in range(60)]
    with Engine(small_onnx, max_batch_tokens=64) as engine:
        expected = [engine.encode(job) for job in jobs]
        start = threading.Barrier(12)

        def encode(job: list[str]) -> Any:
            start.wait(timeout=60)
            return engine.encode(job)

        with ThreadPoolExecutor(12) as pool:  # 60 jobs, so the barrier opens five times
            for vectors, wanted in zip(pool.map(encode, jobs), expected, strict=True):
                np.testing.assert_allclose(vectors, wanted, atol=1e-6, rtol=0)


FORK = """
import json, multiprocessing, os, signal, sys
from sbert_infer import Engine

engine = Engine(sys.argv[1], max_batch_tokens=64)
engine._pipeline.backend.workers = 2
engine._pipeline.backend._share_cores = True  # also where there is only one core
for _ in range(3):
    lone = engine.encode("one text")  # in the session that has threads of its own
assert engine._pipeline.backend._lone_session is not None
texts = json.loads(sys.argv[2])
expected = engine.encode(texts)  # several batches: the worker threads are running
assert engine.last_stats.batches > 2

def encode(texts):
    return engine.encode(texts)

pid = os.fork()
if pid == 0:
    signal.alarm(60)  # a hang is a failure, not a wait
    close = abs(engine.encode(texts) - expected).max() < 1e-6
    for _ in range(3):
        close &= abs(engine.encode("one text") - lone).max() < 1e-6
    engine.close()
    os._exit(0 if close else 1)  # as multiprocessing does: onnxruntime itself, once imported, hangs in sys.exit
assert os.waitpid(pid, 0)[1] == 0, "the child failed"
with multiprocessing.get_context("fork").Pool(2) as pool:
    for vectors in pool.map_async(encode, [texts] * 4).get(timeout=60):
        assert abs(vectors - expected).max() < 1e-6
assert abs(engine.encode(texts) - expected).max() < 1e-6  # and the parent goes on
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_after_a_fork(small_onnx: Path) -> None:
    assert run(FORK, small_onnx, json.dumps(TEXTS)) == "done\n"


def test_close(small_onnx: Path) -> None:
    before = set(threading.enumerate())
    with Engine(small_onnx) as engine:
        engine.encode(list(TEXTS), batch_size=1)
        assert {thread.name.rpartition("_")[0] for thread in set(threading.enumerate()) - before} == {"sbert-infer"}
    uses: list[Any] = [
        lambda: engine.encode("a"),
        lambda: engine.encode([]),
        lambda: engine.encode_query("a"),
        lambda: engine.max_seq_length,
        lambda: engine.tokenizer,
        lambda: engine.info,
    ]
    for use in uses:
        with pytest.raises(EngineError, match=f"this engine is closed: {small_onnx}"):
            use()
    engine.close()
    assert "closed" in repr(engine)
    assert engine.manifest.dim == 32
    assert set(threading.enumerate()) <= before


def test_close_during_a_call(small_onnx: Path) -> None:
    engine = Engine(small_onnx, workers=1)
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS]
    failures: list[BaseException] = []
    running = threading.Event()
    make_batch = engine.pipeline.make_batch

    def tell(*arguments: Any) -> Batch:
        running.set()
        return make_batch(*arguments)

    engine.pipeline.make_batch = tell  # type: ignore[method-assign, assignment]

    def encode() -> None:
        try:
            engine.encode(texts, batch_size=1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    assert running.wait(timeout=30)
    engine.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert [(type(error), "closed" in str(error)) for error in failures] == [(EngineError, True)]


def test_an_engine_without_close_does_not_keep_the_process(small_onnx: Path) -> None:
    script = (
        "import sys, sbert_infer; sbert_infer.Engine(sys.argv[1]).encode(list('abcdef'), batch_size=1); print('end')"
    )
    assert run(script, small_onnx) == "end\n"


BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "sentence_transformers",
                                  "safetensors", "huggingface_hub"}:
            raise ModuleNotFoundError(name + " is blocked", name=name)

sys.meta_path.insert(0, Block())
"""


def test_neither_torch_nor_transformers_nor_onnx(small: Engine, small_onnx: Path, tmp_path: Path) -> None:
    script = BLOCK + (
        "import json, numpy; from sbert_infer import Engine\n"
        "engine = Engine(sys.argv[1])\n"
        "vectors = engine.encode_query(json.loads(sys.argv[2]), normalize_embeddings=True)\n"
        "numpy.savez(sys.argv[3], vectors=vectors, scores=engine.similarity(vectors, vectors))"
    )
    run(script, small_onnx, json.dumps(TEXTS), tmp_path / "vectors.npz")
    vectors = small.encode_query(TEXTS, normalize_embeddings=True)
    with np.load(tmp_path / "vectors.npz") as saved:
        np.testing.assert_allclose(saved["vectors"], vectors, atol=1e-6)
        np.testing.assert_allclose(saved["scores"], vectors @ vectors.T, atol=1e-6)


def test_import_is_light() -> None:
    script = (
        "import sys, sbert_infer; print(*{'onnxruntime', 'torch', 'transformers', 'onnx', 'tqdm'} & set(sys.modules))"
    )
    assert run(script) == "\n"


def test_without_onnxruntime_it_says_what_to_install(small_onnx: Path) -> None:
    script = BLOCK.replace('"torch"', '"onnxruntime"') + (
        "from sbert_infer import Engine, EngineError\n"
        "try: Engine(sys.argv[1])\n"
        "except EngineError as error: print(error)"
    )
    assert "pip install 'sbert-infer[cpu]'" in run(script, small_onnx)


def test_all_lists_the_public_names() -> None:
    assert sbert_infer.__all__ == sorted(sbert_infer.__all__)
    # Submodules and names imported for type hints are not public.
    found = {name for name, value in vars(sbert_infer).items() if isinstance(value, type)} | {"__version__"}
    assert set(sbert_infer.__all__) == found


def test_it_says_what_runs(small_onnx: Path) -> None:
    with Engine(small_onnx, workers=3, max_batch_tokens=700) as engine:
        info = engine.info
        assert info["path"] == str(small_onnx)
        assert info["model"] == "tiny-bert"
        assert (info["precision"], info["dim"], info["max_length"]) == ("fp32", 32, 64)
        assert (info["workers"], info["max_batch_tokens"]) == (3, 700)
        assert info["backend"].startswith("onnxruntime ")
        assert info["parity"]["min_cosine"] > 0.9999
        json.dumps(info)
        assert repr(engine) == f"Engine('{small_onnx}', fp32, {info['backend']})"
        assert engine.device == "cpu"
