"""How a multi-vector encoder treats queries and documents, from its settings and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from sbert_infer.encode.multi_vector import NO_ROLE, Role
from sbert_infer.export.checkpoint.modules import ModuleSpec, Problems
from sbert_infer.export.checkpoint.transformer import length_limit
from sbert_infer.similarity import MULTI_SIMILARITIES

_STRATEGIES = ("fixed", "min")  # the length is that of all queries, or their minimum


@dataclass(frozen=True)
class RoleSettings:
    """The settings as the checkpoint has them."""

    query_length: Any
    document_length: Any
    query_expansion: Any
    skip_words: tuple[str, ...]
    skip_tasks: tuple[str, ...]


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the whole model, in any layout."""

    prompts: dict[str, str]
    modules: list[tuple[str, ModuleSpec]]
    by_role: RoleSettings
    prefixes: tuple[str, ...]
    default_prompt_name: str | None = None
    similarity: str = MULTI_SIMILARITIES[0]


def mark_prefixes(tokenizer: Any, prefixes: Sequence[str]) -> None:
    """Make each prefix of the vocabulary one token, as in training, even if it would be split."""
    known = {*tokenizer.get_vocab(), *tokenizer.added_tokens_encoder}
    marks = []
    for prefix in prefixes:
        mark = next((part for part in (prefix, *prefix.split()[:1]) if part in known), None)
        if mark is not None and tokenizer.tokenize(mark) != [mark]:
            marks.append(AddedToken(mark, normalized=False, special=True))
    if marks:
        tokenizer.add_tokens(marks, special_tokens=True)


def read_roles(
    settings: RoleSettings,
    saved_length: int | None,
    tokenizer: Any,
    config: Any,
    wanted: int | None,
    problems: Problems,
) -> dict[str, Role]:
    """The roles by task. `wanted` replaces all limits but one set for queries."""

    def limit(length: int | None, own: int | None = None) -> int:
        return length_limit(length or saved_length, tokenizer, config, own, problems)

    for key in ("query_length", "document_length"):
        value = getattr(settings, key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            problems.append(f"'{key}' must be a positive integer, not {value!r}")
            return {}
    expansion = _read_expansion(settings.query_expansion, tokenizer, problems)
    length = expansion.get("expand_to")
    query = limit(settings.query_length, None if settings.query_length else wanted)
    if length is not None:
        query = length if settings.query_expansion["strategy"] == "fixed" else max(query, length)
        if (most := limit(query)) < query:
            problems.append(f"'query_expansion' asks for {query} tokens, but the model allows {most}")
    skip = _skip_ids(settings.skip_words, tokenizer)
    kept = {task: skip if task in settings.skip_tasks else () for task in ("query", "document")}
    problems += [
        f"'skiplist_tasks' names {task!r}; only query and document are known"
        for task in {*settings.skip_tasks} - {*kept}
    ]
    return {
        "query": Role(query, kept["query"], **expansion),
        "document": Role(limit(settings.document_length, wanted), kept["document"]),
        NO_ROLE: Role(limit(None, wanted), kept["document"]),
    }


def _read_expansion(expansion: Any, tokenizer: Any, problems: Problems) -> dict[str, Any]:
    """The arguments of a `Role` that describe the expansion of its texts."""
    if expansion is None:
        return {}
    known = {"strategy", "attend", "token", "length"}
    if not isinstance(expansion, dict) or set(expansion) - known or expansion.get("strategy") not in _STRATEGIES:
        problems.append(
            f"'query_expansion' is {expansion!r}; known are {', '.join(sorted(known))}, with a fixed or min strategy"
        )
        return {}
    length, attend, token = expansion.get("length"), expansion.get("attend", False), expansion.get("token")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1 or not isinstance(attend, bool):
        problems.append(f"'query_expansion' needs a positive 'length', and 'attend' to be true or false: {expansion!r}")
        return {}
    id = tokenizer.convert_tokens_to_ids(token) if token is not None else tokenizer.mask_token_id
    id = tokenizer.eos_token_id if id is None and token is None else id  # for decoders, as in sentence-transformers
    if id is None or (token not in (None, tokenizer.unk_token) and id == tokenizer.unk_token_id):
        problems.append(f"'query_expansion' fills up with {token or '[MASK]'}, which the tokenizer does not know")
        return {}
    if tokenizer.padding_side != "right":
        problems.append("'query_expansion' with padding on the left is not supported")
    return {"expand_to": length, "expansion_id": id, "attend_to_expansion": attend}


def _skip_ids(words: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of those `words` that are tokens; others never occur."""
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    return tuple(
        sorted({id for word, id in ids.items() if id is not None and (id != unknown or word == tokenizer.unk_token)})
    )
