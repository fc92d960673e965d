"""The promises the repository makes about itself: import rules, layout, pins, documents."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sbert_infer

ROOT = Path(__file__).parents[1]
MAPPED = ("export", "kernels", "bench")  # folders at the top that install under sbert_infer

# tomllib's twin on Python 3.10 comes with pytest.
PYPROJECT: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)


def requirements(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for: the dependencies of the runtime, and of `extras`."""
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def modules_of(*extras: str) -> frozenset[str]:
    """The import names of `requirements`."""
    return frozenset(requirement.name.replace("-", "_") for requirement in requirements(*extras))


EVERYTHING = ("cpu", "export", "serve", "sparse", "embed", "ray", "examples", "dev")  # what `make setup` installs


# Import rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """What a folder may import. An import inside a function is lazy; `None` allows anything there."""

    package: str
    packages: frozenset[str]
    libraries: frozenset[str]
    lazy_packages: frozenset[str] = frozenset()
    lazy_libraries: frozenset[str] | None = field(default_factory=frozenset)

    def allows(self, name: str, *, lazy: bool) -> bool:
        if name.split(".")[0] == "sbert_infer":
            owner = owner_of(name)
            return owner in self.packages or (lazy and owner in self.lazy_packages)
        library = name.split(".")[0]
        if library in sys.stdlib_module_names or library in self.libraries:
            return True
        return lazy and (self.lazy_libraries is None or library in self.lazy_libraries)


RUNTIME, EXPORT, KERNELS, BENCH = "sbert_infer", "sbert_infer.export", "sbert_infer.kernels", "sbert_infer.bench"
SERVE, EMBED = "sbert_infer.serve", "sbert_infer.embed"
LAYERS = {
    "sbert_infer": Layer(
        package=RUNTIME,
        packages=frozenset({RUNTIME}),
        libraries=modules_of("cpu"),
        lazy_packages=frozenset({KERNELS}),
        lazy_libraries=frozenset({"torch", "cuda"}),
    ),
    "sbert_infer/serve": Layer(SERVE, frozenset({RUNTIME, SERVE}), modules_of("cpu", "serve")),
    "sbert_infer/embed": Layer(
        EMBED, frozenset({RUNTIME, EMBED}), modules_of("cpu", "embed", "ray"), lazy_libraries=frozenset({"fsspec"})
    ),
    # The last is for a file that is copied into Triton Inference Server, which has it.
    "export": Layer(
        EXPORT, frozenset({RUNTIME, EXPORT, KERNELS}), modules_of("export") | {"triton_python_backend_utils"}
    ),
    "kernels": Layer(KERNELS, frozenset({KERNELS}), frozenset({"torch", "triton"})),
    "bench": Layer(BENCH, frozenset({RUNTIME, EXPORT, KERNELS, BENCH}), modules_of("export"), lazy_libraries=None),
}


def owner_of(name: str) -> str:
    """The layer's package that `name`, a dotted name under sbert_infer, belongs to."""
    head = ".".join(name.split(".")[:2])
    return head if head in (EXPORT, KERNELS, BENCH, SERVE, EMBED) else RUNTIME


def imports(node: ast.AST, package: str, *, lazy: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, is it lazy) of every import under `node` that runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            prefix = ".".join([*base, *([child.module] if child.module else [])])
            yield from ((child.lineno, f"{prefix}.{alias.name}", lazy) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from imports(ast.Module([other], []), package, lazy=lazy)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(child, package, lazy=lazy or inside)


def violations(layer: Layer, package: str, source: str) -> list[str]:
    found = imports(ast.parse(source), package)
    return [f"{line}: {name}" for line, name, lazy in found if not layer.allows(name, lazy=lazy)]


def sources(folder: str) -> list[Path]:
    """The folder's own Python files: not those behind the symlinks in sbert_infer/, nor those of another layer."""
    others = [ROOT / other for other in LAYERS if other.startswith(f"{folder}/")]
    files = sorted((ROOT / folder).rglob("*.py"))
    own = [file for file in files if not any(other in file.parents for other in others)]
    return [file for file in own if not any(parent.is_symlink() for parent in file.parents)]


@pytest.mark.parametrize("folder", LAYERS)
def test_imports_follow_the_arrows(folder: str) -> None:
    layer = LAYERS[folder]
    bad = []
    for file in sources(folder):
        inner = file.relative_to(ROOT / folder).parent.parts
        found = violations(layer, ".".join([layer.package, *inner]), file.read_text(encoding="utf-8"))
        bad += [f"{file.relative_to(ROOT)}:{line}" for line in found]
    assert bad == []


def test_the_import_rules_see_the_code() -> None:
    assert ROOT / "sbert_infer" / "errors.py" in sources("sbert_infer")
    assert not any(set(file.relative_to(ROOT).parts[1:-1]) & set(MAPPED) for file in sources("sbert_infer"))
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
        ("export", "from sbert_infer.bench.demo import main"),
        ("export", "from ..bench import demo"),
        ("export", "def f():\n    import sentence_transformers"),
        ("kernels", "import numpy"),
        ("kernels", "from sbert_infer import errors"),
        ("kernels", "def f():\n    from ..export import fuse"),
        ("bench", "import sentence_transformers"),
    ],
)
def test_the_import_rules_forbid(folder: str, source: str) -> None:
    assert violations(LAYERS[folder], LAYERS[folder].package, source)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("sbert_infer", "import json\nimport numpy as np\nfrom tokenizers import Tokenizer\nimport onnxruntime"),
        ("sbert_infer", "from .errors import ArtifactError\nfrom sbert_infer import errors"),
        ("sbert_infer", "if TYPE_CHECKING:\n    import torch"),
        ("sbert_infer", "def f():\n    import torch\n    from .kernels.pool import pool"),
        ("sbert_infer/serve", "import msgspec\nfrom ..engine import Engine\nfrom .wire import TeiError"),
        ("sbert_infer/embed", "import pyarrow as pa\nimport ray\ndef f():\n    import fsspec"),
        ("export", "import torch\nimport onnx_ir\nfrom ..errors import ExportError\nfrom . import fuse"),
        ("kernels", "import torch\nimport triton.language as tl\nfrom . import pool"),
        ("bench", "from sbert_infer.export import fuse\ndef f():\n    import fastembed"),
    ],
)
def test_the_import_rules_allow(folder: str, source: str) -> None:
    assert violations(LAYERS[folder], LAYERS[folder].package, source) == []


# Layout -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folders_are_namespaces_behind_symlinks(folder: str) -> None:
    link = ROOT / "sbert_infer" / folder
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{folder}"
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


# Pins ---------------------------------------------------------------------------------------------


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned_here() -> dict[str, str]:
    """Name -> version, of the pins that hold for the Python that runs."""
    here = [pin for pin in pins() if pin.marker is None or pin.marker.evaluate()]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}


def test_each_pin_is_one_exact_version() -> None:
    assert [str(pin) for pin in pins() if not re.fullmatch(r"==[\w.]+", str(pin.specifier))] == []
    here = [canonicalize_name(pin.name) for pin in pins() if pin.marker is None or pin.marker.evaluate()]
    assert sorted(here) == sorted(set(here))


@pytest.mark.parametrize("requirement", requirements(*EVERYTHING), ids=lambda requirement: requirement.name)
def test_each_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    version = pinned_here().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} has no pin in constraints.txt"
    assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_what_dependencies_bring_is_pinned() -> None:
    """Except under torch, which pins its own CUDA libraries, and differently per build."""
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = requirements(*EVERYTHING)
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name == "torch":
            continue
        seen.add((name, extras))
        for child in map(Requirement, distribution(name).requires or ()):
            environments = [{"extra": extra} for extra in ("", *extras)]
            if child.marker is None or any(map(child.marker.evaluate, environments)):
                queue.append(child)
    assert len(seen) > len(requirements(*EVERYTHING))
    assert {name for name, _ in seen} - set(pinned_here()) == set()


# Documents ----------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def make_commands(document: str) -> set[str]:
    """The targets that a document shows as code: `make test`, or at the start of a line."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return set(re.findall(r"(?:^\$? ?|`)make (?:[A-Z]+=\S+ )?([a-z-]+)", text, re.MULTILINE))


def test_documented_make_targets_exist() -> None:
    assert make_commands("CONTRIBUTING.md") >= {"test", "lint", "format", "demo"}
    assert make_commands("README.md") | make_commands("CONTRIBUTING.md") <= make_targets()


def test_make_targets_are_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == make_targets()


def test_changelog_names_the_next_version_first() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[Unreleased\]\n\nNext version: (\S+)$", changelog, re.MULTILINE)
    assert first is not None
    assert first[1] == sbert_infer.__version__
    assert first.start() == changelog.index("\n## ") + 1


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    files = sorted(file.name for file in folder.glob("[0-9]*.md"))
    assert files
    assert files == sorted(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", index))
