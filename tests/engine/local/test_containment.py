"""Whatever one request does, or happens to it, ends this request with a typed error and nothing else."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from textwrap import dedent
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from kedge.engine.common import logprobs
from kedge.engine.common.stream import TextStream
from kedge.engine.local.attention.paged import Batch
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sessions import SessionCaching
from kedge.errors import EngineClosed, GenerationFailed, KedgeError, WrongThread
from kedge.reuse.runtime import Runtime
from kedge.types import Completion, FinishReason, GenerateRequest, ReuseMode, SampleId, new_request_id
from tests.engine.local.conftest import at_rest, engine_of, tiny_model
from tests.engine.local.stepping import prompt_of
from tests.engine.local.test_translation import tokens as seeded

T = TypeVar("T")
PATIENCE = 20.0
MARK = 200
"""A token that is in a victim's prompt, and in no other."""
VICTIM = "victim"
FAULTS = [RuntimeError("a fault"), torch.OutOfMemoryError("out of memory"), KeyError("a fault"), MemoryError()]
each_fault = pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)


def call(count: int = 8, agent: str = "neighbour", reuse: ReuseMode = ReuseMode.OFF) -> GenerateRequest:
    """An agent's call, whose answer others are going to read. Only the victim's value holds the mark."""
    value = (*range(100, 140), MARK if agent == VICTIM else 5)
    return prompt_of(agent, value, reuse=reuse, produces=f"agent_{agent}@0", max_tokens=count)


def victim(reuse: ReuseMode = ReuseMode.EXACT) -> GenerateRequest:
    return call(agent=VICTIM, reuse=reuse)


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with engine_of(tiny_model("llama")) as built:
        yield built


def within(action: Callable[[], T]) -> T:
    """The result or the error of an action, in a thread that a test does not wait for longer than its patience."""
    ended: list[T | BaseException] = []

    def run() -> None:
        try:
            ended.append(action())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert ended, "it never ended"
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def beside_neighbours(
    engine: LocalEngine, request: GenerateRequest, draw: Callable[[Tensor], Any] | None = None
) -> Completion | KedgeError:
    """How a request ends that is submitted between others, of which none may notice anything."""
    alone = engine.submit(call()).result(PATIENCE).tokens
    before = engine.submit(call(count=30))
    next(iter(before))
    stream = engine.submit(request, draw)
    after = engine.submit(call())
    try:
        ended: Completion | KedgeError = stream.result(PATIENCE)
    except KedgeError as error:
        assert not isinstance(error, EngineClosed), "the whole engine ended"
        ended = error
    assert before.result(PATIENCE).tokens[:8] == after.result(PATIENCE).tokens == alone
    at_rest(engine)
    assert engine.submit(call()).result(PATIENCE).tokens == alone
    return ended


def fails_for(marked: Callable[..., bool], error: BaseException, real: Callable[..., T]) -> Callable[..., T]:
    def fails(*args: Any, **named: Any) -> T:
        if marked(*args):
            raise error
        return real(*args, **named)

    return fails


# the caller's own callbacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [*FAULTS, SystemExit(3)], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("drawn", [0, 3])
def test_a_draw_that_raises_ends_its_request(engine: LocalEngine, drawn: int, error: BaseException) -> None:
    left = iter(range(10, 10 + drawn))

    def draw(_: Tensor) -> int:
        token = next(left, None)
        if token is None:
            raise error
        return token

    ended = beside_neighbours(engine, victim(), draw)
    assert isinstance(ended, GenerationFailed) and repr(error) in str(ended)


@pytest.mark.parametrize(
    "call", [LocalEngine.inspect, LocalEngine.wait_idle, LocalEngine.close, lambda engine: engine.cancel("x")]
)
def test_a_draw_that_waits_for_its_own_thread_gets_an_error(
    engine: LocalEngine, call: Callable[[LocalEngine], object]
) -> None:
    ended = beside_neighbours(engine, victim(), lambda _: call(engine))
    assert isinstance(ended, GenerationFailed) and isinstance(ended.__cause__, WrongThread)


def test_a_closed_engine_is_told_as_closed_also_on_a_thread_with_its_threads_number(engine: LocalEngine) -> None:
    assert engine.failure is None
    engine.close()
    assert engine.failure is None and not engine._thread.number, "another thread may get it"
    with pytest.raises(EngineClosed):
        engine.inspect()


def test_nothing_keeps_the_memory_of_a_closed_engine() -> None:
    with engine_of(tiny_model("llama")) as engine:
        storage = weakref.ref(engine._core.parts.storage)
    del engine
    gc.collect()
    assert storage() is None


def test_a_process_that_exits_without_close_ends_well() -> None:
    code = """
        from tests.engine.local.test_containment import call, engine_of, tiny_model
        engine = engine_of(tiny_model("llama"))
        next(iter(engine.submit(call(count=300))))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_question_that_raises_raises_for_whoever_asked(engine: LocalEngine) -> None:
    def fails(*_: object) -> bool:
        raise ZeroDivisionError("a fault")

    stream = engine.submit(call(count=30))
    engine._thread.post(fails)  # which nobody waits for
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            within(lambda: engine.query(fails))
    assert stream.result(PATIENCE).finish_reason is FinishReason.LENGTH
    at_rest(engine)


# turning tokens into text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"x", 0, 1, "a fault"), FAULTS[1]], ids=repr)
@pytest.mark.parametrize(
    ("where", "name", "marked", "asked"),
    [
        (TextStream, "push", lambda text, _: "vvv" in text.text, {}),
        (TextStream, "flush", lambda text: "vvv" in text.text, {}),
        (logprobs, "token_logprobs", lambda *args: args[2] == 7, {"logprobs": 7}),
        (logprobs, "token_logprobs", lambda *args: args[2] == 7, {"prompt_logprobs": 7}),
    ],
    ids=["text", "its end", "log-probabilities", "those of the prompt"],
)
def test_what_cannot_be_told_of_an_answer_ends_its_request(
    engine: LocalEngine,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    where: Any,
    name: str,
    marked: Any,
    asked: Any,
) -> None:
    monkeypatch.setattr(where, name, fails_for(marked, error, getattr(where, name)))
    ended = beside_neighbours(engine, replace(victim(), **asked), lambda _: ord("v") - 33)
    assert isinstance(ended, KedgeError)


# reuse and learning ---------------------------------------------------------------------------------------------------


def test_a_write_that_raises_ends_its_request(engine: LocalEngine) -> None:
    def brings_none(parts: EngineParts) -> None:
        error = torch.OutOfMemoryError("out of memory")
        parts.write = fails_for(lambda request, *_: request.agent == VICTIM, error, parts.write)

    answer = engine.submit(call(count=40, reuse=ReuseMode.TRANSLATE)).result(PATIENCE).tokens
    asked = victim(ReuseMode.TRANSLATE)
    before, value, behind = asked.segments
    value = replace(value, tokens=answer, sample=SampleId.parse("agent_neighbour@0"))
    asked = replace(asked, segments=(before, value, behind))
    assert engine.submit(asked).result(PATIENCE).receipt.translated
    engine.query(brings_none)
    assert isinstance(beside_neighbours(engine, asked), KedgeError)


@each_fault
@pytest.mark.parametrize("seam", ["plan", "needs", "observe", "keep_response", "wants_harvest"])
def test_trouble_with_reuse_is_the_requests_own(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, seam: str, error: Exception
) -> None:
    """Planning for it, learning from it, keeping what it said: it may end with an error, or do without."""

    def of_victim(_: Runtime, request: GenerateRequest, *__: object) -> bool:
        return request.agent == VICTIM

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, seam, fails_for(of_victim, error, getattr(Runtime, seam)))
        for _ in range(2):
            beside_neighbours(engine, victim(ReuseMode.TRANSLATE))
    done = beside_neighbours(engine, victim(ReuseMode.TRANSLATE))
    assert isinstance(done, Completion) and done.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seams", [["answered"], ["answered", "cancelled"]], ids=len)
def test_trouble_once_its_blocks_are_free_still_ends_its_stream(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, seams: list[str]
) -> None:
    for seam in seams:
        monkeypatch.setattr(SessionCaching, seam, fails_for(lambda *_: True, FAULTS[0], print))
    if "cancelled" not in seams:
        assert isinstance(beside_neighbours(engine, victim()), GenerationFailed)
    with pytest.raises(GenerationFailed):
        engine.submit(victim()).result(PATIENCE)
    at_rest(engine)


@each_fault
def test_a_base_prefill_that_raises_costs_nobody_anything(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It computes the victim's value behind its lead-in, while nobody waits."""

    def is_base(_: ModelRunner, batch: Batch) -> bool:
        tokens: list[int] = batch.tokens.tolist()
        lead = [*seeded(1, 3), 100]
        return MARK in tokens and any(tokens[at : at + 4] == lead for at in range(len(tokens)))

    forward = ModelRunner.forward
    seen: list[Batch] = []

    def failing(runner: ModelRunner, batch: Batch) -> Tensor:
        if is_base(runner, batch):
            seen.append(batch)
            raise error
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    done = beside_neighbours(engine, victim(ReuseMode.TRANSLATE))
    assert isinstance(done, Completion) and done.finish_reason is FinishReason.LENGTH
    assert seen, "no base prefill was tried"


# the engine's own end -------------------------------------------------------------------------------------------------


class Gate:
    """A draw that holds up the engine's thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, logits: Tensor) -> int:
        self.reached.set()
        self.opened.wait(PATIENCE)
        return int(logits.argmax())


def test_a_command_that_raises_in_the_last_drain_keeps_no_stream_from_ending(engine: LocalEngine) -> None:
    gate = Gate()
    streams = [engine.submit(call(count=300)), engine.submit(victim(), draw=gate)]
    assert gate.reached.wait(PATIENCE)
    for _ in range(2):
        engine._thread.post(lambda: 1 / 0)
    late = engine.submit(call())
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    assert engine._thread._closed.wait(PATIENCE)
    gate.opened.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    for stream in (*streams, late):
        assert stream.result(PATIENCE).finish_reason is FinishReason.CANCELLED


class Fatal(BaseException):
    """An end that nothing in the engine may catch and go on."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_with_the_engines_thread_everything_ends(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, callers that wait for an answer, callers that come later."""

    def fails(*_: object) -> bool:
        raise Fatal("the last word")

    gate = Gate()
    streams = [engine.submit(call(count=300)), engine.submit(victim(), draw=gate)]
    assert gate.reached.wait(PATIENCE)
    monkeypatch.setattr(engine._core, "step", fails)
    asked: list[object] = []
    asking = threading.Thread(target=lambda: asked.append(_answer(engine.inspect)), daemon=True)
    asking.start()
    gate.opened.set()
    asking.join(PATIENCE)
    assert asked, "a caller waits for ever"
    for stream in streams:
        with pytest.raises(EngineClosed):
            stream.result(PATIENCE)
    with pytest.raises(EngineClosed):
        engine.submit(replace(call(), request_id=new_request_id()))
    with pytest.raises(EngineClosed):
        within(engine.inspect)
    within(engine.close)
    assert isinstance(engine.failure, Fatal)


def _answer(question: Callable[[], object]) -> object:
    try:
        return question()
    except EngineClosed as error:
        return error
