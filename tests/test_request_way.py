"""A request's way, from the HTTP handler to the forward pass: one real request is traced, with default settings.

On the way is every function of Kedge that is given the request, in whichever form it has there, and every function that
calls one of these. What a form says of itself, its own methods and properties, is a reading of it and no step.
"""

import sys
import threading
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kedge
from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import RequestSequence, Work
from kedge.server.openai.generation import Generation
from kedge.server.openai.protocol import ChatBody
from kedge.types import GenerateRequest
from tests.server.conftest import serving

MOST_FUNCTIONS, MOST_FILES = 40, 18
"""May only fall."""
FORMS = (ChatBody, Generation, GenerateRequest, RequestSequence, Work, Batch)
"""What the request is on its way, in this order"""
BEGIN, END = "chat_completions", unwrap(ModelRunner.forward).__code__
PACKAGE = str(Path(kedge.__path__[0]))

Place = tuple[str, str]
"""A file of the package, and a function in it"""


class Trace:
    """The functions on the way of the first chat, in the order in which they are first called."""

    def __init__(self) -> None:
        self.way: dict[Place, None] = {}
        self.has_begun = self.has_ended = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self.has_ended or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self.has_begun = self.has_begun or frame.f_code.co_name == BEGIN
        if self.has_begun and is_given(frame):
            self.way |= dict.fromkeys(reversed(list(callers(frame))))
        self.has_ended = self.has_begun and frame.f_code is END


def is_given(frame: FrameType) -> bool:
    """Return whether a function is called with the request, other than as its own method."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(is_form(frame.f_locals[name]) for name in names if name in frame.f_locals and name != "self")


def is_form(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, FORMS)


def callers(frame: FrameType | None) -> Iterator[Place]:
    """Yield a function and its callers, up to the handler. What is defined in a function is a part of it."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            yield code.co_filename[len(PACKAGE) + 1 :], code.co_qualname.partition(".<locals>")[0]
        frame = None if code.co_name == BEGIN else frame.f_back


@pytest.fixture(scope="module")
def way() -> list[Place]:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        with LocalEngine() as engine, serving(engine) as served:
            chat = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2}
            assert served.http().post("/v1/chat/completions", json=chat).status_code == 200
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert trace.has_ended
    return list(trace.way)


def test_a_requests_way_is_short(way: list[Place]) -> None:
    files = {file for file, _ in way}
    shown = "\n".join(f"{file} {name}" for file, name in way)
    print(f"{len(way)} functions in {len(files)} files:\n{shown}")
    assert len(way) <= MOST_FUNCTIONS, shown
    assert len(files) <= MOST_FILES, shown
