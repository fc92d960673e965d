"""Which TensorRT is used, and that the real TensorRT-RTX has all names that the code uses."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sbert_infer
from sbert_infer import EngineError
from sbert_infer.backends.tensorrt.versions import installed, load

tensorrt_rtx: Any = pytest.importorskip("tensorrt_rtx")

FOLDER = Path(sbert_infer.__file__).parent / "backends" / "tensorrt"
SOURCES = [FOLDER / f"{name}.py" for name in ("backend", "build", "loaded_engine", "slot", "versions")]


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tensorrt_rtx" in [trt.name for trt in installed()]
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert installed() == []
    with pytest.raises(EngineError, match=r"tensorrt_rtx can't be imported .*: pip install tensorrt-rtx-cu13"):
        load("tensorrt_rtx")


def test_tensorrt_comes_first_and_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="10.13.3.9"))
    full, rtx = installed()
    assert (full.name, full.version) == ("tensorrt", "10.13.3.9")
    assert [full.timing_cache, full.own_graphs, full.any_target, full.user_allocation] == [True, False, False, False]
    assert [rtx.timing_cache, rtx.own_graphs, rtx.any_target, rtx.user_allocation] == [False, True, True, True]


@pytest.mark.parametrize(
    ("name", "version"), [("tensorrt", "8.6.1"), ("tensorrt", "10.3.0"), ("tensorrt_rtx", "1.1.1")]
)
def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version))
    with pytest.raises(EngineError, match=rf"{name} {version} is too old: pip install"):
        load(name)


def test_a_name_that_is_none() -> None:
    with pytest.raises(ValueError, match="name must be one of tensorrt, tensorrt_rtx, got 'trt'"):
        load("trt")


# --------------------------------------------------------------------------------------------------
# The real API

# The code's names for TensorRT's objects -> the real class.
OBJECTS = {
    "module": tensorrt_rtx,
    "builder": tensorrt_rtx.Builder,
    "network": tensorrt_rtx.INetworkDefinition,
    "parser": tensorrt_rtx.OnnxParser,
    "error": tensorrt_rtx.ParserError,
    "config": tensorrt_rtx.IBuilderConfig,
    "shapes": tensorrt_rtx.IOptimizationProfile,
    "layer": tensorrt_rtx.ILayer,
    "tensor": tensorrt_rtx.ITensor,
    "engine": tensorrt_rtx.ICudaEngine,
    "_engine": tensorrt_rtx.ICudaEngine,
    "_runtime": tensorrt_rtx.Runtime,
    "context": tensorrt_rtx.IExecutionContext,
    "_context": tensorrt_rtx.IExecutionContext,
    "strategies": tensorrt_rtx.CudaGraphStrategy,
}
# Files in which these names stand for objects of our own, or of another class.
OURS = {
    "slot.py": {"engine", "_engine"},
    "backend.py": {"engine"},
    "loaded_engine.py": {"config"},
}
RUNTIME_CONFIG = {"loaded_engine.py": {"config": tensorrt_rtx.IRuntimeConfig}}


def owner(node: ast.expr) -> str | None:
    """Return `config` for `config.x`, and `builder` for `self.builder.x`."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def used(path: Path) -> set[tuple[Any, str]]:
    """Return (real class, attribute) for every attribute of TensorRT that a file uses."""
    ours, others = OURS.get(path.name, set()), RUNTIME_CONFIG.get(path.name, {})
    real = {name: kind for name, kind in OBJECTS.items() if name not in ours} | others
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute):
            continue
        name = owner(node.value)
        if name in real:
            found.add((real[name], node.attr))
        if isinstance(node.value, ast.Attribute) and owner(node.value.value) == "module":  # module.Enum.MEMBER
            found.add((getattr(tensorrt_rtx, node.value.attr), node.attr))
    return found


def test_all_that_is_used_exists_in_the_real_module() -> None:
    names = set().union(*(used(path) for path in SOURCES))
    assert {attribute for _, attribute in names} >= {
        "parse", "set_shape", "build_serialized_network", "num_compute_capabilities", "deserialize_cuda_engine",
        "create_execution_context", "device_memory_size_v2", "WHOLE_GRAPH_CAPTURE", "USER_MANAGED", "HALF",
        "set_device_memory", "execute_async_v3", "REQUIRE_USER_ALLOCATION", "get_tensor_profile_shape",
    }  # fmt: skip
    missing = [
        f"{kind.__name__}.{name}" for kind, name in names if not hasattr(kind, name) and not name.startswith("__")
    ]
    assert missing == []


def test_the_check_of_the_api_sees_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_x.py").write_text("self.builder.build_engine(1)\nmodule.BuilderFlag.FP16\n")
    gone = {(tensorrt_rtx.Builder, "build_engine"), (tensorrt_rtx.BuilderFlag, "FP16")}
    assert gone <= used(tmp_path / "tensorrt_x.py")
    assert not any(hasattr(kind, name) for kind, name in gone)
