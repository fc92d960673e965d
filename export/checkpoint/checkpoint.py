"""The content of a checkpoint, the same for all layouts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sbert_infer.export.checkpoint.adapter import Adapter
from sbert_infer.export.checkpoint.hub import weight_files
from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    PoolingSpec,
    WeightedLayerPoolingSpec,
    output_dim,
)
from sbert_infer.export.checkpoint.sparse_modules import is_sparse
from sbert_infer.export.options import source_name


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint says, whatever its layout. The weights stay on disk."""

    source: str  # what the user typed
    path: Path
    transformer_path: Path  # folder of the first module and its weights; may be a subfolder
    model_type: str  # e.g. "bert"
    modules: tuple[ModuleSpec, ...] = ()  # after the transformer or the static embeddings, in order
    max_length: int  # in tokens, special ones included
    max_positions: int | None = None  # tokens that the table of positions holds, if that is what limits them
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str = ""
    truncate_dim: int | None = None
    do_lower_case: bool
    trust_remote_code: bool
    adapter: Adapter | None = None  # to be merged into the weights of its base model
    max_active_dims: int | None = None  # of a sparse vector; None means any number

    @property
    def name(self) -> str:
        """The folder's or the repository's name, for people."""
        return source_name(self.source)

    @property
    def base_path(self) -> Path:
        """The folder of the transformer's config and weights: with an adapter, the base model's."""
        return self.adapter.base if self.adapter else self.transformer_path

    @property
    def is_sparse(self) -> bool:
        """Whether the vectors are sparse."""
        return is_sparse(self.modules)

    @property
    def dim(self) -> int:
        """Width of the vectors, before `truncate_dim`."""
        return output_dim(self.modules)

    @property
    def pooling(self) -> PoolingSpec:
        """The one pooling module."""
        return next(spec for spec in self.modules if isinstance(spec, PoolingSpec))


def weights_sha256(checkpoint: Checkpoint) -> str:
    """Hash of all weight files in use: the transformer's, then the modules' in order."""
    files = weight_files(checkpoint.base_path, "", [])
    files += [checkpoint.adapter.file] if checkpoint.adapter else []
    for spec in checkpoint.modules:
        if isinstance(spec, DenseSpec | LayerNormSpec | WeightedLayerPoolingSpec):
            files += weight_files(spec.path, "", [])
    total = hashlib.sha256()
    if adapter := checkpoint.adapter:  # how much it counts is not in its weights
        scaling = (adapter.alpha, sorted(adapter.alphas.items()), adapter.rank_stabilized)
        total.update(repr(scaling).encode())
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                total.update(chunk)
    return total.hexdigest()
