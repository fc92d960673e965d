"""From what the vectors of an output were made, as it is kept in the output's metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from sbert_infer.artifact.fingerprint import Fingerprint

ORIGIN = b"sbert_infer.origin"  # key in the metadata of Parquet
FOLDER_ORIGIN = "_origin.json"  # file in a folder of Parquet; readers skip names with an underscore
# Fields that the vectors depend on besides the fingerprint, each with the option that sets it.
_OPTIONS = {"prompt": "--prompt", "dim": "--truncate-dim", "normalize": "--normalize"}


@dataclass(frozen=True)
class Origin:
    """From what vectors were made, and which columns of their file hold them and their texts."""

    fingerprint: Fingerprint
    prompt: str
    dim: int
    normalize: bool
    precision: str
    text_column: str
    embedding_column: str

    def differences(self, other: Origin) -> list[str]:
        """Return what makes other vectors of the same text, before their precision is reduced."""
        parts = [f"the model's {part}" for part in self.fingerprint.differences(other.fingerprint)]
        return parts + [option for name, option in _OPTIONS.items() if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({**asdict(self), "fingerprint": dict(self.fingerprint.parts)}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Origin:
        """Read what `to_json` wrote; raise `ValueError` for anything else."""
        try:
            values = json.loads(text)
            return cls(**{**values, "fingerprint": Fingerprint.from_json(json.dumps(values["fingerprint"]))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not what sbert-embed writes about vectors: {error}") from error


def read_origin(path: Path) -> Origin | None:
    """Read the origin of a Parquet file, from its metadata or its folder; None if unknown."""
    found = (pq.read_schema(path).metadata or {}).get(ORIGIN)
    beside = path.with_name(FOLDER_ORIGIN)
    if found is None and beside.exists():
        found = beside.read_bytes()
    return None if found is None else Origin.from_json(found)
