"""Make the files that a library runs from the checkpoint. Runs inside `worker.py`, like loaders.py.

A converter takes a contestant's `Spec` and a folder to write to, and returns what to add to the
spec.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Spec = dict[str, Any]
Converter = Callable[[Spec, Path], Spec]


def sentence_transformers_files(spec: Spec, folder: Path, backend: str, variant: str = "") -> Spec:
    """Let sentence-transformers export for a backend: plain, optimized (O3) or in 8 bits."""
    from sentence_transformers import SentenceTransformer

    code = spec.get("trust_remote_code", False)
    model = SentenceTransformer(spec["model"], device="cpu", backend=backend, trust_remote_code=code)
    if variant == "int8":
        from sentence_transformers import export_dynamic_quantized_onnx_model

        export_dynamic_quantized_onnx_model(model, quantization_config(), str(folder))
    elif variant == "O3":
        from sentence_transformers import export_optimized_onnx_model

        export_optimized_onnx_model(model, "O3", str(folder))
    model.save_pretrained(str(folder))  # the tokenizer and the modules that belong to the graph
    made = [path for path in sorted(folder.rglob("*.onnx")) if path.name != "model.onnx"]
    return {"model": str(folder), **({"file": f"onnx/{made[0].name}"} if made else {})}


def quantization_config() -> str:
    """sentence-transformers' name for the best 8-bit arithmetic of this CPU."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return "arm64"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "avx2"
    return next((name for name in ("avx512_vnni", "avx512", "avx2") if name in flags), "avx2")


CONVERTERS: dict[str, Converter] = {
    "onnx": partial(sentence_transformers_files, backend="onnx"),
    "onnx-O3": partial(sentence_transformers_files, backend="onnx", variant="O3"),
    "onnx-int8": partial(sentence_transformers_files, backend="onnx", variant="int8"),
    "openvino": partial(sentence_transformers_files, backend="openvino"),
}
