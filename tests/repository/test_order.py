"""The parts of the package import each other in one direction.

`ORDERS` lists the children of a package, modules and folders, from left to right. Each may import
only what stands left of it, and its neighbours between the same `<` or `|`. In every folder, listed
or not, no child may import itself by way of others. Imports in functions count, and so do those for
type checkers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import pytest

from tests.repository.imports import imports_of, owner_of
from tests.repository.sources import PACKAGE, Module, modules, write_modules

ORDERS = {
    "sbert_infer": """
        kernels < errors, types, _util, text, similarity < artifact < backends < encode < scheduling
        < module_interface, opening < base_engine, sparse_methods, torch_methods, routed_engine, engine,
        reranker, async_engine
        < __init__ < serve | embed | doctor | export < integrations | bench | verify | tune
    """,
    "sbert_infer.serve": """
        logs, settings, otlp < wire < history < models < metrics, tracing < http < routes
        < app < server < cli < __init__
    """,
    "sbert_infer.embed": """
        read < write < embedder, progress, reuse < job < local | ray < cli < __init__
    """,
    "sbert_infer.doctor": """
        probe | machine, packages < problems, requirements, trial < report < render < cli < __main__ < __init__
    """,
    "sbert_infer.verify": """
        texts | vectors_file | truth < server | compare < report < cli < __main__ < __init__
    """,
    "sbert_infer.tune": """
        candidates | workload < trial < search < report < cli < __main__ < __init__
    """,
    "sbert_infer.integrations": """
        opening < bertopic | chonkie | chroma | haystack | keybert | lancedb | langchain | llama_index
        | sklearn | txtai | ray_serve < __init__
    """,
    "sbert_infer.export": """
        options, write < checkpoint < reference < graph < precision < verify < families
        < plan_exporter, exporter | report | triton_server < cli
    """,
    "sbert_infer.bench": """
        inside | needs_gpu | errors, stats, workloads < contest < report, console
        < quality | load | gpu_model < session
        < cli | demo | base_model | shapes | reuse | lanes
    """,
}

Edge = tuple[Module, str]  # a module, and the name of one that it imports


def edges(found: Iterable[Module]) -> list[Edge]:
    """All imports among the modules `found`."""
    found = list(found)
    known = frozenset(module.name for module in found)
    owners = [(module, owner_of(each.name, known)) for module in found for each in imports_of(module)]
    return [(module, owner) for module, owner in dict.fromkeys(owners) if owner not in (None, module.name)]


def child_of(package: str, name: str) -> str | None:
    """The child of `package` that the module `name` is, or is in; `__init__` for itself."""
    if name == package:
        return "__init__"
    return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else None


def children(package: str, found: Iterable[Module]) -> set[str]:
    return {child for module in found if (child := child_of(package, module.name)) is not None}


def places(order: str) -> dict[str, tuple[int, int]]:
    """Child -> (its place from the left, which of the alternatives there)."""
    return {
        child.strip(): (place, which)
        for place, cell in enumerate(order.split("<"))
        for which, alternative in enumerate(cell.split("|"))
        for child in alternative.split(",")
    }


def against_order(package: str, order: str, found: Iterable[Module]) -> Iterator[str]:
    """Imports within `package` that point to the right, or to an alternative."""
    place = places(order)
    for module, name in edges(found):
        importer, imported = child_of(package, module.name), child_of(package, name)
        if importer not in place or imported not in place or importer == imported:
            continue
        here, there = place[importer], place[imported]
        if there[0] > here[0] or (there[0] == here[0] and there[1] != here[1]):
            yield f"{module.path} imports {name}"


def cycles(found: Iterable[Module]) -> Iterator[str]:
    """Children of one folder that import each other, directly or by way of others."""
    found = list(found)
    all_edges = edges(found)
    for folder in sorted({module.folder for module in found}):
        graph: dict[str, set[str]] = {}
        for module, name in all_edges:
            importer, imported = child_of(folder, module.name), child_of(folder, name)
            if importer and imported and importer != imported:
                graph.setdefault(importer, set()).add(imported)
        yield from (f"{folder}: {', '.join(cycle)}" for cycle in _cycles(graph))


def _cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    reached = {child: _reached(graph, child) for child in graph}
    in_cycles = sorted(child for child in graph if child in reached[child])
    together = [tuple(other for other in in_cycles if other in reached[c] and c in reached[other]) for c in in_cycles]
    return [list(cycle) for cycle, _ in groupby(sorted(together))]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph.get(ahead.pop(), set()) - reached
        reached |= new
        ahead += new
    return reached


@pytest.mark.parametrize("package", ORDERS)
def test_imports_point_to_the_left(package: str) -> None:
    found = set(against_order(package, ORDERS[package], modules(*PACKAGE)))
    assert found == set()


@pytest.mark.parametrize("package", ORDERS)
def test_every_child_has_its_place(package: str) -> None:
    missing = children(package, modules(*PACKAGE)) ^ set(places(ORDERS[package]))
    assert missing == set()


def test_no_folder_has_a_cycle() -> None:
    assert set(cycles(modules(*PACKAGE))) == set()


def test_what_runs_in_other_environments_imports_nothing_of_ours() -> None:
    """The libraries that sbert-bench compares with run where sbert-infer may not be installed."""
    inside = [module for module in modules("bench") if module.name.startswith("sbert_infer.bench.inside.")]
    found = [(module, each) for module in inside for each in imports_of(module) if not each.is_lazy]
    assert inside
    assert [f"{module.path}:{each.line}" for module, each in found if each.name.startswith("sbert_infer")] == []


def written(folder: Path, files: Mapping[str, str]) -> list[Module]:
    """A package `p` with these files."""
    return write_modules(folder, {f"p/{name}": source for name, source in files.items()})


ORDER = "low, base < left | right < top < __init__"
FILES = dict.fromkeys(["low.py", "base/a.py", "left.py", "right/b.py", "top.py"], "")
FILES["__init__.py"] = "from p.top import x"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("low.py", "from p import left"),
        ("low.py", "import p.right.b"),
        ("base/a.py", "def f():\n    from ..top import f"),
        ("left.py", "if TYPE_CHECKING:\n    from p.right.b import B"),
        ("right/b.py", "from p.left import f"),
        ("top.py", "from p import __version__"),
    ],
)
def test_the_order_forbids(file: str, source: str, tmp_path: Path) -> None:
    found = written(tmp_path, {**FILES, file: source})
    assert [line.split()[0] for line in against_order("p", ORDER, found)] == [f"p/{file}"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("low.py", "from p.base.a import f\nimport os"),
        ("base/a.py", "from p.low import f"),
        ("right/b.py", "from ..base import a"),
        ("top.py", "from p import left\nfrom p.right.b import B"),
    ],
)
def test_the_order_allows(file: str, source: str, tmp_path: Path) -> None:
    found = written(tmp_path, {**FILES, file: source})
    assert list(against_order("p", ORDER, found)) == []
    assert list(cycles(found)) == []


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        ({"a.py": "from p.b import x", "b.py": "from p.a import y"}, "p: a, b"),
        (
            {"a.py": "import p.b", "b.py": "def f():\n    import p.c", "c.py": "if TYPE_CHECKING:\n    import p.a"},
            "p: a, b, c",
        ),
        ({"q/a.py": "import p.r", "r.py": "from p.q.b import x", "q/b.py": ""}, "p: q, r"),
        ({"q/a.py": "from . import b", "q/b.py": "from .a import x", "c.py": "import p.q.a"}, "p.q: a, b"),
        ({"q/__init__.py": "from p.q.a import x", "q/a.py": "from p.q import x"}, "p.q: __init__, a"),
    ],
)
def test_cycles_are_found(files: dict[str, str], cycle: str, tmp_path: Path) -> None:
    assert list(cycles(written(tmp_path, files))) == [cycle]
