"""The double of a GPU itself has the real names and parameters, and notices mistakes.

No GPU, CUDA or TensorRT is used here (see tests/doubles/tensorrt.py), so these tests say nothing
about speed or FP16.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sbert_infer.backends.tensorrt import cuda

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.cuda import Machine, Misuse
from tests.doubles.tensorrt import (
    REAL_TRT,
    DoubleConfig,
    DoubleContext,
    DoubleEngine,
    DoubleRuntimeCache,
    double_tensorrt,
)
from tests.doubles.tensorrt_lab import SHAPES, Lab, expected, packed

REAL_CLASSES = {
    DoubleContext: REAL_TRT.IExecutionContext,
    DoubleEngine: REAL_TRT.ICudaEngine,
    DoubleConfig: REAL_TRT.IRuntimeConfig,
    DoubleRuntimeCache: REAL_TRT.IRuntimeCache,
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
    trt = double_tensorrt(Machine(), SHAPES)
    real = REAL_TRT.Runtime.deserialize_cuda_engine
    here = inspect.signature(trt.module.Runtime.deserialize_cuda_engine)
    assert list(here.parameters)[1:] in overloads(real)


# --------------------------------------------------------------------------------------------------
# These deliberate mistakes must be noticed, or the tests that use the double prove nothing.


def test_the_double_notices_a_context_that_is_changed(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load())
    bench.run(packed(bench.shape))
    graph = cuda.Graph(bench.stream, bench.enqueue)
    bench.context.set_input_shape("input_ids", (6, 8))
    graph.launch(bench.stream)
    with pytest.raises(Misuse, match="a context that was changed"):
        bench.stream.synchronize()
    graph.close()


def test_the_double_notices_a_capture_before_the_first_run(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load())
    with pytest.raises(Misuse, match="captured before it has run once"):
        cuda.Graph(bench.stream, bench.enqueue)


def test_the_double_notices_shared_activation_memory(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load())
    there.machine.owner[bench.activations.pointer] = -1  # in use on another stream
    with pytest.raises(Misuse, match="two streams share the memory"):
        bench.run(packed(bench.shape))


def test_the_double_notices_a_wrong_gpu(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=2)
    bench = there.bench(there.load())
    there.machine.device = 1
    with pytest.raises(Misuse, match="a stream of GPU 0 is used while 1 is current"):
        bench.run(packed(bench.shape))
    there.machine.device = 0
    bench.stream.synchronize()


def test_the_double_notices_a_missing_wait(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    there = lab()
    bench = there.bench(there.load())
    bench.run(packed(bench.shape))
    batch = packed(bench.shape, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(cuda.Stream, "synchronize", lambda self: None)
        found = bench.run(batch)
    bench.stream.synchronize()
    assert np.abs(found - expected(batch)).max() > 0.01


def test_the_double_notices_an_input_without_an_address(lab: Callable[..., Lab]) -> None:
    there = lab()
    bench = there.bench(there.load())
    del bench.context._addresses["ends"]
    with pytest.raises(Misuse, match=r"the context is not ready: \{'ends'\}"):
        bench.enqueue()


def test_the_double_notices_a_runtime_cache_that_nobody_holds(lab: Callable[..., Lab]) -> None:
    there = lab()
    loaded = there.load(rtx=True)
    bench = there.bench(loaded)
    loaded._kernels = None
    with pytest.raises(Misuse, match="the runtime cache was freed while its contexts run"):
        bench.enqueue()
    with pytest.raises(Misuse, match="a context is made with a runtime cache that was freed"):
        loaded.make_context()
    bench.close()
    there.opened.remove(bench)
    assert there.machine.broken == ["a context is freed after its runtime cache"]
    there.machine.broken.clear()
