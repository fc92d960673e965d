"""modules.json: a checkpoint's modules in order, of one route if there are several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from sbert_infer.export.checkpoint.modules import SUPPORTED, Problems, read_json, unknown_keys
from sbert_infer.export.checkpoint.settings import SENTENCE_CONFIGS
from sbert_infer.export.checkpoint.sparse_modules import SPARSE_MODULES

FIRST = ("Transformer", "MLMTransformer", "StaticEmbedding", "SparseStaticEmbedding")
ROUTERS = ("Router", "Asym")
_OWN_TOKENIZER = "its tokenizer is Python code, which an artifact can't carry"
# Modules of sentence-transformers that can't be converted, and why.
REFUSED = {
    "WordEmbeddings": _OWN_TOKENIZER,
    "BoW": _OWN_TOKENIZER,
    "WordWeights": "it weighs the words of a WordEmbeddings, whose tokenizer is Python code",
    "CNN": "it mixes tokens with the padding beside them, so a vector depends on its batch",
    "LSTM": "it runs over tokens one by one, which is not worth an artifact",
    "CLIPModel": "it encodes images, and an artifact takes texts",
    "MultiVectorMask": "it is for a MultiVectorEncoder, which config_sentence_transformers.json does not name",
    "HierarchicalTokenPooling": "it merges a document's vectors into clusters, which an artifact can't",
    "LambdaTokenPooling": "it is Python code, which an artifact can't carry",
    "LogitScore": "it scores pairs of texts, and an artifact encodes texts",
}


@dataclass(frozen=True)
class Entry:
    """One module: its class, and the folder it is saved in."""

    kind: str
    path: str

    @property
    def name(self) -> str:
        """Name in messages."""
        return self.path or self.kind


def read_entries(
    path: Path, route: str | None, problems: Problems, types: Mapping[str, str] | None = None
) -> list[Entry]:
    """Read the entries of modules.json; without that file, a transformer alone.

    A router is replaced by its modules of `route`. `types` maps further dotted types that are
    allowed to the kinds they are read as.
    """
    if not (path / "modules.json").is_file():
        ours = [name for name in (*SENTENCE_CONFIGS, "config_sentence_transformers.json") if (path / name).is_file()]
        problems += [f"modules.json is missing, though {name} is there: is the copy complete?" for name in ours]
        return [Entry("Transformer", "")]
    entries: list[Entry] = []
    routed = False
    for item in read_json(path / "modules.json", "modules.json", problems, list):
        entry = _read_entry(item, types or {}, problems)
        if entry is not None:
            entries += _read_route(path, entry, route, problems) if entry.kind in ROUTERS else [entry]
            routed = routed or entry.kind in ROUTERS
    if route is not None and not routed:
        problems.append(f"modules.json: the model has no routes, so there is no route {route!r}: leave --route out")
    _check_first([entry.kind for entry in entries], problems)
    return entries


def has_sparse_module(entries: Iterable[Entry]) -> bool:
    """Whether one of the modules gives sparse vectors."""
    return any(entry.kind in (*SPARSE_MODULES, "SparseStaticEmbedding") for entry in entries)


def is_static(path: Path, route: str | None) -> bool:
    """Whether a table of static embeddings takes the place of the transformer."""
    return any("Static" in entry.kind for entry in read_entries(path, route, []))


def _check_first(kinds: list[str], problems: Problems) -> None:
    inputs = [kind for kind in kinds if kind in FIRST]
    if problems and not inputs:  # refused or unreadable, which is already listed
        return
    if len(inputs) != 1 or kinds[0] not in FIRST:
        found = ", ".join(kinds)
        problems.append(
            f"modules.json: the first module, and no other, must be a {' or a '.join(FIRST)} (found: {found})"
        )


def _read_entry(item: Any, types: Mapping[str, str], problems: Problems) -> Entry | None:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str) or not isinstance(item.get("path"), str):
        problems.append(f"modules.json: every module needs a 'type' and a 'path', not {item!r}")
        return None
    unknown_keys(item, ("idx", "name", "path", "type", "kwargs"), "modules.json", problems)
    return _checked(item["type"], item["path"], "modules.json", problems, types)


def _checked(
    kind: str, path: str, file: str, problems: Problems, types: Mapping[str, str] | None = None
) -> Entry | None:
    """The module of dotted type `kind` in folder `path`, if supported and inside the checkpoint."""
    windows = PureWindowsPath(path)  # understands both kinds of slash, and drives
    if windows.anchor or ".." in windows.parts:
        problems.append(f"{file}: the path {path!r} leads out of the checkpoint")
        return None
    if types and kind in types:
        return Entry(types[kind], path)
    package, _, name = kind.rpartition(".")
    supported = (*FIRST, *ROUTERS, *SUPPORTED, *SPARSE_MODULES)
    if package.startswith("sentence_transformers.") and name in supported:
        return Entry(name, path)
    why = REFUSED.get(name) if package.startswith("sentence_transformers.") else None
    why = why or f"supported: {', '.join(supported)}"
    problems.append(f"{file}: module type '{kind}' is not supported ({why})")
    return Entry(name if name in FIRST else "", path)


@dataclass(frozen=True)
class Routes:
    """The two routes of a model for queries and documents, which one file can hold."""

    default: str  # for texts that are neither
    other: str


def read_routes(path: Path) -> Routes | None:
    """The routes of a model that has one for queries, one for documents, and no more rules."""
    items = read_json(path / "modules.json", "", [], list) if (path / "modules.json").is_file() else []
    entries = [_read_entry(item, {}, []) for item in items]
    router = next((entry for entry in entries if entry is not None and entry.kind in ROUTERS), None)
    if router is None:
        return None
    _, config = _read_router(path, router, [])
    structure, parameters = config.get("structure", {}), config.get("parameters", {})
    if not isinstance(structure, dict) or not isinstance(parameters, dict):
        return None
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(structure), None)
    others = {"query": "document", "document": "query"}
    if set(structure) != set(others) or str(default) not in others or parameters.get("route_mappings"):
        return None
    return Routes(str(default), others[str(default)])


def _read_router(path: Path, router: Entry, problems: Problems) -> tuple[str, dict[str, Any]]:
    """The name and the content of a router's settings."""
    names = ("router_config.json", "config.json")  # the second is that of Asym
    name = next((name for name in names if (path / router.path / name).is_file()), names[0])
    file = f"{router.path}/{name}".removeprefix("/")
    return file, read_json(path / router.path / name, file, problems)


def _read_route(path: Path, router: Entry, route: str | None, problems: Problems) -> list[Entry]:
    """The modules of one of a router's routes."""
    file, config = _read_router(path, router, problems)
    types, structure = config.get("types", {}), config.get("structure", {})
    if not config:
        return []
    if route is None:
        each = ", ".join(f"--route {name}" for name in structure)
        problems.append(
            f"{file}: one file can hold the routes query and document, if one of them is the default; this model has "
            f"{', '.join(structure)}: export each to a file of its own, with {each} and -o"
        )
    elif route not in structure:
        problems.append(f"{file}: there is no route {route!r}, only {', '.join(structure)}")
    folder = f"{router.path}/" if router.path else ""
    found = [_checked(str(types.get(id)), f"{folder}{id}", file, problems) for id in structure.get(route, [])]
    return [entry for entry in found if entry is not None]
