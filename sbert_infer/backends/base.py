"""What a backend is: something that turns padded token ids into vectors."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Backend"]


class Backend(Protocol):
    """Runs one padded batch. `run` may be called by `workers` threads at once; each call uses `threads` cores."""

    device: str  # cpu, cuda:0 or cuda:0,cuda:1
    workers: int
    threads: int
    max_batch_tokens: int
    min_batch_tokens: int  # a call with few texts is shared among the workers in batches no smaller than this
    edges: tuple[int, ...] | None  # the only lengths that it runs, or None for any

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        attention_mask: npt.NDArray[np.int64],
        prompt_length: int = 0,
        *,
        alone: bool = False,
    ) -> npt.NDArray[np.float32]:
        """[batch, length] ids and mask -> [batch, dim] vectors. `alone`: no other batch of this call runs meanwhile.

        The vectors may be overwritten by the same thread's next run.
        """
        ...

    def describe(self) -> str:
        """What runs and where, in a few words."""
        ...

    def close(self) -> None:
        """Free the model. A second call does nothing."""
        ...
