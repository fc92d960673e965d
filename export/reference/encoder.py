"""The whole checkpoint as eager PyTorch in FP32, which every artifact is compared with.

The modules' parameters have the same names as in a checkpoint's weight files.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.hub import first_line
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
from sbert_infer.export.checkpoint.static import SPARSE_STATIC, STATIC, StaticTokenizer, without_special_tokens
from sbert_infer.export.checkpoint.transformer import ENCODERS, load_tokenizer, quiet_transformers
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.reference.pooling import Pooling
from sbert_infer.export.reference.sparse import LanguageModel, build_sparse_module
from sbert_infer.export.reference.static import StaticEncoder, WordEncoder

# Weights that an encoder may lack: vectors are pooled from the last layer, not by its own pooler.
_POOLER = re.compile(r"(^|\.)pooler\.")
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
    """Build the module that follows `encoder`, in FP32 and with its weights."""
    if isinstance(spec, SpladeSpec | PresenceSpec | AutoEncoderSpec):
        return build_sparse_module(spec, encoder)
    if isinstance(spec, PoolingSpec):
        return Pooling(spec)
    if isinstance(spec, NormalizeSpec):
        return Normalize()
    kinds: dict[type, Callable[[Any], nn.Module]]
    kinds = {DenseSpec: Dense, LayerNormSpec: LayerNorm, WeightedLayerPoolingSpec: WeightedLayerPooling}
    module = kinds[type(spec)](spec)
    module.load_state_dict(read_weights(spec.path))
    return module


class Encoder(nn.Module):
    """A transformer with its tokenizer and what follows it: the base of all references."""

    def __init__(self, checkpoint: Checkpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.eval()

    @property
    def layers(self) -> int:
        """Number of layers of the transformer."""
        config: Any = self.encoder.config
        return int(config.num_hidden_layers)

    @property
    def gelu_layers(self) -> int:
        """Number of layers whose activation is a GELU, exact or approximate."""
        config: Any = self.encoder.config
        keys = ("hidden_act", "hidden_activation", "dense_act_fn", "activation")
        name = next((getattr(config, key) for key in keys if getattr(config, key, None)), "")
        count = self.layers if "gelu" in str(name) else 0
        return count + (count > 0 and isinstance(self.encoder, LanguageModel))  # its head has one as well


class Reference(Encoder):
    """Transformer, pooling and the modules after it. No branch of `forward` depends on the data."""

    def __init__(self, checkpoint: Checkpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__(checkpoint, encoder, tokenizer)
        modules = [build_module(spec, encoder) for spec in checkpoint.modules]
        at = next(i for i, spec in enumerate(checkpoint.modules) if isinstance(spec, PoolingSpec))
        self.layer_pooling = modules[0] if isinstance(modules[0], WeightedLayerPooling) else None
        self.pooling = modules[at]
        self.head = nn.Sequential(*modules[at + 1 :])
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length] twice -> [batch, dim].

        The first `prompt_length` tokens are not pooled if the model excludes its prompt.
        """
        return self.pool(self.token_vectors(input_ids, attention_mask), attention_mask, prompt_length)

    def token_vectors(self, input_ids: Tensor, attention_mask: Tensor, **options: Tensor) -> Tensor:
        """[batch, length] twice -> [batch, length, width], the vectors to be pooled.

        `options` are further arguments of the transformer.
        """
        layers = self.layer_pooling is not None
        output = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=layers, **options
        )
        tokens: Tensor = output.last_hidden_state
        return tokens if self.layer_pooling is None else self.layer_pooling(output.hidden_states)

    def pool(self, tokens: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length, width] -> [batch, dim]."""
        sentence: Tensor = self.head(self.pooling(tokens, attention_mask, prompt_length))
        return sentence

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Padded ids and mask, each [batch, length]; texts over the limit are truncated."""
        batch = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        if not batch["input_ids"].numel():  # empty texts, and a tokenizer without special tokens
            ids = torch.full((len(texts), 1), self.tokenizer.pad_token_id)
            return ids, torch.zeros_like(ids)
        return batch["input_ids"], batch["attention_mask"]

    def prompt_length(self, prompt: str) -> int:
        """Number of the prompt's tokens, special ones included except a trailing one."""
        if not prompt:
            return 0
        ids = self.tokenizer(prompt, truncation=True)["input_ids"]
        return len(ids) - (ids[-1] in self.tokenizer.all_special_ids)

    @torch.inference_mode()
    def encode(
        self, texts: Sequence[str], *, prompt: str = "", batch_size: int = 32, progress: Progress = no_progress
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Vectors [texts, dim], without the default prompt and without `truncate_dim`.

        `progress` takes the number of tokens that are done.
        """
        prompt_length = torch.tensor(self.prompt_length(prompt))
        vectors = np.empty((len(texts), self.checkpoint.dim), dtype=np.float32)
        for rows in batches_by_length([len(text) for text in texts], batch_size):
            ids, mask = self.tokenize([prompt + texts[i] for i in rows])
            vectors[rows] = self(ids, mask, prompt_length).numpy()
            progress(int(mask.sum()))
        return vectors


def batches_by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Rows of similar length, longest first, so that little is padded."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def load_reference(checkpoint: Checkpoint, *, attention: Literal["sdpa", "eager"] = "sdpa") -> Reference:
    """Load the weights in FP32, whatever type they are stored in.

    (sentence-transformers 6 on transformers 5 computes in the stored type, e.g. FP16.) "sdpa" means
    scaled dot product attention where the model has it. Raises `CheckpointError` for weights that
    are missing, misshapen or unknown.
    """
    if checkpoint.model_type == STATIC:
        tokenizer = StaticTokenizer(checkpoint.transformer_path)
        tokenizer.model_max_length = checkpoint.max_length
        return Reference(checkpoint, StaticEncoder(checkpoint.transformer_path), tokenizer)
    if checkpoint.model_type == SPARSE_STATIC:
        return Reference(checkpoint, WordEncoder(), without_special_tokens(load_tokenizer(checkpoint)))
    if isinstance(checkpoint.pooling, SpladeSpec):
        model = load_encoder(checkpoint, "AutoModelForMaskedLM", attention=attention)
        return Reference(checkpoint, LanguageModel(model, checkpoint.source), load_tokenizer(checkpoint))
    return Reference(checkpoint, load_encoder(checkpoint, attention=attention), load_tokenizer(checkpoint))


def load_encoder(
    checkpoint: Checkpoint, model_class: str = "", *, besides: Sequence[str] = (), attention: str = "sdpa"
) -> Any:
    """The transformer in FP32, of `model_class` if that is given, else without a head.

    `besides` names weights in its files that belong to other modules. Raises `CheckpointError` as
    `load_reference` does.
    """
    loader = getattr(transformers, model_class or ENCODERS.get(checkpoint.model_type, "AutoModel"))
    try:
        with quiet_transformers():
            encoder, info = loader.from_pretrained(
                checkpoint.base_path,
                dtype=torch.float32,
                attn_implementation=None if attention == "sdpa" else attention,  # None: sdpa where the model has it
                trust_remote_code=checkpoint.trust_remote_code,
                weights_only=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # all of them come back in `info`
                output_loading_info=True,
            )
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError) as error:
        problem = f"the transformer's weights can't be loaded: {first_line(error)}"
        raise CheckpointError(checkpoint.source, [problem]) from error
    info["unexpected_keys"] = set(info["unexpected_keys"]) - set(besides)
    problems = list(_weight_problems(info, may_lack_pooler=not model_class))
    if checkpoint.adapter and not problems:
        try:
            problems = list(checkpoint.adapter.merge_into(encoder))
        except ValueError as error:
            problems = [str(error)]
    if problems:
        raise CheckpointError(checkpoint.source, problems)
    encoder.config.use_cache = False  # a decoder would fill its cache of keys and values for nothing
    return encoder


def _weight_problems(info: dict[str, Any], *, may_lack_pooler: bool) -> Iterable[str]:
    """What is wrong with the weights, according to transformers' loading `info`."""
    for key in sorted(info["missing_keys"]):
        if not (may_lack_pooler and _POOLER.search(key)):
            yield f"the transformer's weights lack '{key}'"
    for key in sorted(info["unexpected_keys"]):
        if not _LEFT_OVER.search(key):
            yield f"the transformer's weights hold '{key}', which the model has no place for"
    for key, found, expected in sorted(info["mismatched_keys"]):
        yield f"the transformer's '{key}' has shape {list(found)}, but config.json asks for {list(expected)}"
