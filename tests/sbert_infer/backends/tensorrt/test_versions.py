"""Which TensorRT is used, and that the real TensorRT-RTX has all names that the code uses."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sbert_infer
from sbert_infer import EngineError
from sbert_infer.backends.tensorrt import versions
from sbert_infer.backends.tensorrt.versions import installed, load

tensorrt_rtx: Any = pytest.importorskip("tensorrt_rtx")

FOLDER = Path(sbert_infer.__file__).parent / "backends" / "tensorrt"
SOURCES = [
    FOLDER / f"{name}.py"
    for name in ("backend", "build", "loaded_engine", "network", "runtime_cache", "slot", "versions")
]


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
    "profile": tensorrt_rtx.IOptimizationProfile,
    "cache": tensorrt_rtx.ITimingCache,
    "_cache": tensorrt_rtx.IRuntimeCache,
    "layer": tensorrt_rtx.ILayer,
    "tensor": tensorrt_rtx.ITensor,
    "engine": tensorrt_rtx.ICudaEngine,
    "_engine": tensorrt_rtx.ICudaEngine,
    "_runtime": tensorrt_rtx.Runtime,
    "context": tensorrt_rtx.IExecutionContext,
    "_context": tensorrt_rtx.IExecutionContext,
    "graphs": tensorrt_rtx.CudaGraphStrategy,
    "kernels": tensorrt_rtx.DynamicShapesKernelSpecializationStrategy,
}
# Files in which these names stand for objects of our own, or of another class.
OURS = {
    "slot.py": {"engine", "_engine"},
    "backend.py": {"engine"},
    "loaded_engine.py": {"config"},
    "runtime_cache.py": {"config"},
}
OUR_METHODS = {"enqueue", "capture"}  # of contexts of our own, in slot.py
RUNTIME_CONFIG = {name: {"config": tensorrt_rtx.IRuntimeConfig} for name in ("loaded_engine.py", "runtime_cache.py")}


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
        if not isinstance(node, ast.Attribute) or node.attr in OUR_METHODS or node.attr.startswith("__"):
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
        "create_execution_context", "device_memory_size_v2", "WHOLE_GRAPH_CAPTURE", "USER_MANAGED", "EAGER",
        "set_device_memory", "execute_async_v3", "REQUIRE_USER_ALLOCATION", "get_tensor_profile_shape",
        "set_runtime_cache", "serialize", "deserialize", "unmark_output", "MATRIX_MULTIPLY",
    }  # fmt: skip
    assert [f"{kind.__name__}.{name}" for kind, name in names if not hasattr(kind, name)] == []


def test_the_check_of_the_api_sees_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_x.py").write_text("self.builder.build_engine(1)\nmodule.BuilderFlag.FP16\n")
    gone = {(tensorrt_rtx.Builder, "build_engine"), (tensorrt_rtx.BuilderFlag, "FP16")}
    assert gone <= used(tmp_path / "tensorrt_x.py")
    assert not any(hasattr(kind, name) for kind, name in gone)


# --------------------------------------------------------------------------------------------------
# How its calls fail, by the table in versions.py


def failures() -> dict[tuple[Any, str], str]:
    """Return what each call of the table does when it fails."""
    rows = re.findall(r"^\| `(\w+)\.(\w+)` +\| (.*?) *\|$", versions.__doc__ or "", re.MULTILINE)
    return {(getattr(tensorrt_rtx, kind), name): what for kind, name, what in rows}


def test_the_table_has_every_call_that_can_fail() -> None:
    harmless = {"get_input", "get_output", "get_layer", "get_error", "node_operator", "node_name"}  # of what is there
    harmless |= {"get_tensor_location", "get_tensor_dtype", "get_tensor_shape", "get_tensor_profile_shape"}
    harmless |= {"set_flag", "set_execution_context_allocation_strategy", "serialize"}
    names = set().union(*(used(path) for path in SOURCES))
    calls = {
        call for call in names if inspect.isclass(call[0]) and callable(getattr(*call)) and call[1] not in harmless
    }
    assert calls == {call for call in failures() if call[1] not in harmless}


def test_the_table_agrees_with_the_signatures() -> None:
    results = {"returns False": "bool", "returns -1": "int", "returns None, as if": "None"}
    for (kind, name), what in failures().items():
        for words, result in results.items():
            if what.startswith(words):
                assert f"-> {result}" in getattr(kind, name).__doc__, name


def test_how_the_real_builder_fails() -> None:
    log = load("tensorrt_rtx").log
    builder = tensorrt_rtx.Builder(log)
    network, config = builder.create_network(1), builder.create_builder_config()
    profile = builder.create_optimization_profile()
    assert tensorrt_rtx.OnnxParser(network, log).parse(b"no model") is False
    network.add_input("x", tensorrt_rtx.int64, (-1, 4))
    assert builder.build_serialized_network(network, config) is None
    with pytest.raises(RuntimeError, match="Shape provided for min"):
        profile.set_shape("x", (-1, 4), (1, 4), (1, 4))
    with pytest.raises(TypeError):
        tensorrt_rtx.OnnxParser(None, log)
    assert config.set_compute_capability(tensorrt_rtx.ComputeCapability.SM89, 5) is False
    assert network.get_output(0) is None
    log.words()
