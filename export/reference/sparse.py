"""Modules with sparse vectors as eager PyTorch in FP32: SPLADE, a table and an autoencoder.

SPLADE's scores are [batch, length, vocabulary] numbers: 62 MB for 512 tokens of BERT's 30,522
words, 512 MB for XLM-R's 250,002, and several times that if each step makes its own copy. So the
last product of the language model is computed in slices of the vocabulary, each of which is pooled
before the next one starts: only one slice is held in memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.modules import read_weights
from sbert_infer.export.checkpoint.sparse_modules import AutoEncoderSpec, PresenceSpec, SpladeSpec, auto_encoder_weights

# Words scored at once: 8 MB for a batch of 512 tokens, and no slower than all at once. For peak
# memory see docs/sparse.md.
_SLICE = 4096


class LanguageModel(nn.Module):
    """A masked language model without its last product, which `SpladePooling` computes."""

    def __init__(self, model: Any, source: str) -> None:
        super().__init__()
        self.config = model.config
        with torch.inference_mode():
            ids = torch.arange(6).view(2, 3) % model.config.vocab_size
            right = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            self.decoder = model.get_output_embeddings()
            if not isinstance(self.decoder, nn.Linear):
                raise CheckpointError(source, [f"a {self.config.model_type} has no last layer that could be split"])
            _take_out(model, self.decoder)
            self.model = model
            try:
                found = self.decoder(self._hidden(ids, torch.ones_like(ids)))
            except AttributeError:  # the model reads the layer's weight itself, as MobileBERT does
                found = torch.full_like(right, torch.nan)
        if not torch.allclose(found, right, rtol=1e-4, atol=1e-4):
            problem = f"the scores of a {self.config.model_type} are changed after its last layer: not supported"
            raise CheckpointError(source, [problem])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """[batch, length] twice -> the last product's input, [batch, length, width]."""
        return SimpleNamespace(last_hidden_state=self._hidden(input_ids, attention_mask))

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return hidden


def _take_out(model: nn.Module, layer: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, nn.Identity())


class SpladePooling(nn.Module):
    """log(1 + relu(score)) of all words for all tokens: its maximum or sum over the tokens."""

    def __init__(self, spec: SpladeSpec, decoder: nn.Linear) -> None:
        super().__init__()
        self.spec = spec
        weight = decoder.weight.detach()
        bias = torch.zeros(len(weight)) if decoder.bias is None else decoder.bias.detach()
        self.slices = range(0, len(weight), _SLICE)
        for start in self.slices:
            self.register_buffer(f"weight_{start}", weight[start : start + _SLICE].t().contiguous())
            self.register_buffer(f"bias_{start}", bias[start : start + _SLICE].clone())

    def forward(self, tokens: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """[batch, length, width], [batch, length] -> [batch, vocabulary]."""
        pool = self._max if self.spec.modes == ("splade_max",) else self._sum
        mask = attention_mask.to(tokens.dtype)
        if pool == self._max:
            tokens = _without_padding(tokens, attention_mask)
        slices = [pool(tokens, mask, getattr(self, f"weight_{at}"), getattr(self, f"bias_{at}")) for at in self.slices]
        return torch.cat(slices, dim=-1)

    def _max(self, tokens: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # Bias, relu and logarithm are monotonic, so they can be applied after the maximum.
        scores = (tokens @ weight).amax(dim=1) + bias
        return self._activate(scores) * mask.amax(dim=1, keepdim=True)

    def _sum(self, tokens: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        activated = self._activate(tokens @ weight + bias)  # [batch, length, slice]
        return (mask.unsqueeze(1) @ activated).squeeze(1)

    def _activate(self, scores: Tensor) -> Tensor:
        activated = scores.relu().log1p()
        return activated.log1p() if self.spec.activation == "log1p_relu" else activated


def _without_padding(tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Replace padding by the text's first token, which can't change a maximum it is part of."""
    first = attention_mask.to(torch.int32).argmax(dim=1).view(-1, 1, 1).expand(-1, 1, tokens.shape[2])
    return torch.where(attention_mask.unsqueeze(-1) == 1, tokens, tokens.gather(1, first))


class Presence(nn.Module):
    """The weights of the words that a text contains, each once."""

    def __init__(self, spec: PresenceSpec) -> None:
        super().__init__()
        self.register_buffer("weight", read_weights(spec.path)["weight"].float())

    def forward(self, tokens: Tensor, attention_mask: Tensor, prompt_length: Tensor | None = None) -> Tensor:
        """Ids [batch, length, 1], [batch, length] -> [batch, vocabulary]."""
        weight: Any = self.weight
        none = torch.zeros(tokens.shape[0], weight.shape[0])
        present = none.scatter_reduce(1, tokens.squeeze(-1), attention_mask.to(none.dtype), "amax")
        return torch.mul(present, weight)


class AutoEncoder(nn.Module):
    """The wide layer. Which outputs are kept is decided where the vectors are made sparse."""

    def __init__(self, spec: AutoEncoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pre_bias = nn.Parameter(torch.empty(spec.in_features))
        self.latent_bias = nn.Parameter(torch.empty(spec.out_features))
        self.encoder = nn.Linear(spec.in_features, spec.out_features, bias=False)
        self.load_state_dict(auto_encoder_weights(spec.path))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in_features] -> [batch, out_features]."""
        if self.spec.standardize:
            x = x - x.mean(dim=-1, keepdim=True)
            x = x / (x.std(dim=-1, keepdim=True) + 1e-5)
        out: Tensor = (self.encoder(x - self.pre_bias) + self.latent_bias).relu()
        return out


def build_sparse_module(spec: SpladeSpec | PresenceSpec | AutoEncoderSpec, encoder: nn.Module) -> nn.Module:
    """Build the module with its weights, which for SPLADE are those of `encoder`'s last layer."""
    if isinstance(spec, AutoEncoderSpec):
        return AutoEncoder(spec)
    if isinstance(spec, PresenceSpec):
        return Presence(spec)
    decoder: Any = encoder.decoder
    return SpladePooling(spec, decoder)
