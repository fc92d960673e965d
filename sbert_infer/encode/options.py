"""The options of a call to `encode`, as one object that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.backends.devices import runs_on
from sbert_infer.encode.precision import PRECISIONS


@dataclass(frozen=True)
class EncodeOptions:
    """The arguments of `encode`, with the same names and defaults."""

    prompt: str = ""  # the prompt itself, not its name
    batch_size: int | None = None
    show_progress_bar: bool | None = None
    output_value: str = SENTENCE
    precision: str = "float32"
    convert_to_numpy: bool | None = None
    convert_to_tensor: bool | None = None
    normalize_embeddings: bool = False
    truncate_dim: int | None = None
    out: npt.NDArray[np.float32] | None = None
    max_active_dims: int | None = None
    task: str | None = None
    convert_to_sparse_tensor: bool | None = None
    save_to_cpu: bool | None = None
    token_pooling: Any = None

    def __post_init__(self) -> None:
        """Refuse values that no engine supports."""
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.output_value not in (SENTENCE, TOKENS):
            raise ValueError(f"output_value must be {SENTENCE!r}, {TOKENS!r} or None, got {self.output_value!r}")
        if self.task not in (None, "query", "document"):
            raise ValueError(f"task must be 'query', 'document' or None, got {self.task!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    @property
    def as_arrays(self) -> bool:
        """Whether one dense vector per text is wanted as an array, not as tensors."""
        return self.convert_to_numpy is not False and not self.convert_to_tensor

    def refuse(self, names: str, why: str, **defaults: object) -> None:
        """Raise if any argument in `names` was given, or has another default in the engine.

        `defaults` holds the engine's defaults; `why` is the reason in the error message.
        """
        own = {field.name: field.default for field in fields(self)}
        given = [
            name
            for name in names.split()
            if not _is(getattr(self, name), own[name]) or not _is(defaults.get(name, own[name]), own[name])
        ]
        if given:
            raise ValueError(f"{', '.join(given)}: {why}")


def _is(value: object, default: object) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return bool(value) == bool(default)
    return value == default if isinstance(default, str) else value is default  # == on an array gives no bool


class Pool(dict[str, Any]):
    """What `start_multi_process_pool` returns. It starts no processes: an engine uses all cores.

    Its "processes" are the names of the devices that were asked for, none once it is stopped.
    """


def check_running(device: Any, own_device: str, pool: object, chunk_size: int | None) -> None:
    """Refuse devices other than the engine's own, and pools that are stopped or not an engine's."""
    for each in device if isinstance(device, (list, tuple)) else [device]:
        if each is not None and not runs_on(own_device, each):
            raise ValueError(f"this engine runs on {str(own_device)!r}, got device={each!r}: see Engine(device=...)")
    if pool is not None and (not isinstance(pool, Pool) or not pool["processes"]):
        raise ValueError("pool must come from start_multi_process_pool of an engine, and not be stopped yet")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def given(value: Any, alias: Any, missing: str) -> Any:
    """Return an argument or the one that is another name of it; raise `missing` without either."""
    if (value is None) == (alias is None):
        raise TypeError(missing if value is None else f"{missing}, and it is given twice")
    return value if value is not None else alias
