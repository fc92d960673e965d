"""sbert-infer: the same vectors as the eager Sentence-BERT model, at the speed of the hardware, from one file.

>>> from sbert_infer import Engine
>>> Engine("model.onnx").encode(["a text", "another"])  # doctest: +SKIP
"""

from .engine import Engine
from .errors import (
    ArtifactError,
    CheckpointError,
    CorruptError,
    EngineError,
    ExportError,
    ParityError,
    SbertInferError,
    SbertInferWarning,
    TruncationError,
    VersionError,
)
from .pipeline import EncodeStats

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "CheckpointError",
    "CorruptError",
    "EncodeStats",
    "Engine",
    "EngineError",
    "ExportError",
    "ParityError",
    "SbertInferError",
    "SbertInferWarning",
    "TruncationError",
    "VersionError",
    "__version__",
]
