"""Which module imports what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.repository.sources import Module


@dataclass(frozen=True)
class Import:
    """One imported name."""

    line: int
    name: str  # absolute and dotted: `from x import y` imports x.y
    is_lazy: bool  # it runs when a function is called
    is_for_types: bool  # it never runs, only type checkers read it


def imports_of(module: Module) -> Iterator[Import]:
    """Every import in a module."""
    return _imports(module.tree, module.folder, is_lazy=False, is_for_types=False)


def owner_of(name: str, known: frozenset[str]) -> str | None:
    """The module among the `known` that an imported name is, or is in; None if it is in none."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def _imports(node: ast.AST, folder: str, *, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (Import(child.lineno, name, is_lazy, is_for_types) for name in _names(child, folder))
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), folder, is_lazy=is_lazy, is_for_types=True)
            yield from _imports(ast.Module(child.orelse, []), folder, is_lazy=is_lazy, is_for_types=is_for_types)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, folder, is_lazy=is_lazy or inside, is_for_types=is_for_types)


def _names(node: ast.Import | ast.ImportFrom, folder: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parts = folder.split(".")
    base = parts[: len(parts) - node.level + 1] if node.level else []
    return [".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names]
