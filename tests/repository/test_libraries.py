"""Which folder may import which library, and which of the other folders."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.repository.imports import imports_of
from tests.repository.sources import MAPPED, Module, modules, requirements, write_modules


def modules_of(*extras: str) -> frozenset[str]:
    """The import names of what the runtime and `extras` require."""
    return frozenset(requirement.name.replace("-", "_") for requirement in requirements(*extras))


@dataclass(frozen=True)
class Layer:
    """What a folder may import; `lazy` is what only functions may. `None` allows any library."""

    packages: frozenset[str]
    libraries: frozenset[str]
    lazy_packages: frozenset[str] = frozenset()
    lazy_libraries: frozenset[str] | None = field(default_factory=frozenset)

    def allows(self, name: str, *, lazy: bool) -> bool:
        if name.split(".")[0] == "sbert_infer":
            layer = layer_of(name)
            return layer in self.packages or (lazy and layer in self.lazy_packages)
        library = name.split(".")[0]
        if library in sys.stdlib_module_names or library in self.libraries:
            return True
        return lazy and (self.lazy_libraries is None or library in self.lazy_libraries)


# What the classes in sbert_infer/integrations are for; each imports its own library.
INTEGRATED = frozenset({"bertopic", "chonkie", "chromadb", "haystack", "keybert"}) | frozenset(
    {"lancedb", "langchain_core", "llama_index", "pydantic", "sklearn", "txtai"}
)

RUNTIME, EXPORT, KERNELS, BENCH = "sbert_infer", "sbert_infer.export", "sbert_infer.kernels", "sbert_infer.bench"
SERVE, EMBED, INTEGRATIONS = "sbert_infer.serve", "sbert_infer.embed", "sbert_infer.integrations"
VERIFY, TUNE = "sbert_infer.verify", "sbert_infer.tune"
LAYERS = {
    "sbert_infer": Layer(
        packages=frozenset({RUNTIME}),
        libraries=modules_of("cpu"),
        lazy_packages=frozenset({KERNELS}),
        lazy_libraries=frozenset({"torch", "cuda"}),
    ),
    "sbert_infer/serve": Layer(frozenset({RUNTIME, SERVE}), modules_of("cpu", "serve") | {"opentelemetry"}),
    "sbert_infer/embed": Layer(
        frozenset({RUNTIME, EMBED}), modules_of("cpu", "embed", "ray"), lazy_libraries=frozenset({"fsspec"})
    ),
    "sbert_infer/integrations": Layer(
        frozenset({RUNTIME, SERVE, INTEGRATIONS}), modules_of("cpu", "serve", "ray-serve") | INTEGRATED
    ),
    "sbert_infer/verify": Layer(frozenset({RUNTIME, EMBED, VERIFY}), modules_of("cpu", "embed")),
    "sbert_infer/tune": Layer(frozenset({RUNTIME, EMBED, TUNE}), modules_of("cpu", "embed")),
    # triton_python_backend_utils: for a file that is copied into Triton Inference Server.
    "export": Layer(frozenset({RUNTIME, EXPORT, KERNELS}), modules_of("export") | {"triton_python_backend_utils"}),
    "kernels": Layer(frozenset({KERNELS}), frozenset({"torch", "triton"})),
    "bench": Layer(frozenset({RUNTIME, EXPORT, KERNELS, BENCH}), modules_of("export"), lazy_libraries=None),
}


def layer_of(name: str) -> str:
    """The package of a layer that `name`, a dotted name under sbert_infer, belongs to."""
    head = ".".join(name.split(".")[:2])
    return head if head in (EXPORT, KERNELS, BENCH, SERVE, EMBED, INTEGRATIONS, VERIFY, TUNE) else RUNTIME


def violations(layer: Layer, found: Iterable[Module]) -> list[str]:
    return [
        f"{module.path}:{each.line}: {each.name}"
        for module in found
        for each in imports_of(module)
        if not each.is_for_types and not layer.allows(each.name, lazy=each.is_lazy)
    ]


def sources(folder: str) -> list[Module]:
    """The folder's modules, except those that belong to another layer."""
    others = tuple(f"{other}/" for other in LAYERS if other.startswith(f"{folder}/"))
    return [module for module in modules(folder) if not module.path.startswith(others)]


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_follow_the_arrows(folder: str) -> None:
    assert violations(LAYERS[folder], sources(folder)) == []


def test_the_import_rules_see_the_code() -> None:
    runtime = {module.path for module in sources("sbert_infer")}
    assert "sbert_infer/errors.py" in runtime
    assert not any(set(path.split("/")[1:-1]) & {*MAPPED, "serve", "embed", "integrations"} for path in runtime)
    assert sources("export")


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("sbert_infer", "import torch"),
        ("sbert_infer", "from torch.nn import functional"),
        ("sbert_infer", "try:\n    import transformers\nexcept ImportError:\n    pass"),
        ("sbert_infer", "class A:\n    import onnx"),
        ("sbert_infer", "def f():\n    import transformers"),
        ("sbert_infer", "def f():\n    from sbert_infer import export"),
        ("sbert_infer", "def f():\n    from . import bench"),
        ("sbert_infer", "from .kernels.pool import pool"),
        ("sbert_infer", "def f():\n    from .serve.server import Server"),
        ("sbert_infer/serve", "import pyarrow"),
        ("sbert_infer/serve", "from ..embed import Embedder"),
        ("sbert_infer/embed", "import torch"),
        ("sbert_infer/serve", "def f():\n    from ..integrations import ray_serve"),
        ("sbert_infer/integrations", "from sbert_infer.embed import Embedder"),
        ("sbert_infer/integrations", "from sentence_transformers import SentenceTransformer"),
        ("sbert_infer", "def f():\n    import langchain_core"),
        ("export", "from sbert_infer.bench.demo import main"),
        ("export", "from ..bench import demo"),
        ("export", "def f():\n    import sentence_transformers"),
        ("kernels", "import numpy"),
        ("kernels", "from sbert_infer import errors"),
        ("kernels", "def f():\n    from ..export import fuse"),
        ("bench", "import sentence_transformers"),
    ],
)
def test_the_import_rules_forbid(folder: str, source: str, tmp_path: Path) -> None:
    assert len(violations(LAYERS[folder], write_modules(tmp_path, {f"{folder}/module.py": source}))) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("sbert_infer", "import json\nimport numpy as np\nfrom tokenizers import Tokenizer\nimport onnxruntime"),
        ("sbert_infer", "from .errors import ArtifactError\nfrom sbert_infer import errors"),
        ("sbert_infer", "if TYPE_CHECKING:\n    import torch"),
        ("sbert_infer", "def f():\n    import torch\n    from .kernels.pool import pool"),
        ("sbert_infer/serve", "import msgspec\nfrom ..engine import Engine\nfrom .wire import TeiError"),
        ("sbert_infer/embed", "import pyarrow as pa\nimport ray\ndef f():\n    import fsspec"),
        (
            "sbert_infer/integrations",
            "import msgspec\nfrom ..serve.app import make_app\ndef f():\n    from ray import serve",
        ),
        ("export", "import torch\nimport onnx_ir\nfrom ..errors import ExportError\nfrom . import fuse"),
        ("kernels", "import torch\nimport triton.language as tl\nfrom . import pool"),
        ("bench", "from sbert_infer.export import fuse\ndef f():\n    import fastembed"),
    ],
)
def test_the_import_rules_allow(folder: str, source: str, tmp_path: Path) -> None:
    assert violations(LAYERS[folder], write_modules(tmp_path, {f"{folder}/module.py": source})) == []
