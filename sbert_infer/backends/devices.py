"""Names of the devices that a model runs on: the CPU, or one or more GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence

Device = str | Sequence[str] | None


def gpu_indices(device: Device) -> tuple[int, ...]:
    """Return the indices of the GPUs that `device` names: none for "cpu", 0 for "cuda".

    >>> gpu_indices(["cuda:0", "cuda:2"])
    (0, 2)
    """
    names = [str(name) for name in (device if isinstance(device, list | tuple) else [device])]  # or torch.device
    if names == ["cpu"]:
        return ()
    found = [re.fullmatch(r"cuda(?::(\d+))?", name) for name in names]
    if not names or not all(found):
        raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:1' or a list of GPUs, got {device!r}")
    indices = tuple(int(match[1] or 0) for match in found if match)
    if len(set(indices)) < len(indices):
        raise ValueError(f"device names a GPU twice: {device!r}")
    return indices
