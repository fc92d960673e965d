"""The layout of Stanford's ColBERT code, with the projection among the transformer's weights.

config.json names the architecture HF_ColBERT, and artifact.metadata holds the training settings, a
few of which matter for inference. Three things are implied: queries are always expanded with
[MASK], the punctuation of documents does not count, and each vector has length 1.
"""

from __future__ import annotations

import string
from pathlib import Path

from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    ModuleSpec,
    NormalizeSpec,
    Problems,
    peek_json,
    read_json,
    read_weights,
)
from sbert_infer.export.families.multi_vector.roles import ModelSettings, RoleSettings

PROJECTION = "linear.weight"  # among the transformer's weights
_METADATA = "artifact.metadata"


def is_stanford(path: Path) -> bool:
    """Whether the folder holds a checkpoint in this layout."""
    names = peek_json(path / "config.json").get("architectures")
    return isinstance(names, list) and "HF_ColBERT" in names and not (path / "modules.json").exists()


def read_stanford(path: Path, problems: Problems) -> ModelSettings:
    """Read the settings. Without artifact.metadata the defaults of Stanford's code apply."""
    there = (path / _METADATA).is_file()
    metadata = read_json(path / _METADATA, _METADATA, problems) if there else {}
    if (similarity := metadata.get("similarity", "cosine")) != "cosine":
        problems.append(f"{_METADATA}: the similarity {similarity!r} is not supported, only 'cosine'")
    expansion = {
        "strategy": "fixed",
        "attend": bool(metadata.get("attend_to_mask_tokens")),
        "length": metadata.get("query_maxlen") or 32,
    }
    skipped = string.punctuation if metadata.get("mask_punctuation", True) else ""
    by_role = RoleSettings(None, metadata.get("doc_maxlen"), expansion, tuple(skipped), ("document",))
    marks = {
        "query": metadata.get("query_token_id") or "[unused0]",
        "document": metadata.get("doc_token_id") or "[unused1]",
    }
    prompts = {role: f"{mark} " for role, mark in marks.items()}
    return ModelSettings(prompts, _read_projection(path, problems), by_role, tuple(prompts.values()))


def _read_projection(path: Path, problems: Problems) -> list[tuple[str, ModuleSpec]]:
    try:
        shape = read_weights(path)[PROJECTION].shape
    except ValueError as error:
        problems.append(str(error))
        return []
    except KeyError:
        problems.append(f"the weights lack '{PROJECTION}', the projection of an HF_ColBERT")
        return []
    dense = DenseSpec(path, in_features=shape[1], out_features=shape[0], bias=False, activation="Identity")
    return [(PROJECTION, dense), ("Normalize", NormalizeSpec())]
