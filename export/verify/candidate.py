"""What is compared with the reference: an artifact, opened as a user would, or a graph on its own.

The only module of the export that runs artifacts, so the only one that calls engines and backends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import torch

from sbert_infer.backends.onnxruntime_session import FileModel, open_session
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.sparse import SparseOutput, SparseRows
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.fp16_emulation import emulate_half
from sbert_infer.reranker import Reranker
from sbert_infer.types import Pair

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class Candidate(Protocol):
    """Gives vectors [texts, dim]. Called from several threads at once; raises `EngineError`."""

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` in batches of the candidate's choice."""
        ...

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` in one batch."""
        ...


class _Opened:
    """An artifact in an engine."""

    _engine: BaseEngine

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class EngineCandidate(_Opened):
    """The artifact of a sentence encoder."""

    _engine: Engine

    def __init__(self, path: Path, **options: Any) -> None:
        """Open it with these options of `Engine`."""
        self._engine = Engine(path, on_truncate="ignore", **options)
        self._engine.truncate_dim = None

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` as a user would."""
        vectors: Vectors = self._engine.encode(texts, prompt=prompt)
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` in one batch, whatever their lengths; the engine would sort them."""
        return self._engine.pipeline.run_together(texts)


class SparseCandidate(EngineCandidate):
    """The artifact of a sparse encoder. Its vectors are given as dense ones, all numbers kept."""

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` as a user would."""
        manifest, pipeline = self._engine.manifest, self._engine.pipeline
        skip = 0 if manifest.include_prompt else pipeline.tokenizer.prompt_length(prompt)
        windows = pipeline.run(texts, SparseOutput(manifest, manifest.dim), prompt=prompt, prompt_length=skip)
        return SparseRows.of([row for window in windows for row in window.vectors], manifest.dim).to_dense()


class PairCandidate(_Opened):
    """The artifact of a cross-encoder."""

    def __init__(self, path: Path) -> None:
        self._engine = Reranker(path, on_truncate="ignore", workers=1)

    def run_together(self, pairs: Sequence[Pair]) -> Vectors:
        """Score `pairs` in one batch, [pairs, labels]."""
        return self._engine.pipeline.run_together(pairs)


class MultiVectorCandidate(_Opened):
    """The artifact of a multi-vector encoder."""

    _engine: Engine

    def __init__(self, path: Path) -> None:
        self._engine = Engine(path, on_truncate="ignore", threads=1)

    def encode(self, texts: Sequence[str], task: str | None, prompt: str) -> list[Vectors]:
        """The vectors of each text, [tokens, dim]."""
        vectors: list[Vectors] = self._engine.encode(list(texts), task=task, prompt=prompt)
        return vectors


def open_outputs(path: Path, *names: str) -> Callable[[Ids, Ids], list[Vectors]]:
    """A function from ids and mask [batch, length] to these outputs of the artifact's graph."""
    session = open_session(FileModel(path), 1)

    def run(ids: Ids, mask: Ids) -> list[Vectors]:
        outputs: list[Vectors] = session.run(list(names), {"input_ids": ids, "attention_mask": mask})
        return outputs

    return run


class GraphCandidate:
    """A serialized graph in onnxruntime on the CPU.

    `reference` tokenizes, and pools where the graph does not.
    """

    def __init__(self, model: bytes, reference: Reference, *, weights: bytes | None = None) -> None:
        """Load an FP16 graph or, if `weights` (the bytes of `model.onnx`) are given, a CPU graph.

        The FP16 graph is run with its rounding made explicit; see `fp16_emulation.py`.
        """
        self._reference = reference
        self._tokenizing = threading.Lock()  # the tokenizer must not be used by two threads at once
        try:
            self._session: Any = _open_half(model) if weights is None else _open_cpu_graph(model, weights)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't load the graph: {error}") from error
        self._output = self._session.get_outputs()[0].name

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` in one batch."""
        with self._tokenizing:
            ids, mask = self._reference.tokenize([prompt + text for text in texts])
            prompt_length = self._reference.prompt_length(prompt)
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        pooled = self._output == "sentence_embedding"
        if pooled and not self._reference.checkpoint.pooling.include_prompt:
            inputs["prompt_length"] = np.array(prompt_length)
        try:
            output = self._session.run([self._output], inputs)[0]
        except Exception as error:  # as above
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't run the graph: {error}") from error
        vectors: Vectors = output if pooled else self._pool(output, mask, prompt_length)
        if not np.isfinite(vectors).all():
            raise EngineError("the graph gives NaN or infinity")
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` in one batch."""
        return self.encode(texts)

    @torch.inference_mode()
    def _pool(self, tokens: Vectors, mask: torch.Tensor, prompt_length: int) -> Vectors:
        vectors: Vectors = self._reference.pool(torch.from_numpy(tokens), mask, torch.tensor(prompt_length)).numpy()
        return vectors


def _open_half(model: bytes) -> Any:
    """Open `model` from a file with external weights: in FP32 they may exceed protobuf's 2 GB."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.onnx"
        ir.save(emulate_half(model), path, external_data="weights")
        return _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def _open_cpu_graph(model: bytes, weights: bytes) -> Any:
    """Open `model` from a file: onnxruntime before 1.24 finds external weights in no other way."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.onnx").write_bytes(weights)
        path = Path(folder) / "cpu.onnx"
        path.write_bytes(model)
        return _session(path, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)


def _session(path: Path, level: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
