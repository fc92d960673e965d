"""What callers expect of a model because `SentenceTransformer` is a torch module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from sbert_infer.backends.devices import DeviceName, runs_on
from sbert_infer.encode.options import Pool, check_running

Self = TypeVar("Self", bound="ModuleInterface")

# Why an attribute of sentence-transformers' models does not exist here, and what to do instead.
_TRAIN = "it can't be trained: train the checkpoint and export it again"
_GRAPH = "it runs an exported graph, which has no torch modules or weights: open the checkpoint for those"
_SAVED = "its artifact is a file already: copy that"
_PRECISION = "its precision is chosen when it is exported: see sbert-export --help"
_MISSING = {
    **dict.fromkeys(("fit", "old_fit", "zero_grad", "gradient_checkpointing_enable", "smart_batching_collate"), _TRAIN),
    **dict.fromkeys(("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"), _GRAPH),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children", "load_state_dict", "append"), _GRAPH),
    **dict.fromkeys(("transformers_model", "config", "processor", "share_memory", "register_module"), _GRAPH),
    **dict.fromkeys(("save", "save_pretrained", "save_to_hub", "push_to_hub"), _SAVED),
    **dict.fromkeys(("half", "bfloat16", "double"), _PRECISION),
    "forward": "use predict, which also tokenizes",
    "compile": "its graph is compiled already",
    "set_pooling_include_prompt": "this is chosen when it is exported",
}


class ModuleInterface:
    """Methods of a torch module that have a meaning for an engine; clear errors for the others.

    Setting an attribute that no class defines or annotates raises: it would have no effect.
    """

    _annotated: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._annotated = frozenset(chain.from_iterable(map(inspect.get_annotations, cls.__mro__)))

    @property
    def device(self) -> DeviceName:
        """The device the model runs on: "cpu", "cuda:0" or "cuda:0,cuda:1"."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The type of the vectors: torch.float32, or numpy's float32 if torch is not imported."""
        torch = sys.modules.get("torch")
        return np.dtype(np.float32) if torch is None else torch.float32

    def eval(self: Self) -> Self:
        """Return the engine, which is never in training mode."""
        return self

    def train(self: Self, mode: bool = True) -> Self:
        """Return the engine for `train(False)`; raise otherwise."""
        if mode:
            raise TypeError(f"{type(self).__name__}: {_TRAIN}")
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Return the engine for `requires_grad_(False)`; raise otherwise."""
        return self.train(requires_grad)

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """Return the engine if it already has this device and dtype; raise otherwise."""
        for wanted in (*args, *kwargs.values()):
            if wanted is None or isinstance(wanted, bool):  # non_blocking, copy
                continue
            if "float" in str(wanted) or str(wanted) in ("torch.half", "torch.double"):
                if str(wanted).rpartition(".")[2] != "float32":
                    raise ValueError(f"{type(self).__name__}.to({wanted}): {_PRECISION}")
            elif not runs_on(self.device, wanted):
                opened = f"{type(self).__name__}(path, device={str(wanted)!r})"
                raise ValueError(f"this engine runs on {str(self.device)!r} and can't be moved: open {opened}")
        return self

    def cpu(self: Self) -> Self:
        """Return the engine if it runs on the CPU; raise otherwise."""
        return self.to("cpu")

    def cuda(self: Self, device: Any = None) -> Self:
        """Return the engine if it runs on that GPU; raise otherwise."""
        return self.to(f"cuda:{device}" if isinstance(device, int) else device or "cuda")

    def float(self: Self) -> Self:
        """Return the engine, whose vectors are float32."""
        return self

    @property
    def modalities(self) -> list[str]:
        """The kinds of input: only text."""
        return ["text"]

    def supports(self, modality: Any) -> bool:
        """Return whether this is a kind of input that the model takes."""
        return modality in self.modalities

    def get_model_kwargs(self) -> list[str]:
        """Return the additional arguments of `encode` that the model itself takes: none."""
        return []

    def evaluate(self, evaluator: Any, output_path: str | None = None) -> Any:
        """Run an evaluator of sentence-transformers, which may write to a folder."""
        if output_path is not None:
            Path(output_path).mkdir(parents=True, exist_ok=True)
        return evaluator(self, output_path)

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> Pool:
        """Return a pool for `encode(pool=...)`. No process is started: an engine uses all cores."""
        devices = [str(self.device)] if target_devices is None else [str(name) for name in target_devices]
        check_running(devices, self.device, None, None)
        return Pool(input=None, output=None, processes=devices)

    @staticmethod
    def stop_multi_process_pool(pool: Pool) -> None:
        """Stop a pool; it can't be used afterwards."""
        pool["processes"].clear()

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__}[{index!r}]: {_GRAPH}")

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {_MISSING[name]}")
        return object.__getattribute__(self, name)  # raises the error once more, with its own words

    def __setattr__(self, name: str, value: object) -> None:
        known = getattr(type(self), name, None)
        if isinstance(known, property) and known.fset is None:
            raise AttributeError(f"{name} can't be set: it is chosen when {type(self).__name__} is opened")
        if not hasattr(type(self), name) and name not in self._annotated:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: setting it would have no effect")
        object.__setattr__(self, name, value)
