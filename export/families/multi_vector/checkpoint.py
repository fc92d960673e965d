"""Recognise a multi-vector encoder (ColBERT and similar), read it, and validate all of it.

There are three layouts: that of sentence-transformers' `MultiVectorEncoder`, where the modules'
files hold all settings; that of PyLate, where config_sentence_transformers.json does, and where the
last two modules, which select the tokens that count and scale each vector to length 1, are implied;
and that of Stanford's code, see `stanford_colbert`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbert_infer.encode.multi_vector import Role
from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.hub import locate, shown, weight_files
from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    ModuleSpec,
    NormalizeSpec,
    Problems,
    output_dim,
    peek_json,
    read_json,
    read_module,
    unknown_keys,
)
from sbert_infer.export.checkpoint.modules_json import Entry, read_entries
from sbert_infer.export.checkpoint.settings import (
    ROLE_KEYS,
    TransformerSettings,
    read_prompts,
    read_transformer_settings,
)
from sbert_infer.export.checkpoint.transformer import read_config, read_tokenizer
from sbert_infer.export.families.multi_vector.roles import ModelSettings, RoleSettings, mark_prefixes, read_roles
from sbert_infer.export.families.multi_vector.stanford_colbert import is_stanford, read_stanford
from sbert_infer.similarity import MULTI_SIMILARITIES

_SETTINGS = "config_sentence_transformers.json"
_NATIVE, _PYLATE = "MultiVectorEncoder", "ColBERT"  # values of `model_type`; older versions of PyLate give none
_MASK = "MultiVectorMask"
_TYPES = {
    f"sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.{_MASK}": _MASK,
    f"sentence_transformers.multi_vector_encoder.modules.{_MASK}": _MASK,
    "pylate.models.Dense.Dense": "Dense",
}
_PYLATE_KEYS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion"),
    *("do_query_expansion", "attend_to_expansion_tokens", "skiplist_words"),
)
_EXPANDED_LENGTH = 32  # of PyLate's queries, if it is not set


@dataclass(frozen=True, kw_only=True)
class MultiVectorCheckpoint(Checkpoint):
    """The content of a multi-vector encoder's checkpoint, the same for all layouts.

    Its modules work on token vectors, and its limit is that of the longest role.
    """

    hidden_size: int
    roles: dict[str, Role]
    prefixes: tuple[str, ...]  # marks before a text, of one token each

    @property
    def dim(self) -> int:
        """Width of a token's vector."""
        return output_dim(self.modules) or self.hidden_size


def is_multi_vector(path: Path) -> bool:
    """Whether the folder `path` holds a readable multi-vector encoder."""
    config = peek_json(path / _SETTINGS)
    return is_stanford(path) or config.get("model_type") in (_NATIVE, _PYLATE) or "query_prefix" in config


def read_multi_vector(
    source: str | Path, *, max_length: int | None = None, trust_remote_code: bool = False
) -> MultiVectorCheckpoint:
    """Read and validate the multi-vector encoder in a local folder or under a hub id.

    `max_length` replaces the limit for documents. Raises one `CheckpointError` with every problem.
    """
    path = locate(str(source), trust_remote_code)
    problems: Problems = []
    entries = read_entries(path, None, problems, _TYPES)
    folder = path / (entries[0].path if entries else "")
    config = read_config(folder, path, trust_remote_code, problems)
    transformer = read_transformer_settings(folder, path, problems, roles=True)
    weight_files(folder, shown(folder, path), problems)
    tokenizer = read_tokenizer(folder, path, True, trust_remote_code, problems)
    settings = read_stanford(path, problems) if is_stanford(path) else _read(path, entries, transformer, problems)
    if not problems:
        _check_widths(settings.modules, config.hidden_size, problems)
        mark_prefixes(tokenizer, settings.prefixes)
        saved = transformer.max_length
        roles = read_roles(settings.by_role, saved, tokenizer, config, max_length, problems)
    if problems:
        raise CheckpointError(str(source), problems)
    return MultiVectorCheckpoint(
        source=str(source),
        path=path,
        transformer_path=folder,
        model_type=config.model_type,
        modules=tuple(spec for _, spec in settings.modules),
        max_length=max(role.max_length for role in roles.values()),
        prompts=settings.prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity=settings.similarity,
        do_lower_case=transformer.do_lower_case,
        trust_remote_code=trust_remote_code,
        hidden_size=config.hidden_size,
        roles=roles,
        prefixes=settings.prefixes,
    )


def _read(path: Path, entries: list[Entry], transformer: TransformerSettings, problems: Problems) -> ModelSettings:
    """The layouts with modules.json."""
    file = path / _SETTINGS
    config = read_json(file, file.name, problems)
    native = config.get("model_type") == _NATIVE
    known = ("prompts", "default_prompt_name", "similarity_fn_name", "model_type", "__version__", "requirements")
    unknown_keys(config, (*known, *(() if native else _PYLATE_KEYS)), file.name, problems)
    similarity = config.get("similarity_fn_name") or MULTI_SIMILARITIES[0]
    if not native:  # PyLate writes "MaxSim", or the name of another similarity that it does not use
        similarity = MULTI_SIMILARITIES[0]
    if similarity not in MULTI_SIMILARITIES:
        problems.append(f"{file.name}: unknown similarity {similarity!r} (known: {', '.join(MULTI_SIMILARITIES)})")
    prompts = read_prompts(config, file.name, problems)
    marks = {role: config.get(f"{role}_prefix") or "" for role in ("query", "document")}
    for role, mark in marks.items():
        if not isinstance(mark, str):
            problems.append(f"{file.name}: '{role}_prefix' must be a string, not {mark!r}")
            marks[role] = ""
    for role, mark in marks.items():  # put before the prompt, unless it is there already
        prompts[role] = mark + prompts.get(role, "").removeprefix(mark)
    modules = _read_modules(path, entries, problems)
    if native:
        by_role = _read_native_roles(path, entries, transformer.by_role, problems)
    else:
        by_role = _read_pylate_roles(config, transformer.by_role, file.name, problems)
        modules.append(("Normalize", NormalizeSpec()))
    prefixes = tuple(mark for mark in marks.values() if mark)
    return ModelSettings(prompts, modules, by_role, prefixes, config.get("default_prompt_name"), similarity)


def _read_native_roles(path: Path, entries: list[Entry], saved: dict[str, Any], problems: Problems) -> RoleSettings:
    masks = [entry for entry in entries if entry.kind == _MASK]
    words, tasks = _read_mask(path, masks, "query_expansion" in saved, problems)
    return RoleSettings(**{key: saved.get(key) for key in ROLE_KEYS}, skip_words=words, skip_tasks=tasks)


def _read_pylate_roles(pylate: dict[str, Any], saved: dict[str, Any], name: str, problems: Problems) -> RoleSettings:
    lengths = {key: pylate.get(key) for key in ("query_length", "document_length")}
    expansion = pylate.get("query_expansion")
    if "query_expansion" not in pylate and pylate.get("do_query_expansion") is not False:
        length = lengths.pop("query_length") or _EXPANDED_LENGTH
        expansion = {"strategy": "fixed", "attend": bool(pylate.get("attend_to_expansion_tokens")), "length": length}
    words = pylate.get("skiplist_words")
    if words is not None and not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        problems.append(f"{name}: 'skiplist_words' must be a list of strings, not {words!r}")
        words = None
    given = {**lengths, "query_expansion": expansion, **saved}
    return RoleSettings(
        **{key: given.get(key) for key in ROLE_KEYS},
        skip_words=tuple(string.punctuation if words is None else words),
        skip_tasks=("document",),
    )


def _read_mask(
    path: Path, masks: list[Entry], expands: bool, problems: Problems
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that get no vector, and the roles in which they get none."""
    if not masks:
        if expands:
            problems.append(f"'query_expansion' is set, but no {_MASK} would let the expansion count")
        return (), ()
    if len(masks) > 1:
        problems.append(f"modules.json: {len(masks)} modules {_MASK}, only one is supported")
    name = f"{masks[0].name}/config.json"
    config = read_json(path / masks[0].path / "config.json", name, problems)
    unknown_keys(config, ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"), name, problems)
    if config.get("keep_only_token_ids"):
        problems.append(f"{name}: 'keep_only_token_ids' is for images and not supported")
    words, tasks = config.get("skiplist_words") or [], config.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    for key, value in (("skiplist_words", words), ("skiplist_tasks", tasks)):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            problems.append(f"{name}: '{key}' must be a list of strings, not {value!r:.60}")
            return (), ()
    return tuple(words), tuple(tasks)


def _read_modules(path: Path, entries: list[Entry], problems: Problems) -> list[tuple[str, ModuleSpec]]:
    """The modules after the transformer, all of which work on token vectors."""
    modules: list[tuple[str, ModuleSpec]] = []
    for entry in entries[1:]:
        if entry.kind == _MASK or not entry.kind:
            continue
        if entry.kind not in ("Dense", "Normalize", "Dropout"):
            problems.append(f"modules.json: the module {entry.kind} is not supported in a multi-vector encoder")
            continue
        if entry.kind == "Normalize" and not (path / entry.path / "config.json").is_file():
            problems.append(f"{entry.name}: it scales the vector of a text, and a multi-vector encoder has none")
            continue
        spec = read_module(entry.kind, path / entry.path, entry.name, problems, feature="token_embeddings")
        modules += [(entry.name, spec)] if spec is not None else []
    return modules


def _check_widths(modules: list[tuple[str, ModuleSpec]], width: int, problems: Problems) -> None:
    for name, spec in modules:
        if isinstance(spec, DenseSpec):
            if spec.in_features != width:
                problems.append(f"{name}: takes vectors of {spec.in_features}, but is given {width}")
            width = spec.out_features
