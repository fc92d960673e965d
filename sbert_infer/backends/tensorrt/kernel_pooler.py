"""Pooling a TensorRT engine's token vectors with the Triton kernel, on its stream and memory."""

from __future__ import annotations

import importlib
from typing import Any

from sbert_infer.backends.tensorrt.slot import PooledMemory
from sbert_infer.errors import EngineError


class KernelPooler:
    """Mean pooling, with scaling to unit length if `normalize`. Needs torch and Triton."""

    def __init__(self, *, normalize: bool, bf16: bool = False) -> None:
        """Make one for token vectors in FP16, or in BF16."""
        fix = "pip install 'sbert-infer[gpu]'"
        try:
            importlib.import_module("triton")
            torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:  # an OSError if one of its libraries does not load
            what = f"{error.name} is missing" if isinstance(error, ImportError) and error.name else str(error)
            raise EngineError(f"pooling by the kernel needs torch and Triton, {what}: {fix}") from error
        if not torch.cuda.is_available():
            raise EngineError(
                f"pooling by the kernel needs a torch that can use this GPU, {torch.__version__} can't: {fix}"
            )
        self.normalize, self.bf16 = normalize, bf16

    def __call__(
        self, memory: PooledMemory, shape: tuple[int, int, int], longest: int, device: int, stream: int
    ) -> None:
        """Queue the pooling on `stream`, as `Pooler` says."""
        try:
            self._pool(memory, shape, longest, device, stream)
        except Exception as error:  # whatever torch and Triton raise, a missing C compiler for one
            raise EngineError(f"the pooling kernel can't run on cuda:{device}: {error}") from error

    def _pool(self, memory: PooledMemory, shape: tuple[int, int, int], longest: int, device: int, stream: int) -> None:
        import torch

        from sbert_infer.kernels.mean_pool import mean_pool_spans

        count, texts, dim = shape
        # In this context, torch allocates on and queues to the TensorRT engine's stream.
        external: Any = torch.cuda.ExternalStream
        with torch.cuda.stream(external(stream, device=device)):
            words = _tensor(memory.tokens, (count, dim), "<i2", device)
            hidden = words.view(torch.bfloat16 if self.bf16 else torch.float16)
            starts, ends = (_tensor(address, (texts,), "<i8", device) for address in (memory.starts, memory.ends))
            pooled = mean_pool_spans(hidden, starts, ends, normalize=self.normalize, longest=longest)
            _tensor(memory.out, (texts, dim), "<f4", device).copy_(pooled)


class _DeviceArray:
    """A description of GPU memory that other libraries understand."""

    def __init__(self, pointer: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": typestr, "version": 3}


def _tensor(pointer: int, shape: tuple[int, ...], typestr: str, device: int) -> Any:
    """Return a torch tensor that uses this memory, not a copy of it."""
    import torch

    return torch.as_tensor(_DeviceArray(pointer, shape, typestr), device=f"cuda:{device}")
