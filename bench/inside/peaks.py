"""What the machine can do at most, as a matrix product shows it.

Measured in a worker with our own interpreter, like checkpoint_facts.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

_SECONDS = 0.15  # for each size and library


def gemm_gflops(precision: str, cores: int, device: str = "cpu", sizes: tuple[int, ...] = ()) -> float:
    """Measure the most operations per second that a matrix product reaches, in 1e9.

    `precision` is fp32, bf16 or int8 on the CPU, fp16 on a GPU. No library is the fastest on every
    CPU: PyTorch's FP32 product takes half of what an AMD CPU with AVX-512 has. So the best counts.
    """
    makers = {"fp32": (_torch, _onnxruntime), "bf16": (_torch,), "int8": (_onnxruntime,), "fp16": (_torch,)}
    best = 0.0
    for size in sizes or ((512, 1024, 2048) if device == "cpu" else (4096, 8192)):
        for make in makers[precision]:
            best = max(best, 2 * size**3 / _shortest(make(precision, size, cores, device)))
    return best / 1e9


def _shortest(product: Callable[[], object]) -> float:
    """Return the time of the fastest call, in seconds."""
    shortest, deadline = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        product()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _torch(precision: str, size: int, cores: int, device: str) -> Callable[[], object]:
    import torch

    torch.set_num_threads(cores)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    left, right = torch.rand(2, size, size, device=device).to(types[precision])

    def product() -> None:
        left @ right
        if device != "cpu":
            torch.cuda.synchronize()

    return product


def _onnxruntime(precision: str, size: int, cores: int, device: str) -> Callable[[], object]:
    """Make a product with constant weights, as in a model; in 8 bits with VNNI if there is."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    random: Any = np.random.default_rng(0)
    if precision == "int8":
        kind, given, made = "MatMulInteger", TensorProto.UINT8, TensorProto.INT32
        left = random.integers(0, 255, (size, size), dtype=np.uint8)
        right = random.integers(-127, 127, (size, size), dtype=np.int8)
    else:
        kind, given, made = "MatMul", TensorProto.FLOAT, TensorProto.FLOAT
        left, right = random.random((2, size, size), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node(kind, ["left", "right"], ["product"])],
        kind,
        [helper.make_tensor_value_info("left", given, [size, size])],
        [helper.make_tensor_value_info("product", made, [size, size])],
        [numpy_helper.from_array(right, "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"left": left})
