"""The fingerprint: which vectors an artifact gives, as hashes that can be stored beside them.

Vectors may be compared, joined and reused if their fingerprints are equal. Each part is a hash of
its own, so that two fingerprints also say what differs. They depend only on what the checkpoint and
the export's options say: not on the machine, the versions, the file's name or its format.

The precision is the artifact's, not that of the arithmetic: a BF16 file has the same fingerprint
whether OpenVINO runs it in BF16 or onnxruntime in FP32, and so has a plan on a GPU or on a CPU. An
8-bit file has the same one whatever texts it was calibrated with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sbert_infer.artifact.manifest import Artifact

PRECISION = "precision"
PARTS = ("weights", "tokenizer", "pooling", "prompts", "limit", "dimensions", PRECISION)
_HEX = 16  # digits of a hash: 64 bits, enough to tell models apart, and short enough to read

# Fields of the manifest that change a vector after the weights.
_POOLING = (
    "kind",
    "outputs",
    "pooling",
    "include_prompt",
    "normalized",
    "head",
    "activation",
    "roles",
    "token_types",
    "unweighted_ids",
    "max_active_dims",
    "padding_side",
    "truncation_side",
)


@dataclass(frozen=True)
class Fingerprint:
    """What the vectors of an artifact depend on: a short hash for each of `PARTS`."""

    parts: Mapping[str, str]

    @cached_property
    def model(self) -> str:
        """The hash of all parts but the precision: the same for FP32, BF16, FP16 and 8 bits."""
        return _digest({name: value for name, value in self.parts.items() if name != PRECISION})

    @cached_property
    def exact(self) -> str:
        """The hash of all parts, by which vectors are compared."""
        return _digest(dict(self.parts))

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of the parts that differ."""
        return [name for name in PARTS if self.parts[name] != other.parts[name]]

    def to_json(self) -> str:
        """Return the parts as JSON on one line, for a header or a file's metadata."""
        return json.dumps(dict(self.parts), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Read what `to_json` wrote; raise `ValueError` for anything else."""
        parts = json.loads(text)
        if not isinstance(parts, dict) or set(parts) != set(PARTS):
            raise ValueError(f"not a fingerprint, which has {', '.join(PARTS)}: {text[:90]}")
        return cls({name: str(parts[name]) for name in PARTS})


def fingerprint(artifact: Artifact) -> Fingerprint:
    """Return the fingerprint of an artifact, from its manifest and tokenizer."""
    manifest = artifact.manifest
    content: dict[str, Any] = {
        "weights": manifest.weights_sha256,
        "tokenizer": hashlib.sha256(artifact.tokenizer_json.encode()).hexdigest(),
        "pooling": {name: getattr(manifest, name) for name in _POOLING},
        "prompts": [dict(manifest.prompts), manifest.default_prompt_name],
        "limit": manifest.max_length,
        "dimensions": [manifest.dim, manifest.truncate_dim],
        PRECISION: manifest.precision,
    }
    return Fingerprint({name: _digest(content[name]) for name in PARTS})


def _digest(content: Any) -> str:
    """Return a short hash of anything that JSON can hold; the order of keys does not matter."""
    text = json.dumps(content, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX]
