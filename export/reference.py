"""The whole checkpoint as eager PyTorch in FP32: what every artifact is compared with.

The parameters of the modules carry the names they have in a checkpoint's weight files.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint import Checkpoint
from sbert_infer.export.modules import (
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    NormalizeSpec,
    PoolingSpec,
    WeightedLayerPoolingSpec,
    read_weights,
)
from sbert_infer.export.pretrained import ENCODERS, load_tokenizer, quiet_transformers

__all__ = ["Reference", "load_reference"]

# Weights that may be missing: the vectors are pooled from the last layer, not taken from the model's own pooler.
_UNUSED = re.compile(r"(^|\.)pooler\.")
# Weights that may be left over: heads of the training task, and buffers that older versions stored.
_LEFT_OVER = re.compile(
    r"(^|\.)(pooler|cls|lm_head|qa_outputs|(pre_)?classifier|score|predictions|sop_classifier|decoder|dropout|"
    r"vocab_(transform|layer_norm|projector)|(discriminator|generator|mask|lm)_(predictions|lm_head))\."
    r"|(^|\.)(position_ids|token_type_ids|inv_freq|logit_scale|masked_bias)$"
)


def _first(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    return _take(tokens, kept.to(torch.int32).argmax(dim=1))


def _last(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    positions = torch.arange(kept.shape[1], device=kept.device)  # [length]
    return _take(tokens * kept.unsqueeze(-1).to(tokens.dtype), (kept * positions).amax(dim=1))


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """Token `index[row]` of each row."""
    return tokens.gather(1, index.view(-1, 1, 1).expand(-1, 1, tokens.shape[2])).squeeze(1)


def _max(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    # The lowest number instead of -inf, and a zero for a row with nothing to pool: no NaN further down.
    filled = tokens.masked_fill(kept.unsqueeze(-1) == 0, torch.finfo(tokens.dtype).min)
    return filled.amax(dim=1) * kept.amax(dim=1, keepdim=True).to(tokens.dtype)


def _weighted(tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum over the tokens [batch, dim], and the sum of the weights [batch, 1]."""
    weights = weights.unsqueeze(-1).to(tokens.dtype)  # [batch, length, 1]
    return (tokens * weights).sum(dim=1), weights.sum(dim=1).clamp(min=1e-9)


def _mean(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    total, count = _weighted(tokens, kept)
    return total / count


def _mean_of_kept(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    """As `_mean`, on a GPU by the fused kernel, which reads the tokens once."""
    if not tokens.is_cuda or tokens.dtype not in (torch.float16, torch.float32):
        return _mean(tokens, kept, start)
    from sbert_infer.kernels.mean_pool import mean_pool

    return mean_pool(tokens, kept, out_dtype=tokens.dtype)


def _mean_sqrt_len(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    total, count = _weighted(tokens, kept)
    return total / count.sqrt()


def _weightedmean(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    # The first real token weighs 1, the second 2, ...; a prompt that is left out still counts.
    positions = torch.arange(1, kept.shape[1] + 1, device=kept.device) - start  # [batch, length]
    return _mean(tokens, kept * positions, start)


_POOL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean_of_kept,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weightedmean,
    "lasttoken": _last,
}


class Pooling(nn.Module):
    """Token vectors to one vector, right with padding on either side."""

    def __init__(self, spec: PoolingSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, tokens: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length, width], [batch, length] -> [batch, width * modes]."""
        start = attention_mask.to(torch.int32).argmax(dim=1, keepdim=True)  # [batch, 1], not 0 with left padding
        kept = attention_mask
        if prompt_length is not None and not self.spec.include_prompt:
            positions = torch.arange(kept.shape[1], device=kept.device)
            kept = kept * (positions >= start + prompt_length).to(kept.dtype)
        return torch.cat([_POOL[mode](tokens, kept, start) for mode in self.spec.modes], dim=-1)


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


def build_module(spec: ModuleSpec) -> nn.Module:
    """The module in FP32 with its weights."""
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


class Reference(nn.Module):
    """The transformer, the pooling and what follows; `forward` has no branch that depends on the data."""

    def __init__(self, checkpoint: Checkpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.encoder = encoder
        modules = [build_module(spec) for spec in checkpoint.modules]
        at = next(i for i, module in enumerate(modules) if isinstance(module, Pooling))
        self.layer_pooling = modules[0] if isinstance(modules[0], WeightedLayerPooling) else None
        self.pooling = modules[at]
        self.head = nn.Sequential(*modules[at + 1 :])
        self.eval()

    @property
    def layers(self) -> int:
        """How many layers the transformer has."""
        config: Any = self.encoder.config
        return int(config.num_hidden_layers)

    @property
    def gelu_layers(self) -> int:
        """How many of them have a GELU, exact or approximate, as their activation."""
        config: Any = self.encoder.config
        name = getattr(config, "hidden_act", None) or getattr(config, "activation", "")
        return self.layers if "gelu" in str(name) else 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length] twice -> [batch, dim]; leaves the first `prompt_length` tokens out where the model does."""
        layers = self.layer_pooling is not None
        output = self.encoder(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=layers)
        tokens = output.last_hidden_state  # [batch, length, width]
        if self.layer_pooling is not None:
            tokens = self.layer_pooling(output.hidden_states)
        sentence: Tensor = self.head(self.pooling(tokens, attention_mask, prompt_length))
        return sentence

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Padded ids and mask, each [batch, length]; texts over the limit are cut."""
        batch = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
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


def load_reference(checkpoint: Checkpoint, *, attention: Literal["sdpa", "eager"] = "sdpa") -> Reference:
    """Load the weights in FP32, whatever they are stored in.

    (sentence-transformers 6 on transformers 5 computes in the stored type, e.g. FP16.) "sdpa" means scaled dot product
    attention where the model has it. Raises `CheckpointError` for weights that are missing, misshapen or unknown.
    """
    with quiet_transformers():
        encoder, info = _load_encoder(checkpoint, attention)
    problems = list(_weight_problems(info))
    if problems:
        raise CheckpointError(checkpoint.source, problems)
    return Reference(checkpoint, encoder, load_tokenizer(checkpoint))


def _load_encoder(checkpoint: Checkpoint, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    model_class = getattr(transformers, ENCODERS.get(checkpoint.model_type, "AutoModel"))
    try:
        encoder, info = model_class.from_pretrained(
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


def _weight_problems(info: dict[str, Any]) -> Iterable[str]:
    for key in sorted(info["missing_keys"]):
        if not _UNUSED.search(key):
            yield f"the transformer's weights lack '{key}'"
    for key in sorted(info["unexpected_keys"]):
        if not _LEFT_OVER.search(key):
            yield f"the transformer's weights hold '{key}', which the model has no place for"
    for key, found, expected in sorted(info["mismatched_keys"]):
        yield f"the transformer's '{key}' has shape {list(found)}, but config.json asks for {list(expected)}"
