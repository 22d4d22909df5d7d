"""Running workflows on the engine without a model."""

import threading
from collections.abc import Iterator, Mapping

import pytest

from kedge.engine.echo import EchoEngine
from kedge.errors import EngineClosed, MissingInput, PromptTooLong, RequestError, ToolError, WorkflowError
from kedge.runner.run import EventKind, RunEvent, run
from kedge.types import AgentKey, GenerateRequest, Namespace, ReuseMode, RunKey, SampleId, ValueKind
from kedge.workflow.graph import Agent
from kedge.workflow.steps import UNKNOWN
from tests.workflow.test_graph import agent, flow

ASK = {"user_question": "why?"}


class Engine(EchoEngine):
    """An echo that records which runs ended."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.ended: list[RunKey] = []

    def end_run(self, run: RunKey) -> None:
        self.ended.append(run)


def says(request: GenerateRequest) -> str:
    """Every answer tells agent and how often it was asked."""
    return f"<{request.agent}>"


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(says) as engine:
        yield engine


def upper(answer: str, inputs: Mapping[str, str]) -> str:
    return f"{inputs['user_question']} {answer.upper()}"


CHAIN = flow(agent("a"), agent("b", "agent_a_current"))


def filled(engine: EchoEngine, request: GenerateRequest) -> list[tuple[str, str, str | None]]:
    decode = engine.tokenizer.decode
    return [(s.name, decode(s.tokens), str(s.sample)) for s in request.segments if s.is_placeholder]


def test_answers_and_tool_results_go_on(engine: Engine) -> None:
    workflow = flow(agent("a", tool=upper), agent("b", "agent_a_current", "condition_a_current"))
    result = run(engine, workflow, ASK, run_id="r1", tenant="t")
    said = [(one.agent, one.text, one.tool_result) for one in result.results]
    assert said == [("a", "<a>", "why? <A>"), ("b", "<b>", None)]
    assert (result.text, result.run_id) == ("<b>", "r1")
    assert filled(engine, engine.requests[1]) == [
        ("user_question", "why?", "input_user_question@0"),
        ("agent_a_current", "<a>", "agent_a@0"),
        ("condition_a_current", "why? <A>", "condition_a@0"),
    ]
    assert engine.ended == [RunKey(Namespace("t"), "", "r1")]


def test_requests_say_whose_they_are(engine: Engine) -> None:
    workflow = flow(agent("a", max_tokens=7, reuse=ReuseMode.OFF), agent("b", "agent_a_current", stop=("s",)))
    run(engine, workflow, ASK, run_id="r", tenant="t", reuse=ReuseMode.EXACT)
    first, second = engine.requests
    assert (first.tenant, first.workflow, first.run, first.agent) == ("t", "flow", "r", "a")
    assert (first.reuse, second.reuse) == (ReuseMode.OFF, ReuseMode.EXACT)
    assert (first.sampling.max_tokens, second.sampling.stop) == (7, ("s",))
    assert (first.produces, second.produces) == (SampleId(ValueKind.AGENT, "a"), None)


def test_a_mode_may_be_given_as_its_value_and_is_translate_in_a_run_of_its_own_without(engine: Engine) -> None:
    run(engine, flow(agent("a")), ASK, reuse="exact")
    assert engine.requests[0].reuse is ReuseMode.EXACT
    ids = {run(engine, CHAIN, ASK).run_id for _ in range(3)}
    assert len(ids) == 3 and {request.run for request in engine.requests[1:]} == ids
    assert all(request.reuse is ReuseMode.TRANSLATE for request in engine.requests[1:])
    with pytest.raises(RequestError, match="reuse='often': must be one of off, exact, translate"):
        run(engine, flow(agent("a")), ASK, reuse="often")


def test_the_engine_is_told_who_runs_next(engine: Engine) -> None:
    run(engine, CHAIN, ASK, run_id="r", tenant="t", client="c")
    a, b = (AgentKey(Namespace("t"), "c", "r", request.agent) for request in engine.requests)
    known: dict[AgentKey, float] = {}
    seen = []
    for changes, _ in engine.forecasts:
        known.update({key: UNKNOWN if next_run is None else next_run.steps for key, next_run in changes.items()})
        seen.append((known[a], known[b]))
    a_runs, b_runs, b_done, end = seen
    assert (a_runs, b_runs) == ((0, 1), (UNKNOWN, 0)), "one message says that a is done and b runs"
    assert b_done == end == (UNKNOWN, UNKNOWN)
    assert dict(engine.forecasts[-1][0]) == {a: None, b: None}, "the run is over, so all of it is forgotten"


def test_the_engine_is_told_what_every_prompt_begins_with(engine: Engine) -> None:
    run(engine, CHAIN, ASK)
    (_, prompts), *others = engine.forecasts
    for request in engine.requests:
        first = request.segments[0]
        assert prompts[request.agent_key] == first.tokens
        assert request.fixed == len(first.tokens)
    assert all(not more for _, more in others)


@pytest.mark.parametrize(("rest", "stop"), [("", ()), (" END", (" E",))])
def test_what_is_read_of_an_answer_is_its_text_without_special_tokens(rest: str, stop: tuple[str, ...]) -> None:
    with EchoEngine({"a": f"<|bos|>\ufffd{rest}"}) as engine:
        run(engine, flow(agent("a", stop=stop), agent("b", "agent_a_current")), ASK)
        answer = engine.requests[1].segments[3]
    assert answer.name == "agent_a_current"
    assert answer.tokens == tuple("\ufffd".encode())


def test_independent_agents_are_submitted_together() -> None:
    seen: list[RunEvent] = []
    workflow = flow(agent("d", "agent_a_current", "agent_b_current"), agent("a"), agent("b"), agent("c"))
    with EchoEngine(says, delay_s=0.005) as engine:
        run(engine, workflow, ASK, on_event=seen.append)
    started = [event.agent for event in seen if event.kind is EventKind.SUBMITTED]
    first_answer = next(i for i, event in enumerate(seen) if event.kind is EventKind.ANSWERED)
    assert started == ["a", "b", "c", "d"]
    assert [event.agent for event in seen[:first_answer] if event.kind is EventKind.SUBMITTED] == ["a", "b", "c"]


def test_history_and_loops_over_turns(engine: Engine) -> None:
    workflow = flow(
        agent("a", "agent_b_current", "agent_a_history_2"), agent("b", "agent_a_current"), turns=3, loops=(("b", "a"),)
    )
    result = run(engine, workflow, ASK)
    assert [(said.agent, said.turn) for said in result.results] == [(x, t) for t in range(3) for x in "ab"]
    heard = [[sample for _, _, sample in filled(engine, request)[1:]] for request in engine.requests]
    assert heard == [[], ["agent_a@0"], ["agent_b@0"], ["agent_a@1"], ["agent_b@1", "agent_a@0"], ["agent_a@2"]]
    assert [str(request.produces) for request in engine.requests] == [
        "agent_a@0", "agent_b@0", "agent_a@1", "agent_b@1", "agent_a@2", "None",
    ]  # fmt: skip


def test_empty_answers_and_tool_results_leave_no_segment() -> None:
    workflow = flow(agent("a", tool=lambda *_: ""), agent("b", "agent_a_current", "condition_a_current"))
    with EchoEngine({"a": "", "b": "x"}) as engine:
        assert run(engine, workflow, ASK).text == "x"
        assert [name for name, _, _ in filled(engine, engine.requests[1])] == ["user_question"]


def test_of(engine: Engine) -> None:
    result = run(engine, flow(agent("a"), turns=2), ASK)
    assert (result.of("a").turn, result.of("a", 0).turn, result.of("a", -2).turn) == (1, 0, 0)
    for name, turn in (("a", 2), ("x", 0)):
        with pytest.raises(WorkflowError, match=f"agent {name}"):
            result.of(name, turn)


@pytest.mark.parametrize("value", [None, "", " \n\t", 3, b"x", ["x"]])
def test_missing_inputs(engine: Engine, value: object) -> None:
    with pytest.raises(MissingInput, match="user_question") as caught:
        run(engine, CHAIN, {"user_question": value})  # type: ignore[dict-item]
    assert caught.value.value == value
    with pytest.raises(MissingInput):
        run(engine, CHAIN, {})
    assert not engine.requests


@pytest.mark.parametrize("inputs", [{**ASK, "typo": "x"}, {"user_question": "\ud800"}])
def test_inputs_that_cannot_be_used(engine: Engine, inputs: dict[str, str]) -> None:
    with pytest.raises(RequestError):
        run(engine, CHAIN, inputs)
    assert not engine.requests


def test_events(engine: Engine) -> None:
    seen: list[tuple[EventKind, str, str]] = []
    threads: set[int] = set()

    def on_event(event: RunEvent) -> None:
        threads.add(threading.get_ident())
        seen.append((event.kind, event.agent, event.text))
        assert (event.completion is not None) == (event.kind is EventKind.ANSWERED)

    run(engine, flow(agent("a", tool=upper)), ASK, on_event=on_event)
    assert threads == {threading.get_ident()}
    assert "".join(text for kind, _, text in seen if kind is EventKind.TEXT) == "<a>"
    others = [event for event in seen if event[0] is not EventKind.TEXT]
    assert others == [
        (EventKind.SUBMITTED, "a", ""),
        (EventKind.ANSWERED, "a", "<a>"),
        (EventKind.TOOL, "a", "why? <A>"),
    ]


def failing(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001
    raise ZeroDivisionError("on purpose")


def leaving(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001
    raise SystemExit(1)


NEVER = threading.Event()


def sleeping(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001
    NEVER.wait(60)
    return "late"


def silent(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001
    return None  # type: ignore[return-value]


TOOLS = [
    (failing, "raised ZeroDivisionError: on purpose", "ZeroDivisionError"),
    (leaving, "raised SystemExit", "SystemExit"),
    (sleeping, "ran longer than 0.05 s", "TimeoutError"),
    (silent, "answered None", "ToolError"),
]


@pytest.mark.parametrize(("tool", "why", "name"), TOOLS)
def test_tool_errors(engine: Engine, tool: object, why: str, name: str) -> None:
    workflow = flow(agent("a", tool=tool, tool_seconds=0.05), agent("b", "condition_a_current"))
    with pytest.raises(ToolError, match=why) as caught:
        run(engine, workflow, ASK)
    assert (caught.value.key, caught.value.value) == ("agent a: tool", tool.__name__)
    assert caught.value.__notes__ == ["agent a, turn 0"]
    assert len(engine.requests) == len(engine.ended) == 1
    assert run(engine, workflow, ASK, on_tool_error="text").of("a").tool_result == name


class Gone(Engine):
    """An echo that has ended by the time that its run does."""

    def cancel(self, request_id: object) -> bool:
        raise EngineClosed("request_id", request_id, "it has ended")


def test_the_error_of_a_run_is_told_also_where_its_engine_has_gone() -> None:
    with Gone(says) as engine, pytest.raises(ToolError, match="on purpose"):
        run(engine, flow(agent("a", tool=failing)), ASK)
    assert len(engine.ended) == 1


def test_cancelled_response_fails_the_run_and_the_engine_goes_on() -> None:
    def cancel(event: RunEvent) -> None:
        if event.agent == "a" and event.kind is EventKind.TEXT:
            engine.cancel(event.request_id)

    with Engine({"a": "a" * 200, "b": "b"}, delay_s=0.002) as engine:
        with pytest.raises(RequestError, match="agent a.*cancelled"):
            run(engine, CHAIN, ASK, on_event=cancel)
        assert len(engine.requests) == len(engine.ended) == 1
        assert run(engine, CHAIN, ASK).text == "b"


def test_a_request_that_is_refused_cancels_what_runs() -> None:
    workflow = flow(agent("long", max_tokens=20_000), Agent("a", "", "x" * 300))
    with Engine({"long": "l" * 20_000}, max_prompt=200, delay_s=0.002) as engine:
        heard: list[RunEvent] = []
        with pytest.raises(PromptTooLong) as caught:
            run(engine, workflow, ASK, on_event=heard.append)
        assert sum(len(event.text) for event in heard if event.kind is EventKind.TEXT) < 20_000
        assert caught.value.__notes__ == ["agent a, turn 0"]
        assert not engine.cancel(engine.requests[0].request_id)
        assert len(engine.ended) == 1


def test_an_event_handler_that_raises_ends_the_run() -> None:
    def on_event(event: RunEvent) -> None:
        raise LookupError(event.agent)

    with Engine({"a": "a" * 5000}, delay_s=0.002) as engine:
        with pytest.raises(LookupError):
            run(engine, CHAIN, ASK, on_event=on_event)
        assert len(engine.ended) == 1
        assert not engine.cancel(engine.requests[0].request_id)


def test_the_engine_is_told_the_prompts_that_come_next_as_far_as_they_are_known(engine: Engine) -> None:
    """Of whoever waits for nobody but those that run; not of those further away."""
    workflow = flow(
        agent("a", tool=upper), agent("b", "agent_a_current", "condition_a_current"), agent("c", "agent_b_current")
    )
    run(engine, workflow, ASK, run_id="r")
    told = [(request.agent, filled(engine, request)[1:]) for request in engine.prepared]
    b_knows = [("agent_a_current", "", "agent_a@0"), ("condition_a_current", "", "condition_a@0")]
    assert told == [("b", b_knows), ("c", [("agent_b_current", "", "agent_b@0")])]
    for hint, request in zip(engine.prepared, engine.requests[1:], strict=True):
        assert hint.request_id != request.request_id
        assert [one.name for one in hint.segments] == [one.name for one in request.segments]
        known = [(one, other) for one, other in zip(hint.segments, request.segments, strict=True) if one.tokens]
        assert all(one == other for one, other in known)
        assert (hint.agent, hint.run, hint.reuse, hint.sampling) == (
            request.agent, request.run, request.reuse, request.sampling,
        )  # fmt: skip


def test_who_waits_for_several_is_told_more_with_every_answer() -> None:
    workflow = flow(agent("slow"), agent("fast"), agent("end", "agent_fast_current", "agent_slow_current"))
    with EchoEngine({"slow": "s" * 40, "fast": "f", "end": "e"}, delay_s=0.002) as engine:
        run(engine, workflow, ASK)
        known = [[text for _, text, _ in filled(engine, request)] for request in engine.prepared]
    assert known == [["why?", "", ""], ["why?", "f", ""]]
