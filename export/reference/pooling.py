"""Token vectors to one vector, in six modes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sbert_infer.export.checkpoint.modules import PoolingSpec


def _first(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    return _take(tokens, kept.to(torch.int32).argmax(dim=1))


def _last(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    positions = torch.arange(kept.shape[1], device=kept.device)  # [length]
    return _take(tokens * kept.unsqueeze(-1).to(tokens.dtype), (kept * positions).amax(dim=1))


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """Token `index[row]` of each row."""
    return tokens.gather(1, index.view(-1, 1, 1).expand(-1, 1, tokens.shape[2])).squeeze(1)


def _max(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    # The lowest number, not -inf, and zero for a row with nothing to pool, so that no NaN follows.
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
    """As `_mean`; on a GPU by the fused kernel, which reads the tokens once."""
    if not tokens.is_cuda or tokens.dtype not in (torch.float16, torch.float32):
        return _mean(tokens, kept, start)
    from sbert_infer.kernels.mean_pool import mean_pool

    return mean_pool(tokens, kept, out_dtype=tokens.dtype)


def _mean_sqrt_len(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    total, count = _weighted(tokens, kept)
    return total / count.sqrt()


def _weightedmean(tokens: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    # The first real token weighs 1, the second 2, and so on, also if the prompt is excluded.
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
