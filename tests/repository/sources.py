"""The repository's own files, as its tests read them."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
MAPPED = ("export", "kernels", "bench")  # folders at the top that install under sbert_infer
PACKAGE = ("sbert_infer", *MAPPED)

# tomllib is called tomli before Python 3.11, where pytest brings it.
PYPROJECT: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Module:
    """A Python file under `root`."""

    file: Path
    root: Path = ROOT

    @property
    def path(self) -> str:
        """The file's path in the repository."""
        return self.file.relative_to(self.root).as_posix()

    @property
    def name(self) -> str:
        """The dotted name by which it is imported; a package's is that of its folder."""
        parts = self.file.relative_to(self.root).with_suffix("").parts
        parts = ("sbert_infer", *parts) if parts[0] in MAPPED else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        """The dotted name of the folder it is in."""
        return self.name if self.file.stem == "__init__" else self.name.rpartition(".")[0]

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        # Without garbage collection: objects that it destroys may have a traceback printed, which
        # parses, too, and CPython up to 3.11.7 can't do one within the other (gh-106905).
        gc.disable()
        try:
            return ast.parse(self.text)
        finally:
            gc.enable()


@cache
def modules(*folders: str) -> list[Module]:
    """The Python files under `folders`, each once: symlinks in sbert_infer/ are not followed."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [Module(file) for file in files if not any(parent.is_symlink() for parent in file.parents)]


def requirements(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for: the dependencies of the runtime, and of `extras`."""
    project = PYPROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def write_modules(root: Path, sources: Mapping[str, str]) -> list[Module]:
    """Write modules, path -> source, to try a rule on."""
    for path, source in sources.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source)
    return [Module(root / path, root) for path in sources]
