"""A Python function as a tool, in the process that runs it: its description, and calls by named arguments.

Nothing is imported here but the standard library.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def calling(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function as what a process of its own calls: null gives the description, an object the result of that call."""

    def call(arguments: Any) -> Any:
        if arguments is None:
            return described(function)
        result = function(**arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    return call


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """What a chat template shows of a function: its name, the first paragraph of its docstring, its arguments.

    Types are those of the annotations where JSON has them; an argument without a default is required.

    Raises:
        TypeError: arguments that have no names.
    """
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"argument {name} of a tool has no name to call it by")
        properties[name] = _schema(hints.get(name, str))
        if parameter.default is parameter.empty:
            required.append(name)
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": (inspect.getdoc(function) or function.__name__).split("\n\n")[0].replace("\n", " "),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _schema(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        named = [one for one in arguments if one is not type(None)]
        return _schema(named[0]) if len(named) == 1 else {}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    found: dict[str, Any] = {"type": _TYPES[origin]} if origin in _TYPES else {}
    if origin is list and arguments:
        found["items"] = _schema(arguments[0])
    return found
