"""What is compared with the reference: an artifact, opened as a user would, or a graph."""

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

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import Batch
from sbert_infer.backends.select import BackendOptions, open_backend
from sbert_infer.encode.sparse import SparseOutput, SparseRows
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.fp16_emulation import emulate_half

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


class EngineCandidate:
    """The artifact of a sentence encoder."""

    def __init__(self, path: Path, **options: Any) -> None:
        """Open it with these options of `Engine`."""
        self._engine = Engine(path, on_truncate="ignore", verify="never", **options)
        self._engine.truncate_dim = None
        self.close = self._engine.close

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


def open_outputs(path: Path, *names: str) -> Callable[[Ids, Ids], list[Vectors]]:
    """A function from ids and mask [batch, length] to these outputs of the artifact's graph."""
    backend = open_backend(open_artifact(path), BackendOptions("cpu", workers=1))

    def run(ids: Ids, mask: Ids) -> list[Vectors]:
        return backend.run(Batch(ids, mask), names)

    return run


class GraphCandidate:
    """A graph for padded batches in a session of onnxruntime on the CPU; `reference` tokenizes."""

    def __init__(self, session: Any, reference: Reference) -> None:
        self._session, self._reference = session, reference
        self._tokenizing = threading.Lock()  # the tokenizer must not be used by two threads at once

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """Encode `texts` in one batch."""
        with self._tokenizing:
            ids, mask = self._reference.tokenize([prompt + text for text in texts])
            prompt_length = self._reference.prompt_length(prompt)
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        if not self._reference.checkpoint.pooling.include_prompt:
            inputs["prompt_length"] = np.array(prompt_length)
        try:
            vectors: Vectors = self._session.run([SENTENCE], inputs)[0]
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't run the graph: {error}") from error
        if not np.isfinite(vectors).all():
            raise EngineError("the graph gives NaN or infinity")
        return vectors

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """Encode `texts` in one batch."""
        return self.encode(texts)


def open_half(model: bytes) -> Any:
    """Open `model`, in FP16 or BF16, with its rounding made explicit; see `fp16_emulation.py`.

    From a file with external weights: in FP32 they may exceed protobuf's 2 GB.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    with TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.onnx"
        try:
            ir.save(emulate_half(model), path, external_data="weights")
            return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # as above
            raise EngineError(f"onnxruntime {onnxruntime.__version__} can't load the graph: {error}") from error
