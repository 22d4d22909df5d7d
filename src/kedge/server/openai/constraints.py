"""Structured output: the grammar of an answer from `response_format` and `tool_choice`.

Every tool's arguments are a rule of their own, so that references within its schema (`#/$defs/…`) hold. JSON is written
in one line: where white space is free, a model may write nothing else until it runs out of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kedge.errors import RequestError
from kedge.server.openai.messages import Function
from kedge.server.openai.protocol import ChatBody
from kedge.server.openai.tool_calls import Hermes
from kedge.settings.server import ToolCallFormat

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options: white space is at most one blank after a comma or colon"""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class _Wording(NamedTuple):
    """How calls are written in a format that the server reads."""

    open: str
    arguments: str
    """Name of the field with the arguments"""
    close: str
    between: str


WORDINGS: Mapping[ToolCallFormat, _Wording] = {
    "hermes": _Wording(f"{Hermes.OPEN}\n", "arguments", f"\n{Hermes.CLOSE}", "\n"),
    "llama3_json": _Wording("", "parameters", "", "; "),
}


def grammar_of(body: ChatBody, form: ToolCallFormat | None) -> str:
    """Return the grammar that a chat's answer conforms to; "" where it is free.

    `form` is how the model writes tool calls. Raises `RequestError` for a format or a choice that cannot be followed.
    """
    schema = _schema(body)
    if schema is None and not body.must_call:
        return ""
    several = body.parallel_tool_calls is not False
    calls = _calls(_callable(body), WORDINGS[form], several=several) if form else []
    if schema is None or body.must_call:
        return "\n".join(["start: calls", *calls])
    start = "start: content | calls" if calls else "start: content"
    return "\n".join([start, f"content: {_json(schema)}", *calls])


def _callable(body: ChatBody) -> Sequence[Function]:
    """Return the functions that the answer may call."""
    functions = [tool.function for tool in body.tools_to_use]
    return [one for one in functions if body.called in (None, one.name)]


def _calls(functions: Sequence[Function], wording: _Wording, *, several: bool) -> list[str]:
    """Return the rules of one call, or of `several`, of any of these functions; none without functions."""
    if not functions:
        return []
    between = f"({_text(wording.between)} call)*" if several else ""
    names = " | ".join(f"call_{at}" for at in range(len(functions)))
    rules = [f"calls: call {between}", f"call: {names}"]
    for at, function in enumerate(functions):
        begin = f'{wording.open}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{wording.arguments}": '
        rules.append(f"call_{at}: {_text(begin)} arguments_{at} {_text('}' + wording.close)}")
        rules.append(f"arguments_{at}: {_json(function.parameters or ANY_OBJECT)}")
    return rules


def _schema(body: ChatBody) -> Mapping[str, Any] | None:
    """Return the schema of the answer's text, None where it is free."""
    if body.response_format is None or body.response_format.type == "text":
        return None
    if body.response_format.type == "json_object":
        return ANY_OBJECT
    key, given = "response_format.json_schema", body.response_format.json_schema
    if given is None:
        raise RequestError(key, given, "must be an object with a `schema`")
    if not isinstance(given.get("schema"), dict):
        raise RequestError(f"{key}.schema", given.get("schema"), "must be a JSON schema (an object)")
    schema: Mapping[str, Any] = given["schema"]
    return schema


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": ONE_LINE}, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
