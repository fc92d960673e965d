"""What begins with an underscore is used only in its own folder.

A private name may be imported by modules of the same folder. A private module or folder (`_util`)
may be used in the folder it stands in, and below. A private attribute that is defined somewhere in
the package must be defined in the folder that uses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.repository.imports import imports_of, owner_of
from tests.repository.sources import PACKAGE, Module, modules, write_modules

PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC and name != "_"


def private_imports(found: Iterable[Module]) -> Iterator[str]:
    """Imports of private names from other folders."""
    found = list(found)
    known = {module.name: module for module in found}
    for module in found:
        for each in imports_of(module):
            owner = owner_of(each.name, frozenset(known))
            if owner is None:
                continue
            inside = each.name.removeprefix(owner).strip(".")
            is_elsewhere = is_private(inside) and known[owner].folder != module.folder
            homes = private_homes(owner)
            if is_elsewhere or not all(f"{module.folder}.".startswith(f"{home}.") for home in homes):
                yield f"{module.path} imports {each.name}"


def private_homes(name: str) -> list[str]:
    """The folders in which the private parts of a module's name stand."""
    parts = name.split(".")
    return [".".join(parts[:index]) for index, part in enumerate(parts) if is_private(part)]


def private_attributes(found: Iterable[Module]) -> Iterator[str]:
    """Uses of private attributes that other folders define, and not the folder itself."""
    found = list(found)
    defined: dict[str, set[str]] = {}
    for module in found:
        defined.setdefault(module.folder, set()).update(definitions(module.tree))
    ours = set().union(*defined.values())
    for module in found:
        theirs = ours - defined[module.folder]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr in theirs:
                yield f"{module.path} uses {ast.unparse(node)}"


def definitions(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, fields, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_no_private_name_is_imported_from_another_folder() -> None:
    assert set(private_imports(modules(*PACKAGE))) == set()


def test_no_private_attribute_of_another_folder_is_used() -> None:
    assert set(private_attributes(modules(*PACKAGE))) == set()


def written(folder: Path, source: str) -> list[Module]:
    """The module p/here/a.py with this source, among others that it may use."""
    engine = "class Engine:\n    _kind = 1\n    def __init__(self): self._open = 1\n"
    files = {
        "__init__.py": "",
        "_util/__init__.py": "",
        "_util/files.py": "",
        "other/engine.py": engine + "def _start(): ...\n",
        "other/_hidden.py": "",
        "here/a.py": source,
        "here/b.py": "def _near(): ...\nclass B:\n    def __init__(self): self._own = 1\n",
    }
    return write_modules(folder, {f"p/{name}": text for name, text in files.items()})


@pytest.mark.parametrize(
    "source",
    [
        "from p.other.engine import _start",
        "def f():\n    from ..other.engine import _start",
        "if TYPE_CHECKING:\n    from p.other.engine import _Kind",
        "from p.other._hidden import f",
        "from p.other import engine\nengine._start()",
        "from p.other.engine import Engine\nEngine()._open",
        "def f(engine):\n    return engine.model._open.run()",
        "class Mine(Engine):\n    def f(self): return self._open",
    ],
)
def test_private_use_is_found(source: str, tmp_path: Path) -> None:
    found = written(tmp_path, source)
    assert len([*private_imports(found), *private_attributes(found)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from p._util.files import staged\nfrom p import _util",
        "from p.here.b import B, _near\nfrom . import b\nb._near()\nB()._own",
        "from p.other.engine import Engine, __version__",
        "import os\nos._exit(1)\nconfig._of_another_library",
        "def f(pair): return pair._replace(a=1), pair.__class__",
        "class Mine:\n    _kind = 2\n    def f(self): return self._kind",
    ],
)
def test_other_use_is_not(source: str, tmp_path: Path) -> None:
    found = written(tmp_path, source)
    assert [*private_imports(found), *private_attributes(found)] == []
