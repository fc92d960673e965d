"""sbert-infer: the same vectors as the eager Sentence-BERT model, at the speed of the hardware, from one file.

>>> from sbert_infer import Engine
>>> Engine("model.onnx").encode(["a text", "another"])  # doctest: +SKIP
"""

from .async_engine import AsyncEngine, AsyncStats
from .call import Encoded
from .engine import Engine
from .errors import (
    ArtifactError,
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
)
from .pipeline import EncodeStats
from .reranker import Reranker

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "AsyncEngine",
    "AsyncStats",
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
    "__version__",
]
