"""Folders, modules and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.repository.sources import PACKAGE, Module, modules, write_modules

FOLDERS = (*PACKAGE, "examples", "tests")
MOST_MODULES = 15  # in a folder, not counting __init__.py
MOST_LINES = 400  # in a module
MOST_FUNCTION_LINES = 50  # not counting decorators, signature, docstring and tables


def crowded_folders(found: Iterable[Module]) -> Iterator[str]:
    counts = Counter(Path(module.path).parent.as_posix() for module in found if module.file.stem != "__init__")
    return (folder for folder, count in counts.items() if count > MOST_MODULES)


def long_modules(found: Iterable[Module]) -> Iterator[str]:
    return (module.path for module in found if len(module.text.splitlines()) > MOST_LINES)


def long_functions(found: Iterable[Module]) -> Iterator[str]:
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and body_lines(node) > MOST_FUNCTION_LINES:
                yield f"{module.path}: {node.name}"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[ast.get_docstring(function) is not None :]
    return lines(body[0], body[-1]) - sum(lines(table) - 1 for table in body if is_table(table)) if body else 0


def lines(first: ast.stmt, last: ast.stmt | None = None) -> int:
    return ((last or first).end_lineno or 0) - first.lineno + 1


def is_table(node: ast.stmt) -> bool:
    """Whether a statement only returns, or gives a name to, a list or the like."""
    if not isinstance(node, (ast.Return, ast.Assign, ast.AnnAssign)):
        return False
    return isinstance(node.value, (ast.List, ast.Tuple, ast.Dict, ast.Set))


def test_no_folder_holds_too_many_modules() -> None:
    assert set(crowded_folders(modules(*FOLDERS))) == set()


def test_no_module_is_too_long() -> None:
    assert set(long_modules(modules(*FOLDERS))) == set()


def test_no_function_is_too_long() -> None:
    assert set(long_functions(modules(*FOLDERS))) == set()


@pytest.mark.parametrize(("count", "crowded"), [(15, []), (16, ["p/q"])])
def test_crowded_folders_are_found(count: int, crowded: list[str], tmp_path: Path) -> None:
    names = ["p/a.py", "p/q/__init__.py", *(f"p/q/m{number}.py" for number in range(count))]
    assert list(crowded_folders(Module(tmp_path / name, tmp_path) for name in names)) == crowded


@pytest.mark.parametrize(
    ("source", "long"),
    [
        ("a = 1\n" * 400, []),
        ("a = 1\n" * 401, ["module"]),
        (
            "def f(\n" + "    a,\n" * 60 + '):\n    """Doc.\n' + "\n    Doc.\n" * 60 + '    """\n' + "    a = 1\n" * 50,
            [],
        ),
        ("def f():\n" + "    a = 1\n" * 51, ["f"]),
        ("def f():\n" + '    """' + "\n" * 60 + '"""\n', []),
        ("def f():\n    a = 1\n    return [\n" + "        1,\n" * 60 + "    ]\n", []),
        ("class A:\n    async def g(self):\n        return f(\n" + "            1,\n" * 49 + "        )\n", ["g"]),
    ],
)
def test_long_code_is_found(source: str, long: list[str], tmp_path: Path) -> None:
    found = write_modules(tmp_path, {"module.py": source})
    names = ["module" for _ in long_modules(found)] + [line.split()[-1] for line in long_functions(found)]
    assert names == long
