"""Records of tables, whose columns have one type each."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

CALLS = ("tool_calls", "function_call")  # keys of messages, with objects in them that differ in their keys


def drop_added_nulls(record: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """The record, without the nulls in its tool calls.

    A table gives all objects of a column the keys of all of them: {"city": "Rome"} becomes {"city": "Rome", "amount": null} where another
    row has an amount. Such nulls and a user's own can't be told apart; calls that are JSON text keep theirs.
    """
    for field in schema:
        _drop(record.get(field.name), field.type, inside=field.name in CALLS)
    return record


def _drop(value: Any, of: pa.DataType, *, inside: bool) -> None:
    if isinstance(value, dict) and pa.types.is_struct(of):
        for field in of:
            if inside and value.get(field.name) is None:
                value.pop(field.name, None)
            else:
                _drop(value.get(field.name), field.type, inside=inside or field.name in CALLS)
    elif isinstance(value, list) and _is_list(of) and pa.types.is_nested(of.value_type):
        for inner in value:
            _drop(inner, of.value_type, inside=inside)


def _is_list(of: pa.DataType) -> bool:
    return pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of)
