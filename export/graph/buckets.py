"""Buckets of relative positions, looked up in a table.

transformers computes them with a logarithm, in FP32, in each batch. A graph in BF16 or FP16 may
compute that, too, in its own precision, which moves distances at the edge of a bucket to the next
one: OpenVINO's BF16 gave the real all-mpnet-base-v2 a lowest cosine of 0.998 instead of 0.9999.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def tabulated_buckets(encoder: nn.Module, longest: int) -> Iterator[None]:
    """Within this context `encoder` looks up its buckets, in rows of up to `longest` tokens.

    The tables are made here, since what runs while a graph is traced becomes part of it.
    """
    with ExitStack() as stack:
        for module in encoder.modules():
            kind: Any = module
            name = type(module).__name__
            if name == "MPNetEncoder":
                stack.enter_context(_tabulated(kind, "relative_position_bucket", longest))
            elif name in ("T5Attention", "MT5Attention"):
                fixed = {
                    "bidirectional": not kind.is_decoder,
                    "num_buckets": kind.relative_attention_num_buckets,
                    "max_distance": kind.relative_attention_max_distance,
                }
                stack.enter_context(_tabulated(kind, "_relative_position_bucket", longest, **fixed))
            elif name == "UMT5Attention":
                stack.enter_context(_tabulated(kind, "_relative_position_bucket", longest))
            elif name == "DebertaV2Encoder" and kind.relative_attention and kind.position_buckets > 0:
                sizes = {"bucket_size": kind.position_buckets, "max_position": kind.max_relative_positions}
                functions = sys.modules[type(module).__module__]
                stack.enter_context(_tabulated(functions, "make_log_bucket_position", longest, **sizes))
        yield


@contextmanager
def _tabulated(owner: Any, name: str, longest: int, **fixed: Any) -> Iterator[None]:
    """Replace a function of distances by a table of what it returns with these arguments."""
    bucket: Callable[..., Tensor] = getattr(owner, name)
    table = bucket(torch.arange(-longest, longest + 1), **fixed).to(torch.int64)[:, None]

    def look_up(distances: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = distances.clamp(-longest, longest) + longest
        return functional.embedding(rows, table).squeeze(-1)  # a Gather; an index would become a GatherND

    own = vars(owner)
    before = own.get(name)  # a function of a module; the method of an object is its class's
    own[name] = look_up
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before
