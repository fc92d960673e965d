"""Names of the devices that a model runs on: the CPU, or one or more GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Device = str | Sequence[str] | None


class DeviceName(str):
    """The name of a device, with the attributes of a `torch.device`, which it equals."""

    __slots__ = ()

    @property
    def type(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override]  # a str has a method of this name
        """The number of the (first) GPU; None for the CPU."""
        found = re.search(r":(\d+)", self)
        return int(found[1]) if found else None

    def __eq__(self, other: object) -> bool:
        return str(self) == (other if isinstance(other, str) else str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def runs_on(own: str, wanted: Any) -> bool:
    """Return whether a model on the device(s) `own` runs on `wanted`: a name or a `torch.device`.

    >>> runs_on("cpu", "cpu:0"), runs_on("cuda:0,cuda:1", "cuda:1"), runs_on("cpu", "cuda")
    (True, True, False)
    """
    name = str(wanted)
    own_names = own.split(",")
    return name in (own, *own_names, own_names[0].partition(":")[0]) or (own == "cpu" and name == "cpu:0")


def gpu_indices(device: Device) -> tuple[int, ...]:
    """Return the indices of the GPUs that `device` names: none for "cpu", 0 for "cuda".

    >>> gpu_indices(["cuda:0", "cuda:2"])
    (0, 2)
    """
    names = [str(name) for name in (device if isinstance(device, list | tuple) else [device])]  # or torch.device
    if names in (["cpu"], ["cpu:0"]):
        return ()
    found = [re.fullmatch(r"cuda(?::(\d+))?", name) for name in names]
    if not names or not all(found):
        raise ValueError(f"device must be 'cpu', 'cuda', 'cuda:1' or a list of GPUs, got {device!r}")
    indices = tuple(int(match[1] or 0) for match in found if match)
    if len(set(indices)) < len(indices):
        raise ValueError(f"device names a GPU twice: {device!r}")
    return indices
