"""From the shapes in which data sets are published to the fields of a record. Each shape is named, none is guessed.

shape        what a row looks like
plain        the record's own fields; messages with role and content, content as text or as typed parts
sharegpt     conversations of {from, value} with human, gpt, function_call, observation; tools as JSON text; a
             system message beside them; a turn with train, or with weight or loss of 0, is one with that `train`
transcript   one text of "\\n\\nHuman: " and "\\n\\nAssistant: " (HH-RLHF); what a pair has in common is its prompt
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.samples import RECORDS, Kind

Shape = Literal["plain", "sharegpt", "transcript"]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "function_call": "assistant",
}
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_REASONING = ("reasoning_content", "thinking")
_WEIGHTS = ("weight", "loss")  # of a turn, as other libraries name it


def fields_of(
    row: Mapping[str, Any],
    kind: Kind,
    *,
    shape: Shape = "plain",
    columns: Mapping[str, str] | None = None,
    where: str = "the row",
) -> dict[str, Any]:
    """The fields of a record, as `samples.parse` takes them; other columns of the row are left out.

    Args:
        columns: field → column of the file, where the names differ.

    Raises:
        SampleRefused: a column that the row lacks, or a shape that the row does not have.
    """
    named = dict(columns or {})
    if lacking := [column for column in named.values() if column not in row]:
        raise SampleRefused(
            f"{where}: there is no column {lacking[0]!r}.",
            read_from=f"a row with {', '.join(sorted(row)) or 'nothing'}",
            remedy="correct columns",
        )
    unknown = sorted(set(named) - set(RECORDS[kind].model_fields))
    if unknown:
        raise SampleRefused(
            f"columns: {kind} has no field {unknown[0]!r}.", remedy=f"one of {', '.join(RECORDS[kind].model_fields)}"
        )
    source = {field: row[column] for field, column in named.items()}
    source |= {name: value for name, value in row.items() if name not in source and name not in named.values()}
    if shape == "sharegpt":
        source = _sharegpt(source, kind)
    elif shape == "transcript":
        source = _transcript(source, kind, where)
    made = {name: source[name] for name in RECORDS[kind].model_fields if name in source}
    for name in ("messages", "prompt", "chosen", "rejected"):
        if name in made:
            made[name] = _messages(made[name], name, kind)
    if "tools" in made:
        made["tools"] = _tools(made["tools"])
    return made


def _messages(value: Any, field: str, kind: Kind) -> Any:
    """Messages in our fields; a text becomes the one message it can be."""
    if kind in {"completion", "text"}:
        return value
    if isinstance(value, str):
        return [{"role": "user" if field == "prompt" else "assistant", "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        return value
    return [_message(one) if isinstance(one, Mapping) else one for one in value]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    for name in _REASONING:
        if name in made:
            made["reasoning"] = made.pop(name)
    made["role"] = _ROLES.get(made.get("role", ""), made.get("role"))
    content = made.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = {"text": [], "reasoning": [], "tool_call": []}  # type: dict[str, list[str]]
        for part in content:
            if part.get("type") not in texts:
                return made  # for the record to refuse by name
            texts[str(part["type"])].append(str(part.get("text", part.get("value", ""))))
        made["content"] = "".join(texts["text"])
        if texts["reasoning"]:
            made["reasoning"] = "".join(texts["reasoning"])
        if texts["tool_call"]:
            made["tool_calls"] = [json.loads(call) for call in texts["tool_call"]]
    return made


def _sharegpt(row: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    made = dict(row)
    turns = made.pop("conversations", None)
    if turns is not None:
        told = [_turn(turn) for turn in turns]
        if system := made.pop("system", None):
            if told and told[0]["role"] == "system":
                raise SampleRefused("system and a first turn from 'system': two of them.", remedy="leave one out")
            told.insert(0, {"role": "system", "content": system})
        made["prompt" if kind in {"preference", "prompt"} else "messages"] = told
    for name in ("chosen", "rejected"):
        if isinstance(made.get(name), Mapping):
            made[name] = [_turn(made[name])]
    return made


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker, value = turn.get("from", ""), turn.get("value", "")
    role = _ROLES.get(speaker, speaker)
    marks = {"train": turn["train"]} if turn.get("train") is not None else {}
    for name in _WEIGHTS:
        weight = turn.get(name)
        if weight not in (None, 0, 1):
            raise SampleRefused(f"a turn has {name} = {weight!r}.", remedy="0 or 1: a turn is trained or it is not")
        if weight == 0 and role == "assistant":
            marks["train"] = False
    if speaker == "function_call":
        calls = json.loads(value)
        return {"role": role, "tool_calls": calls if isinstance(calls, list) else [calls], **marks}
    return {"role": role, "content": value, **marks}


def _transcript(row: Mapping[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    made = dict(row)
    if kind != "preference":
        for name in ("messages", "prompt"):
            if isinstance(made.get(name), str):
                made[name] = _spoken(made[name], where)
        return made
    chosen, rejected = _spoken(str(row.get("chosen", "")), where), _spoken(str(row.get("rejected", "")), where)
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    while same and chosen[same - 1]["role"] == "assistant":  # a continuation begins with the assistant
        same -= 1
    return made | {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _spoken(text: str, where: str) -> list[dict[str, str]]:
    """The messages of a transcript."""
    parts = _SPEAKER.split(text)
    if parts[0].strip() or len(parts) < 3:
        raise SampleRefused(f"{where}: a transcript that begins with {text[:40]!r}.", remedy="choose another shape")
    spoken = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": "user" if who == "Human" else "assistant", "content": said} for who, said in spoken]


def _tools(value: Any) -> Any:
    """Tools as templates take them; JSON text is read, bare functions are wrapped, no tools are None."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else []
    if not value:
        return None
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
