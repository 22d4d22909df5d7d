"""What a watcher is told of an engine; `tests/server/test_history.py` has that it changes nothing."""

from typing import Any

import pytest

from kedge.engine.common.watched import WatchedEngine, Watcher
from kedge.engine.echo import EchoEngine
from kedge.errors import RequestError
from kedge.types import AgentKey, Completion, GenerateRequest, Namespace, RequestId, SamplingParams, Segment, TenantId
from kedge.workflow.forecast import Changes
from kedge.workflow.steps import NextRun

ACME = "acme"
KEY = AgentKey(Namespace(ACME), "", "run", "agent")


class Notebook(Watcher):
    """A watcher that writes everything down."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def submitted(self, request: GenerateRequest) -> None:
        self.notes.append(("submitted", request.request_id))

    def begun(self, tenant: TenantId, request_id: RequestId) -> None:
        self.notes.append(("begun", tenant, request_id))

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:
        self.notes.append(("ended", tenant, request_id, completion and (completion.text, completion.finish_reason)))

    def forecast(self, changes: Changes) -> None:
        self.notes.append(("forecast", changes))


def request(name: str, max_tokens: int = 4) -> GenerateRequest:
    segments = (Segment(tuple(b"hello"), "p0"),)
    return GenerateRequest(segments, SamplingParams(max_tokens), request_id=name, tenant=ACME)


READERS: dict[str, Any] = {
    "unread": lambda _: None,
    "iterated": lambda stream: "".join(delta.text for delta in stream),
    "result": lambda stream: stream.result(60).text,
    "listened": lambda stream: (stream.listen(lambda _: None), stream.result(60).text)[1],
}


@pytest.mark.parametrize("way", READERS)
def test_beginning_and_end_are_told_however_an_answer_is_read(way: str) -> None:
    notebook = Notebook()
    with EchoEngine() as engine:
        stream = WatchedEngine(engine, notebook).submit(request("a"))
        assert READERS[way](stream) in (None, "hell")
        stream.result(60)
    assert notebook.notes == [("submitted", "a"), ("begun", ACME, "a"), ("ended", ACME, "a", ("hell", "length"))]


def test_a_cancelled_answer_is_told_as_one_though_nobody_reads_it() -> None:
    notebook = Notebook()
    with EchoEngine(delay_s=0.05) as engine:
        watched = WatchedEngine(engine, notebook)
        watched.submit(request("a", max_tokens=200))
        assert watched.cancel("a") and not watched.cancel("b")
    assert notebook.notes[-1][:2] == ("ended", ACME) and notebook.notes[-1][3][1] == "cancelled"


def test_of_a_forecast_what_can_be_meant_is_told() -> None:
    notebook = Notebook()
    with EchoEngine() as engine:
        watched = WatchedEngine(engine, notebook)
        watched.forecast({KEY: NextRun(1.0), "nonsense": None})  # type: ignore[dict-item]
    assert notebook.notes == [("forecast", {KEY: NextRun(1.0)})]


def test_a_request_that_is_refused_is_not_told() -> None:
    notebook = Notebook()
    with EchoEngine() as engine, pytest.raises(RequestError, match="max_tokens"):
        WatchedEngine(engine, notebook).submit(request("a", max_tokens=-1))
    assert not notebook.notes


def test_a_watcher_that_overrides_nothing_is_told_everything() -> None:
    with EchoEngine() as engine:
        watched = WatchedEngine(engine, Watcher())
        assert [delta.text for delta in watched.submit(request("a"))]
        watched.cancel("a")
        watched.forecast({KEY: NextRun(1.0)})
        watched.end_run(KEY.run)
