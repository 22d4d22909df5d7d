"""Calling the tools of agents: in a thread of their own, for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Literal

from kedge.checks import is_unicode
from kedge.errors import ToolError
from kedge.workflow.graph import Agent, Tool
from kedge.workflow.spec import tool_name

OnToolError = Literal["raise", "text"]
"""Whether a failed tool fails the run, or its result is the name of the error's class."""


def tool_result(agent: Agent, answer: str, inputs: Mapping[str, str], on_error: OnToolError) -> str:
    """Return the result of the agent's tool. Raises `ToolError` where it fails and `on_error` is "raise"."""
    try:
        return call_tool(agent, answer, inputs)
    except ToolError as error:
        if on_error == "raise":
            raise
        return type(error.__cause__ or error).__name__


def call_tool(agent: Agent, answer: str, inputs: Mapping[str, str]) -> str:
    """Return the result of the agent's tool. Raises `ToolError` when it raises, takes too long or returns no text.

    A thread cannot be ended from outside: a tool that runs out of time goes on in the background, unheard.
    """
    assert agent.tool is not None
    box: Future[object] = Future()
    threading.Thread(target=_settle, args=(box, agent.tool, answer, inputs), name="kedge-tool", daemon=True).start()
    key, name = f"agent {agent.id}: tool", tool_name(agent.tool)
    try:
        error = box.exception(agent.tool_seconds)
    except TimeoutError as late:
        raise ToolError(key, name, f"ran longer than {agent.tool_seconds} s") from late
    if error is not None:
        raise ToolError(key, name, f"raised {type(error).__name__}: {error}") from error
    return _require_text(key, name, box.result())


def _settle(box: Future[object], tool: Tool, answer: str, inputs: Mapping[str, str]) -> None:
    try:
        box.set_result(tool(answer, inputs))
    except BaseException as error:  # foreign code: whatever it raises, exit included, is the tool's failure
        box.set_exception(error)


def _require_text(key: str, name: str, result: object) -> str:
    if not isinstance(result, str):
        raise ToolError(key, name, f"answered {result!r}, not text")
    if not is_unicode(result):
        raise ToolError(key, name, "answered with half of a surrogate pair")
    return result
