"""Read a trained sentence-transformers checkpoint from a folder or the hub, and validate all of it.

`read_checkpoint` understands the layouts of all versions of sentence-transformers and lists every
problem at once. Anything it does not understand that could change the vectors is an error; nothing
is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.adapter import Adapter, read_adapter
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.hub import locate, shown, weight_files
from sbert_infer.export.checkpoint.modules import (
    SUPPORTED,
    ModuleSpec,
    PoolingSpec,
    Problems,
    WeightedLayerPoolingSpec,
    check_chain,
    read_module,
)
from sbert_infer.export.checkpoint.modules_json import FIRST, Entry, has_sparse_module, read_entries
from sbert_infer.export.checkpoint.settings import (
    ModelSettings,
    TransformerSettings,
    read_model_settings,
    read_transformer_settings,
)
from sbert_infer.export.checkpoint.sparse_modules import (
    SPARSE_MODULES,
    active_dims,
    check_last,
    read_sparse_module,
)
from sbert_infer.export.checkpoint.static import SPARSE_STATIC, STATIC, read_sparse_static, read_static
from sbert_infer.export.checkpoint.transformer import length_limit, positions, read_config, read_tokenizer


@dataclass(frozen=True)
class _Body:
    """What the first module determines, and the modules after it."""

    model_type: str = ""
    modules: tuple[ModuleSpec, ...] = ()
    max_length: int = 0
    do_lower_case: bool = False
    max_positions: int | None = None
    adapter: Adapter | None = None


def read_checkpoint(
    source: str | Path, *, max_length: int | None = None, route: str | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Read and validate the checkpoint in a local folder or under a hub id.

    `max_length` replaces the checkpoint's own length limit. A configured limit beyond the model's
    table of positions is lowered to the size of the table: longer texts could never have worked.
    `route` selects one route of a model that has several. Raises one `CheckpointError` that lists
    every problem.
    """
    path = locate(str(source), trust_remote_code)
    problems: Problems = []
    entries = read_entries(path, route, problems)
    first = next((entry for entry in entries if entry.kind in FIRST), Entry("Transformer", ""))
    own = (path / "modules.json").is_file()  # else sentence-transformers reads none of its own files either
    settings = path / "config_sentence_transformers.json"
    model = read_model_settings(settings, problems, sparse=has_sparse_module(entries)) if own else ModelSettings()
    if first.kind == "StaticEmbedding":
        body = _read_static(path, first, entries, max_length, problems)
    elif first.kind == "SparseStaticEmbedding":
        body = _read_sparse_static(path, first, entries, max_length, trust_remote_code, problems)
    else:
        body = _read_transformer(path, first, entries, max_length, trust_remote_code, problems)
    if problems:
        raise CheckpointError(str(source), problems)
    return Checkpoint(
        source=str(source),
        path=path,
        transformer_path=path / first.path,
        model_type=body.model_type,
        modules=body.modules,
        max_length=body.max_length,
        max_positions=body.max_positions,
        prompts=model.prompts,
        default_prompt_name=model.default_prompt_name,
        similarity=model.similarity,
        truncate_dim=model.truncate_dim,
        do_lower_case=body.do_lower_case,
        trust_remote_code=trust_remote_code,
        adapter=body.adapter,
        max_active_dims=active_dims(body.modules, model.max_active_dims),
    )


def _read_transformer(
    path: Path, first: Entry, entries: list[Entry], wanted: int | None, trust_remote_code: bool, problems: Problems
) -> _Body:
    folder = path / first.path
    own = (path / "modules.json").is_file()
    before = len(problems)
    adapter = read_adapter(folder, path, trust_remote_code, problems)
    base, root = (adapter.base, adapter.base) if adapter else (folder, path)
    is_readable = len(problems) == before
    config = read_config(base, root, trust_remote_code, problems) if is_readable else None
    task = _task(entries)
    settings = read_transformer_settings(folder, path, problems, task=task) if own else TransformerSettings()
    if task == "fill-mask" and first.kind == "Transformer" and settings.task is None:
        # sentence-transformers would pool the hidden states of such a model, not the word scores.
        problems.append(
            f"{first.name}: SpladePooling needs 'transformer_task': 'fill-mask' in sentence_bert_config.json"
        )
    modules = _read_heads(path, entries, config, settings, problems) if own else _default_modules(config)
    if is_readable:
        weight_files(base, shown(base, root), problems)
    tokenizer = read_tokenizer(folder, path, own, trust_remote_code, problems)
    limit = length_limit(settings.max_length, tokenizer, config, wanted, problems)
    table = None if config is None else positions(config)
    return _Body(getattr(config, "model_type", ""), modules, limit, settings.do_lower_case, table, adapter)


def _task(entries: list[Entry]) -> str:
    """The transformer's task, as the modules after it require."""
    splade = any(entry.kind in ("MLMTransformer", "SpladePooling") for entry in entries)
    return "fill-mask" if splade else "feature-extraction"


def _read_sparse_static(
    path: Path, first: Entry, entries: list[Entry], wanted: int | None, trust_remote_code: bool, problems: Problems
) -> _Body:
    """A table of weights, with no other module."""
    folder = path / first.path
    tokenizer = read_tokenizer(folder, path, True, trust_remote_code, problems)
    spec, limit = read_sparse_static(folder, first.name, tokenizer, problems)
    check_last([(first.name, spec), *_read_modules(path, entries, None, problems)], problems)
    return _Body(SPARSE_STATIC, (spec,), _checked_limit(wanted, limit, problems))


def _read_static(path: Path, first: Entry, entries: list[Entry], wanted: int | None, problems: Problems) -> _Body:
    """The table's mean takes the place of Pooling."""
    width, limit = read_static(path / first.path, first.name, problems)
    mean = (first.name, PoolingSpec(width, ("mean",)))
    before = len(problems)
    modules = [mean, *_read_modules(path, entries, None, problems)]
    if len(problems) == before:
        check_chain(modules, width, 0, problems)
        check_last(modules, problems)
    return _Body(STATIC, tuple(spec for _, spec in modules), _checked_limit(wanted, limit, problems))


def _checked_limit(wanted: int | None, limit: int, problems: Problems) -> int:
    """The user's limit, which may not exceed the model's."""
    if wanted is not None and wanted > limit:
        problems.append(f"max length {wanted} is more than the {limit} tokens that the model allows")
    return wanted or limit


def _read_modules(
    path: Path, entries: list[Entry], vocabulary: int | None, problems: Problems
) -> list[tuple[str, ModuleSpec]]:
    """The modules after the first, with their names.

    `vocabulary` is the number of words that a language model scores.
    """
    named: list[tuple[str, ModuleSpec | None]] = []
    for entry in entries:
        folder = path / entry.path
        if entry.kind in SPARSE_MODULES:
            named.append((entry.name, read_sparse_module(entry.kind, folder, entry.name, vocabulary, problems)))
        elif entry.kind in SUPPORTED:
            named.append((entry.name, read_module(entry.kind, folder, entry.name, problems)))
    return [(name, spec) for name, spec in named if spec is not None]


def _read_heads(
    path: Path, entries: list[Entry], config: Any, settings: TransformerSettings, problems: Problems
) -> tuple[ModuleSpec, ...]:
    """The modules after the transformer, checked one by one and as a chain."""
    before = len(problems)
    scores = _task(entries) == "fill-mask"
    modules = _read_modules(path, entries, getattr(config, "vocab_size", None), problems)
    if config is None:
        return ()
    weighted = any(isinstance(spec, WeightedLayerPoolingSpec) for _, spec in modules)
    if weighted and not (getattr(config, "output_hidden_states", False) or settings.output_hidden_states):
        # sentence-transformers then skips the module silently, so it does not compute what was
        # trained.
        problems.append(
            "WeightedLayerPooling needs 'output_hidden_states': true in config.json; without it "
            "sentence-transformers leaves the module out. Set it, or take the module out of modules.json"
        )
    if len(problems) == before:  # an unreadable module would only break the chain again
        check_chain(modules, config.vocab_size if scores else config.hidden_size, config.num_hidden_layers, problems)
        check_last(modules, problems)
    return tuple(spec for _, spec in modules)


def _default_modules(config: Any) -> tuple[ModuleSpec, ...]:
    """What sentence-transformers adds to a plain transformer: mean, or last-token if causal."""
    if config is None:
        return ()
    architecture = (getattr(config, "architectures", None) or [""])[0]
    causal = architecture.endswith("ForCausalLM") and getattr(config, "is_causal", True)
    return (PoolingSpec(config.hidden_size, ("lasttoken",) if causal else ("mean",)),)
