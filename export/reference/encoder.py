"""The whole checkpoint as eager PyTorch in FP32: what every artifact is compared with.

The parameters of the modules carry the names they have in a checkpoint's weight files.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    NormalizeSpec,
    PoolingSpec,
    WeightedLayerPoolingSpec,
    read_weights,
)
from sbert_infer.export.checkpoint.sparse_modules import AutoEncoderSpec, PresenceSpec, SpladeSpec
from sbert_infer.export.checkpoint.sparse_static import SPARSE_STATIC, WordEncoder, without_special_tokens
from sbert_infer.export.checkpoint.static import MODEL_TYPE, StaticEncoder, StaticTokenizer
from sbert_infer.export.checkpoint.transformer import ENCODERS, load_tokenizer, quiet_transformers
from sbert_infer.export.reference.pooling import Pooling
from sbert_infer.export.reference.sparse import LanguageModel, build_sparse_module

__all__ = [
    "Encoder",
    "Reference",
    "build_module",
    "count_gelu_layers",
    "load_encoder",
    "load_reference",
    "weight_problems",
]

# Weights that may be missing: the vectors are pooled from the last layer, not taken from the
# model's own pooler.
_UNUSED = re.compile(r"(^|\.)pooler\.")
_NOTHING = re.compile(r"(?!)")  # matches no weight
# Weights that may be left over: heads of the training task, and buffers that older versions stored.
_LEFT_OVER = re.compile(
    r"(^|\.)(pooler|cls|lm_head|qa_outputs|(pre_)?classifier|score|predictions|sop_classifier|decoder|dropout|"
    r"vocab_(transform|layer_norm|projector)|(discriminator|generator|mask|lm)_(predictions|lm_head))\."
    r"|(^|\.)(position_ids|token_type_ids|inv_freq|logit_scale|masked_bias)$|^head\."
)


class Dense(nn.Module):
    """Linear layer, activation, residual."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.in_features, spec.out_features, bias=spec.bias)
        self.activation = getattr(nn, spec.activation)()
        self.residual: nn.Module | None = None
        if spec.residual:
            same = spec.in_features == spec.out_features
            self.residual = nn.Identity() if same else nn.Linear(spec.in_features, spec.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in_features] -> [batch, out_features]."""
        out: Tensor = self.activation(self.linear(x))
        return out if self.residual is None else out + self.residual(x)


class LayerNorm(nn.Module):
    """Layer normalisation of the sentence vector."""

    def __init__(self, spec: LayerNormSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, dim] -> [batch, dim]."""
        out: Tensor = self.norm(x)
        return out


class Normalize(nn.Module):
    """Scaling to unit length; a zero vector stays zero."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, dim] -> [batch, dim]."""
        return F.normalize(x, p=2, dim=-1)


class WeightedLayerPooling(nn.Module):
    """Weighted mean of the transformer's layers."""

    def __init__(self, spec: WeightedLayerPoolingSpec) -> None:
        super().__init__()
        self.layer_start = spec.layer_start
        self.layer_weights = nn.Parameter(torch.empty(spec.shapes["layer_weights"]))

    def forward(self, layers: tuple[Tensor, ...]) -> Tensor:
        """Layers of [batch, length, width] -> [batch, length, width]."""
        stacked = torch.stack(layers[self.layer_start :])  # [layers, batch, length, width]
        weights = self.layer_weights.view(-1, 1, 1, 1)
        return (weights * stacked).sum(dim=0) / self.layer_weights.sum()


def build_module(spec: ModuleSpec, encoder: nn.Module) -> nn.Module:
    """The module behind `encoder` in FP32 with its weights."""
    if isinstance(spec, SpladeSpec | PresenceSpec | AutoEncoderSpec):
        return build_sparse_module(spec, encoder)
    if isinstance(spec, PoolingSpec):
        return Pooling(spec)
    if isinstance(spec, NormalizeSpec):
        return Normalize()
    module: nn.Module
    if isinstance(spec, DenseSpec):
        module = Dense(spec)
    elif isinstance(spec, LayerNormSpec):
        module = LayerNorm(spec)
    else:
        module = WeightedLayerPooling(spec)
    module.load_state_dict(read_weights(spec.path))
    return module


class Encoder(nn.Module):
    """A module around a transformer."""

    encoder: nn.Module

    @property
    def layers(self) -> int:
        """How many layers the transformer has."""
        config: Any = self.encoder.config
        return int(config.num_hidden_layers)

    @property
    def gelu_layers(self) -> int:
        """How many of them have a GELU, exact or approximate, as their activation."""
        count = count_gelu_layers(self.encoder.config)
        return count + (count > 0 and isinstance(self.encoder, LanguageModel))  # whose head has one, too


class Reference(Encoder):
    """The transformer, the pooling and what follows; `forward` has no branch that depends on the data."""

    def __init__(self, checkpoint: Checkpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.encoder = encoder
        modules = [build_module(spec, encoder) for spec in checkpoint.modules]
        at = next(i for i, spec in enumerate(checkpoint.modules) if isinstance(spec, PoolingSpec))
        self.layer_pooling = modules[0] if isinstance(modules[0], WeightedLayerPooling) else None
        self.pooling = modules[at]
        self.head = nn.Sequential(*modules[at + 1 :])
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length] twice -> [batch, dim]; leaves the first `prompt_length` tokens out where the model does."""
        return self.pool(self.token_vectors(input_ids, attention_mask), attention_mask, prompt_length)

    def token_vectors(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, length] twice -> [batch, length, width]: what is pooled."""
        layers = self.layer_pooling is not None
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=layers)
        tokens: Tensor = output.last_hidden_state
        return tokens if self.layer_pooling is None else self.layer_pooling(output.hidden_states)

    def pool(self, tokens: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length, width] -> [batch, dim]."""
        sentence: Tensor = self.head(self.pooling(tokens, attention_mask, prompt_length))
        return sentence

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Padded ids and mask, each [batch, length]; texts over the limit are cut."""
        batch = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        if not batch["input_ids"].numel():  # empty texts, and a tokenizer without special tokens
            ids = torch.full((len(texts), 1), self.tokenizer.pad_token_id)
            return ids, torch.zeros_like(ids)
        return batch["input_ids"], batch["attention_mask"]

    def prompt_length(self, prompt: str) -> int:
        """Tokens of the prompt alone with its special tokens, less a trailing one; 0 without a prompt."""
        if not prompt:
            return 0
        ids = self.tokenizer(prompt, truncation=True)["input_ids"]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], *, prompt: str = "", batch_size: int = 32) -> np.ndarray[Any, np.dtype[Any]]:
        """One vector a text, [texts, dim]. Neither the default prompt nor `truncate_dim` is applied."""
        prompt_length = torch.tensor(self.prompt_length(prompt))
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # similar lengths, less padding
        vectors = np.empty((len(texts), self.checkpoint.dim), dtype=np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids, mask = self.tokenize([prompt + texts[i] for i in rows])
            vectors[rows] = self(ids, mask, prompt_length).numpy()
        return vectors


def count_gelu_layers(config: Any) -> int:
    """How many layers of a transformer have a GELU, exact or approximate, as their activation."""
    keys = ("hidden_act", "hidden_activation", "dense_act_fn", "activation")
    name = next((getattr(config, key) for key in keys if getattr(config, key, None)), "")
    return int(config.num_hidden_layers) if "gelu" in str(name) else 0


def load_encoder(checkpoint: Checkpoint, besides: Sequence[str] = ()) -> Any:
    """The transformer alone; the weights `besides` are not its own. Raises `CheckpointError` as `load_reference`."""
    with quiet_transformers():
        encoder, info = load_pretrained(checkpoint)
    info["unexpected_keys"] = set(info["unexpected_keys"]) - set(besides)
    if problems := list(weight_problems(info, unused=_UNUSED)):
        raise CheckpointError(checkpoint.source, problems)
    encoder.config.use_cache = False
    return encoder


def load_reference(checkpoint: Checkpoint, *, attention: Literal["sdpa", "eager"] = "sdpa") -> Reference:
    """Load the weights in FP32, whatever they are stored in.

    (sentence-transformers 6 on transformers 5 computes in the stored type, e.g. FP16.) "sdpa" means
    scaled dot product attention where the model has it. Raises `CheckpointError` for weights that
    are missing, misshapen or unknown.
    """
    if checkpoint.model_type == MODEL_TYPE:
        return Reference(checkpoint, StaticEncoder(checkpoint.transformer_path), _static_tokenizer(checkpoint))
    if checkpoint.model_type == SPARSE_STATIC:
        return Reference(checkpoint, WordEncoder(), without_special_tokens(load_tokenizer(checkpoint)))
    with quiet_transformers():
        encoder, info = _load_encoder(checkpoint, attention)
    scores = isinstance(checkpoint.pooling, SpladeSpec)
    problems = list(weight_problems(info, unused=_NOTHING if scores else _UNUSED))
    if problems:
        raise CheckpointError(checkpoint.source, problems)
    encoder.config.use_cache = False  # of keys and values, which a decoder would fill for nothing
    encoder = LanguageModel(encoder, checkpoint.source) if scores else encoder
    return Reference(checkpoint, encoder, load_tokenizer(checkpoint))


def _static_tokenizer(checkpoint: Checkpoint) -> StaticTokenizer:
    tokenizer = StaticTokenizer(checkpoint.transformer_path)
    tokenizer.model_max_length = checkpoint.max_length
    return tokenizer


def _load_encoder(checkpoint: Checkpoint, attention: str) -> tuple[Any, dict[str, Any]]:
    scores = isinstance(checkpoint.pooling, SpladeSpec)
    return load_pretrained(checkpoint, "AutoModelForMaskedLM" if scores else None, attention)


def load_pretrained(
    checkpoint: Checkpoint, model_class: str | None = None, attention: str = "sdpa"
) -> tuple[Any, dict[str, Any]]:
    """The transformer in FP32, and what transformers says of its weights. Its class is the encoder's, if not given."""
    loader = getattr(transformers, model_class or ENCODERS.get(checkpoint.model_type, "AutoModel"))
    try:
        encoder, info = loader.from_pretrained(
            checkpoint.transformer_path,
            dtype=torch.float32,
            attn_implementation=None if attention == "sdpa" else attention,  # None: sdpa where the model has it
            trust_remote_code=checkpoint.trust_remote_code,
            weights_only=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they come back in `info`, all of them
            output_loading_info=True,
        )
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(checkpoint.source, [f"the transformer's weights can't be loaded: {reason}"]) from error
    return encoder, info


def weight_problems(info: dict[str, Any], *, unused: re.Pattern[str]) -> Iterable[str]:
    """What is wrong with the weights that transformers has loaded. Those that match `unused` may be missing."""
    for key in sorted(info["missing_keys"]):
        if not unused.search(key):
            yield f"the transformer's weights lack '{key}'"
    for key in sorted(info["unexpected_keys"]):
        if not _LEFT_OVER.search(key):
            yield f"the transformer's weights hold '{key}', which the model has no place for"
    for key, found, expected in sorted(info["mismatched_keys"]):
        yield f"the transformer's '{key}' has shape {list(found)}, but config.json asks for {list(expected)}"
