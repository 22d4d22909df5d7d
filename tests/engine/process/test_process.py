"""What only an engine in its own process can do wrong: lose it, its errors, or what crosses the border."""

import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.engine.base import Engine, Item
from kedge.engine.echo import EchoEngine
from kedge.engine.local.engine import LocalEngine
from kedge.engine.process.engine import ProcessEngine
from kedge.engine.process.messages import portable
from kedge.errors import ConfigError, EngineClosed, ForwardFailed, ModelNotFound, Overloaded, RequestError, WrongThread
from kedge.settings import EngineSettings, QuotaSettings
from kedge.types import FinishReason, GenerateRequest, Namespace, ReuseMode, RunKey, SamplingParams, is_owned
from tests.engine.conformance import EngineConformance, fresh_text
from tests.engine.local.conftest import tiny_engine

SUITE = EngineConformance()
SECONDS = 30.0


@pytest.fixture(scope="module")
def local() -> Iterator[ProcessEngine]:
    with ProcessEngine(tiny_engine) as engine:
        yield engine


@pytest.fixture
def echo() -> Iterator[ProcessEngine]:
    with ProcessEngine(partial(EchoEngine, delay_s=1e-3)) as engine:
        yield engine


def long(engine: ProcessEngine) -> GenerateRequest:
    return SUITE.request(engine, fresh_text("death"), max_tokens=5000)


RUN = RunKey(Namespace("t"), "", "run")


def closed(call: Callable[[], object]) -> EngineClosed:
    with pytest.raises(EngineClosed) as caught:
        call()
    return caught.value


class FailsLater(EchoEngine):
    """Fails when a run ends."""

    def end_run(self, *_: object) -> None:
        self.fail(RuntimeError("lost"))


def dies_at_once() -> EchoEngine:
    os._exit(3)


# its end ----------------------------------------------------------------------------------------------------------


def test_a_killed_process_ends_every_stream_and_caller_with_a_typed_error(echo: ProcessEngine) -> None:
    read, heard = echo.submit(long(echo)), echo.submit(long(echo))
    items: list[Item] = []
    heard.listen(items.append)
    next(iter(read))
    assert echo.failure is None
    os.kill(echo.pid, signal.SIGKILL)
    assert "ended by itself with code -9" in str(closed(lambda: read.result(SECONDS)))
    assert isinstance(echo.failure, EngineClosed)
    closed(lambda: echo.submit(long(echo)))
    closed(lambda: echo.cancel(read.request_id))
    echo.end_run(RUN)
    echo.forecast({})
    assert isinstance(items[-1], EngineClosed)
    echo.close()


def test_who_waits_for_a_killed_process_is_released() -> None:
    with ProcessEngine(tiny_engine) as engine, ThreadPoolExecutor(1) as pool:
        engine.submit(SUITE.request(engine, fresh_text("work"), max_tokens=900))
        waiting = pool.submit(engine.wait_idle)
        engine.inspect()
        os.kill(engine.pid, signal.SIGKILL)
        assert isinstance(waiting.exception(SECONDS), EngineClosed)


def test_an_engine_that_fails_ends_its_process() -> None:
    with ProcessEngine(FailsLater) as engine:
        engine.end_run(RUN)
        engine._reader.join(SECONDS)
        assert "after RuntimeError('lost')" in str(engine.failure)
        assert engine._process.returncode == 1


def test_closing_is_no_failure_and_ends_the_process(echo: ProcessEngine) -> None:
    stream = echo.submit(long(echo))
    next(iter(stream))
    echo.close()
    assert stream.result(SECONDS).finish_reason is FinishReason.CANCELLED
    assert echo.failure is None
    assert echo._process.returncode == 0
    assert "was closed" in str(closed(lambda: echo.cancel("x")))


def test_signals_to_the_group_leave_the_process_to_its_program(echo: ProcessEngine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(echo.pid, number)
    SUITE.serves(echo)


@pytest.mark.parametrize("make", [tiny_engine, partial(ProcessEngine, tiny_engine)], ids=["local", "process"])
def test_a_fork_gets_an_error(make: Callable[[], Engine]) -> None:
    reads, writes = os.pipe()
    with make() as engine:
        request = SUITE.request(engine, "hello", max_tokens=3)
        if not os.fork():
            signal.alarm(10)
            for call in (lambda: engine.submit(request), engine.inspect):
                os.write(writes, str(closed(call)).encode())
            engine.forecast({})
            engine.close()
            os._exit(0)
        os.close(writes)
        assert os.wait()[1] == 0 and os.read(reads, 1000).count(b"fork") == 2
        assert engine.submit(request).result(SECONDS).tokens


# its start --------------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_made_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="config.json") as caught:
        ProcessEngine(partial(LocalEngine, tmp_path, EngineSettings()))
    assert caught.value.key == "model"


def test_a_process_that_dies_before_it_is_ready_is_told() -> None:
    with pytest.raises(EngineClosed, match="code 3 before it was ready"):
        ProcessEngine(dies_at_once)


class SlowToRead(EchoEngine):
    """An engine that reads grammars once a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__(delay_s=1e-3)
        self._file = file

    def submit(self, request: GenerateRequest) -> Any:
        while request.sampling.grammar and not self._file.exists():
            time.sleep(1e-3)
        return super().submit(replace(request, sampling=replace(request.sampling, grammar="")))


def test_grammars_of_a_tenant_hold_up_no_others(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with ProcessEngine(partial(SlowToRead, file)) as engine, ThreadPoolExecutor(96) as pool:
        plain = SUITE.request(engine, "hello", max_tokens=3)
        read = replace(plain, sampling=replace(plain.sampling, grammar='start: "x"'), tenant="a")
        waiting = [
            pool.submit(lambda one=one: engine.submit(one).result(SECONDS))
            for one in (replace(read, request_id=f"read-{at}") for at in range(80))
        ]
        refused, _ = wait(waiting, SECONDS, return_when=FIRST_COMPLETED)
        assert {type(one.exception()) for one in refused} == {Overloaded}, "what waits is bounded"
        assert engine.submit(plain).result(SECONDS).tokens
        other = pool.submit(lambda: engine.submit(replace(read, tenant="b")).result(SECONDS))
        file.touch()
        assert other.result(SECONDS).tokens
        assert [one.exception(SECONDS) for one in waiting].count(None) == 65


def test_what_only_looks_like_a_request_is_refused_and_the_engine_goes_on(local: ProcessEngine) -> None:
    plain = SUITE.request(local, "hello", max_tokens=3)
    for odd in (SimpleNamespace(sampling=SamplingParams(grammar='start: "x"')), replace(plain, sampling=None), None):
        with pytest.raises(RequestError):
            local.submit(odd)  # type: ignore[arg-type]
    assert local.submit(plain).result(SECONDS).tokens


def test_what_cannot_be_sent_is_refused_and_the_engine_goes_on(echo: ProcessEngine) -> None:
    with pytest.raises(RequestError, match="cannot be sent"):
        ProcessEngine(lambda: EchoEngine())
    with pytest.raises(RequestError, match="cannot be sent"):
        echo.submit(replace(SUITE.request(echo, fresh_text("x")), agent=lambda: None))
    with pytest.raises(RequestError, match="cannot be sent"):
        echo.inspect_tenants(lambda _: True, [])
    SUITE.serves(echo)


class Unreadable(str):
    """Raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_what_the_process_cannot_read_is_refused_and_the_engine_goes_on(echo: ProcessEngine) -> None:
    stream, name = echo.submit(long(echo)), Unreadable()
    for call in (lambda: echo.submit(replace(long(echo), agent=name)), lambda: echo.limit(name, QuotaSettings())):
        with pytest.raises(RequestError, match="cannot be read in the engine's process"):
            call()
    echo.end_run(RUN._replace(run_id=name))
    assert echo.cancel(stream.request_id) and stream.result(SECONDS).finish_reason is FinishReason.CANCELLED


class Waits(EchoEngine):
    """Is busy until something is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self._cancelled = threading.Event()

    def wait_idle(self, timeout: float = SECONDS) -> None:
        assert self._cancelled.wait(timeout)

    def cancel(self, _: str) -> bool:
        self._cancelled.set()
        return True


def test_who_waits_for_the_engine_holds_up_no_others() -> None:
    with ProcessEngine(Waits) as engine, ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(engine.wait_idle, SECONDS) for _ in range(40)]
        while len(engine._pending) < len(waiting):
            time.sleep(1e-3)
        assert engine.cancel("x")
        assert [one.exception(SECONDS) for one in waiting] == [None] * len(waiting)


def test_what_listens_cannot_wait_for_what_it_would_read(echo: ProcessEngine) -> None:
    refused: queue.SimpleQueue[object] = queue.SimpleQueue()

    def hear(_: Item) -> None:
        if threading.current_thread() is echo._reader:  # not for what had come before
            for call in (echo.inspect, echo.close):
                refused.put(pytest.raises(WrongThread, call))

    echo.submit(long(echo)).listen(hear)
    assert all(refused.get(timeout=SECONDS) for _ in range(2))
    SUITE.serves(echo)


# what else crosses ------------------------------------------------------------------------------------------------


def test_figures_quotas_and_state_cross(local: ProcessEngine, tmp_path: Path) -> None:
    asked = SUITE.request(local, fresh_text("state"), reuse=ReuseMode.EXACT, tenant="acme")
    request = replace(asked, partition="part")
    SUITE.run(local, request)
    local.wait_idle()
    local.limit("acme", QuotaSettings(anchor_bytes=3))
    assert local.inspect()["cache"]["cached_blocks"] > 0
    held = local.inspect_tenants(partial(is_owned, "acme"), [(Namespace("acme", "part"), request.tokens)])
    assert held["prompts"][0]["device"] > 0
    assert local.save(tmp_path).nbytes == local.load(tmp_path).nbytes
    local.clear()
    assert local.inspect()["cache"]["cached_blocks"] == 0


def test_a_method_that_the_engine_lacks_is_named(echo: ProcessEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EchoEngine.*no `save`"):
        echo.save(tmp_path)
    with pytest.raises(ConfigError, match="EchoEngine cannot bound"):
        echo.limit("t", QuotaSettings(anchor_bytes=3))


def test_errors_that_cannot_be_pickled_read_the_same() -> None:
    error = ForwardFailed("request_id", threading.Lock(), "the model raised")
    sent = pickle.loads(pickle.dumps(portable(error)))
    assert (type(sent), sent.key, sent.why) == (ForwardFailed, "request_id", error.why) and "lock" in str(sent)
    foreign = pickle.loads(pickle.dumps(portable(ValueError(threading.Lock()))))
    assert isinstance(foreign, RuntimeError) and "ValueError" in str(foreign)
