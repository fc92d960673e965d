"""The double of a GPU itself has the real names and parameters, and notices mistakes.

No GPU, CUDA or TensorRT is used here (see tests/doubles/tensorrt.py), so these tests say nothing
about speed or FP16.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sbert_infer.backends.tensorrt import cuda

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.cuda import Machine, Misuse
from tests.doubles.tensorrt import REAL_TRT, DoubleConfig, DoubleContext, DoubleEngine, double_tensorrt
from tests.doubles.tensorrt_lab import PROFILES, Lab, check

REAL_CLASSES = {
    DoubleContext: REAL_TRT.IExecutionContext,
    DoubleEngine: REAL_TRT.ICudaEngine,
    DoubleConfig: REAL_TRT.IRuntimeConfig,
}


def overloads(method: Any) -> list[list[str]]:
    """Return the parameter names of a real method's overloads, which only its docstring shows."""
    signatures = re.findall(rf"{method.__name__}\(self: [\w.]+((?:, \w+: .*?)?)\) ->", method.__doc__)
    return [re.findall(r", (\w+): ", signature) for signature in signatures]


@pytest.mark.parametrize("kind", REAL_CLASSES, ids=lambda kind: kind.__name__)
def test_the_double_has_the_real_names_and_parameters(kind: type) -> None:
    real = REAL_CLASSES[kind]
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    assert public
    for name, value in public.items():
        assert hasattr(real, name), name
        if inspect.isfunction(value):
            assert list(inspect.signature(value).parameters)[1:] in overloads(getattr(real, name)), name
        else:
            assert isinstance(getattr(real, name), property), name


def test_the_double_of_the_runtime_has_the_real_parameters() -> None:
    trt = double_tensorrt(Machine(), PROFILES)
    real = REAL_TRT.Runtime.deserialize_cuda_engine
    here = inspect.signature(trt.module.Runtime.deserialize_cuda_engine)
    assert list(here.parameters)[1:] in overloads(real)


def test_the_double_notices_a_context_that_is_changed(lab: Callable[..., Lab]) -> None:
    """These deliberate mistakes must be noticed, or the tests that use the double prove nothing."""
    backend = lab().open()
    check(backend, 2, 8)
    slot = backend._free[-1]
    slot._contexts[2, 8]._context.set_input_shape("input_ids", (1, 8))
    with pytest.raises(Misuse, match="a context that was changed"):
        check(backend, 2, 8)


def test_the_double_notices_shared_activation_memory(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    there.machine.owner[backend._free[-1].activations.pointer] = -1  # in use on another stream
    with pytest.raises(Misuse, match="two streams share the memory"):
        check(backend, 2, 8)


def test_the_double_notices_a_wrong_gpu(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = lab(gpus=2).open(devices=(1,))
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(cuda, "set_device", lambda device: None)  # a new thread starts on GPU 0
        with pytest.raises(Misuse, match="a stream of GPU 1 is used while 0 is current"):
            pool.submit(check, backend, 2, 8).result()


def test_the_double_notices_a_missing_wait(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = lab().open()
    check(backend, 2, 8)
    with monkeypatch.context() as patch:
        patch.setattr(cuda.Stream, "synchronize", lambda self: None)
        with pytest.raises(AssertionError):
            check(backend, 2, 8, 1)
