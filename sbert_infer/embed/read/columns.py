"""Columns that are carried along: one type for each, whatever the rows hold."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from sbert_infer.errors import EmbedError


def array_of(values: Sequence[object]) -> pa.Array:
    """Make an array of `values`.

    Objects, and values without a common type, become JSON text; the array's type says so.
    """
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return _json_array(values)
    return _json_array(values) if _has_objects(array.type) else array


def common_schema(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """All columns of all schemas, each with a type that holds every value: JSON text if need be."""
    types: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            types[field.name] = _common_type(types.get(field.name, field.type), field.type)
    return pa.schema(list(types.items()))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give `table` the columns of `schema`; those it lacks are null."""
    names = set(table.schema.names)
    columns = [
        _convert(table[field.name], field.type) if field.name in names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """Stack tables with different columns or types."""
    if not tables:
        return pa.table({})
    schema = common_schema(table.schema for table in tables)
    return pa.concat_tables([conform(table, schema) for table in tables]).combine_chunks()


def to_json(value: object) -> str:
    """Write a value of any column as JSON.

    Bytes become base64, dates ISO 8601, NaN null, and other types that JSON lacks text.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(value), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _without_nan(value: Any) -> object:
    """Replace NaN and infinity, which JSON lacks, by null, as pandas does."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json_array(values: Iterable[object]) -> pa.Array:
    texts = pa.array([None if value is None else to_json(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


def _has_objects(type: pa.DataType) -> bool:
    return pa.types.is_struct(type) or (pa.types.is_list(type) and _has_objects(type.value_type))


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one.equals(other):
        return one
    if pa.json_() in (one, other) and not (pa.types.is_null(one) or pa.types.is_null(other)):
        return pa.json_()
    schemas = [pa.schema([("", type)]) for type in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.json_()


def _convert(column: pa.ChunkedArray, type: pa.DataType) -> pa.ChunkedArray:
    if column.type.equals(type):
        return column
    if type.equals(pa.json_()):
        return pa.chunked_array([_json_array(column.to_pylist())], type)
    if pa.types.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), type)], type)
    try:
        return column.cast(type)  # whole numbers beside fractions become fractions
    except pa.ArrowInvalid as error:
        raise EmbedError(f"a carried column holds numbers that don't fit together: {error}; see --columns") from error
