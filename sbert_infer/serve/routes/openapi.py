"""The description at /openapi.json, made from the operations and types that serve the requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from sbert_infer import __version__
from sbert_infer.serve.http.auth import OPEN_PATHS
from sbert_infer.serve.http.operation import Operation
from sbert_infer.serve.wire.problems import error_body, status_of
from sbert_infer.types import BULK, INTERACTIVE

Values = Mapping[str, Mapping[str, Any]]

_REF = "#/components/schemas/{name}"
_RETRY = {
    "retry-after": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}},
    "retry-after-ms": {"description": "The same, in milliseconds.", "schema": {"type": "integer", "minimum": 1}},
}
_PRIORITY = {
    "name": "X-Priority",
    "in": "header",
    "description": "Interactive requests go before bulk ones. Without it, a text alone and few short ones are.",
    "schema": {"type": "string", "enum": [INTERACTIVE, BULK]},
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "basic": {"type": "http", "scheme": "basic"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}


def describe(operations: Sequence[Operation], values: Values, *, with_keys: bool) -> dict[str, Any]:
    """Make an OpenAPI 3.1 description.

    `values` are schemas by field name that narrow the fields of requests to what the models allow.
    """
    types = [kind for operation in operations for kind in (*_gives(operation), *operation.takes)]
    errors = [error_body(operation.path) for operation in operations]
    schemas, components = msgspec.json.schema_components([*types, *errors], ref_template=_REF)
    for schema in components.values():
        for name, field in schema.get("properties", {}).items():
            field.update(values.get(name, {}) if schema["title"].endswith(("Request", "Options")) else {})
    by_type = dict(zip(map(repr, types), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        described = _describe_one(operation, by_type, with_keys)
        parameters = [_PRIORITY] if operation.runs_model else []
        parameters += [_name_parameter(values)] if "{" in path else []
        if parameters:
            described["parameters"] = parameters
        paths.setdefault(path, {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sbert-serve",
            "version": __version__,
            "description": "Sentence embeddings and reranking, for clients of OpenAI, text-embeddings-inference, "
            "Cohere, Jina, NIM, Voyage, vLLM and Ollama.",
        },
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": _SCHEMES} if with_keys else {})},
    }


def _describe_one(operation: Operation, by_type: dict[str, Any], with_keys: bool) -> dict[str, Any]:
    is_open = operation.path in OPEN_PATHS
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _responses(operation, by_type, with_keys and not is_open),
    }
    if operation.note:
        described["description"] = operation.note
    if with_keys and not is_open:
        described["security"] = [{scheme: []} for scheme in _SCHEMES]
    if operation.takes:
        content: dict[str, Any] = {"schema": _any_of([by_type[repr(kind)] for kind in operation.takes])}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _name_parameter(values: Values) -> dict[str, Any]:
    """The name of a model, in a path."""
    names = values.get("model", {}).get("enum", [])
    schema = {"type": "string", "minLength": 1}
    return {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": schema,
        **({"example": names[0]} if names else {}),
    }


def _responses(operation: Operation, by_type: dict[str, Any], with_keys: bool) -> dict[str, Any]:
    schema = _any_of([by_type[repr(kind)] for kind in _gives(operation)] or [{"type": "string"}])
    responses = {"200": {"description": "OK", "content": {operation.media_type.split(";")[0]: {"schema": schema}}}}
    codes = [*operation.problems, *(["invalid_api_key"] if with_keys else []), "internal_error"]
    for status, group in _by_status(codes, operation.path).items():
        reference = {"$ref": _REF.format(name=error_body(operation.path).__name__)}
        responses[str(status)] = {
            "description": f"{HTTPStatus(status).phrase}: {', '.join(group)}",
            "content": {"application/json": {"schema": reference}},
            **({"headers": _RETRY} if status in (429, 503) else {}),
        }
    return responses


def _gives(operation: Operation) -> tuple[Any, ...]:
    """The types of its JSON."""
    if isinstance(operation.response, tuple):
        return operation.response
    return () if operation.response is None else (operation.response,)


def _any_of(schemas: Sequence[Any]) -> dict[str, Any]:
    only: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return only


def _by_status(codes: Iterable[str], path: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for code in dict.fromkeys(codes):
        found.setdefault(status_of(code, path), []).append(code)
    return dict(sorted(found.items()))


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"[a-z0-9]+", operation.path.lower().replace(":path", ""))
    return "_".join([operation.method.lower(), *(words or ["root"])])
