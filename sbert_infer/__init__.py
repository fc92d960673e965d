"""sbert-infer: the vectors of a Sentence-BERT model, from one file, at the speed of the hardware.

>>> from sbert_infer import Engine
>>> Engine("model.onnx").encode(["a text", "another"])  # doctest: +SKIP
"""

from sbert_infer.async_engine import AsyncEngine
from sbert_infer.encode.output import EncodeStats
from sbert_infer.engine import Engine
from sbert_infer.errors import (
    ArtifactError,
    CallTooLargeError,
    CheckpointError,
    CorruptError,
    DeadlineError,
    EmbedError,
    EngineError,
    ExportError,
    OverloadedError,
    ParityError,
    RetryableError,
    SbertInferError,
    SbertInferWarning,
    TextError,
    TruncationError,
    VersionError,
    WorkerError,
    WrongVectorsError,
)
from sbert_infer.reranker import Reranker
from sbert_infer.scheduling.stats import AsyncStats
from sbert_infer.types import Encoded

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "AsyncEngine",
    "AsyncStats",
    "CallTooLargeError",
    "CheckpointError",
    "CorruptError",
    "DeadlineError",
    "EmbedError",
    "EncodeStats",
    "Encoded",
    "Engine",
    "EngineError",
    "ExportError",
    "OverloadedError",
    "ParityError",
    "Reranker",
    "RetryableError",
    "SbertInferError",
    "SbertInferWarning",
    "TextError",
    "TruncationError",
    "VersionError",
    "WorkerError",
    "WrongVectorsError",
    "__version__",
]
