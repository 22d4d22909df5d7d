"""Sampling parameters, hints and messages from requests and forecasts."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kedge.guard import GuardOrders
from kedge.integrations.vllm.engine.driver import Driver, Forecasts, sampling_params
from kedge.integrations.vllm.plugin.hints import Message, read_hints, request_hints, short
from kedge.reuse.guard.fidelity import RUNGS
from kedge.types import AgentKey, GenerateRequest, Namespace, ReuseMode, SampleId, SamplingParams, Segment
from kedge.workflow.steps import NextRun

TENANT, RUN = "t", "r"
SEGMENTS = (
    Segment((1, 2, 3), "p0"),
    Segment((4, 5), "q", SampleId.parse("q@0"), base_context=(9,), placeholder_text=(8, 8), in_context=True),
    Segment((6,), "p1"),
)


def request(**more: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "tenant": TENANT, "client": "c", "workflow": "w", "run": RUN, "agent": "a",
        "produces": SampleId.parse("a@0"), "reuse": ReuseMode.TRANSLATE,
    }  # fmt: skip
    return GenerateRequest(SEGMENTS, **{**fields, **more})


def read(asked: GenerateRequest) -> Any:
    """The request as the plug-in reads it, with a default mode of its own."""
    params = {"kedge": request_hints(asked)}
    call = read_hints(asked.request_id, asked.tokens, str(asked.namespace), params, ReuseMode.OFF)
    assert call is not None and call.ignored == 0
    return call.request


def test_the_plugin_reads_the_request_that_was_submitted() -> None:
    for mode in ReuseMode:
        asked = request(reuse=mode)
        got = read(asked)
        for name in ("request_id", "tenant", "client", "workflow", "run", "agent", "produces", "reuse", "tokens"):
            assert getattr(got, name) == getattr(asked, name)
        assert got.segments == (SEGMENTS if mode is ReuseMode.TRANSLATE else (Segment(asked.tokens, "p0"),))
        assert got.fixed == 3, "also without segments"
    assert [read(request(fixed=fixed)).fixed for fixed in (5, 99)] == [5, 3]
    assert "fixed_tokens" not in request_hints(GenerateRequest(SEGMENTS[:1], fixed=-1))


def test_what_the_guard_orders_is_sent() -> None:
    orders = GuardOrders(withheld=frozenset({"q", "r"}), epoch=2, rung=len(RUNGS) - 1, pick="answer is <word>")
    orders = replace(orders, held_out=True)
    assert read(request(guard=orders)).guard == orders
    assert read(request(guard=GuardOrders(rung=0))).guard.rung == 0
    assert not {"withheld", "epoch", "rung", "held_out", "pick"} & request_hints(request()).keys()


def test_names_that_are_not_accepted_stay_distinct() -> None:
    long, longer, line = "x" * 300, "x" * 301, "a\nb\ud800"
    assert short("agent 7") == "agent 7"
    assert len({short(long), short(longer), short(line)}) == 3
    segments = (SEGMENTS[0], Segment((4,), "q", SampleId.parse(long)))
    got = read(GenerateRequest(segments, reuse=ReuseMode.TRANSLATE, agent=line))
    assert (got.agent, got.segments[1].sample) == (short(line), SampleId.parse(short(f"input_{long}@0")))


def test_what_vllm_draws_by() -> None:
    sampling = SamplingParams(4, temperature=0.5, top_p=0.9, seed=3, stop=("x",), ignore_eos=True)
    params = sampling_params(request(sampling=sampling, logprobs=2), 100)
    expected = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": None}
    assert {name: getattr(params, name) for name in expected} == expected
    assert not params.stop and not params.detokenize
    asked = [request(sampling=SamplingParams(max_tokens=most)) for most in (0, 3, 7)]
    assert [sampling_params(one, 5).max_tokens for one in asked] == [1, 3, 5], "vLLM draws one token at least"
    assert params.extra_args and sampling_params(request(), 9, hinted=False).extra_args is None, "stock vLLM"
    seeds = [sampling_params(request(sampling=SamplingParams(seed=seed)), 9).seed for seed in (-1, -2, 0, None)]
    assert seeds == [2**63 - 1, -2, 0, None], "the one that it takes for none is replaced"


def key(agent: str, run: str = "r") -> AgentKey:
    return AgentKey(Namespace(TENANT), "c", run, agent)


def test_changes_become_whole_forecasts() -> None:
    forecasts = Forecasts()
    first = list(
        forecasts.messages({key("a"): NextRun(0.0), key("b"): NextRun(math.inf), key("a", "s"): NextRun(2.0)}, {})
    )
    assert [one.hints["steps"] for one in first] == [{"a": 0.0, "b": None}, {"a": 2.0}]
    assert first[0].hints | {"steps": None} == {"run": "r", "client": "c", "seq": 0, "steps": None}
    [second] = forecasts.messages({key("b"): NextRun(1.0)}, {})
    assert (second.hints["steps"], second.hints["seq"]) == ({"a": 0.0, "b": 1.0}, 2)
    [third] = forecasts.messages({key("a"): None, key("b"): None}, {})
    assert third.hints["steps"] == {}
    [fourth] = forecasts.messages({key("b"): NextRun(4.0)}, {})
    assert fourth.hints["steps"] == {"b": 4.0}, "nothing is left of a run that was over"


def test_fixed_prompts_are_sent_before_the_steps_of_their_agents_and_when_they_change() -> None:
    forecasts, one = Forecasts(), {key("a"): (1, 2, 3)}
    fixed, steps = forecasts.messages({key("a"): NextRun(1.0)}, one)
    given = {"run": "r", "client": "c", "agent": "a", "fixed_tokens": 3}
    assert fixed == Message(given, "t", (1, 2, 3))
    assert steps.hints["steps"] == {"a": 1.0}
    other_run = key("a")._replace(run_id="other")
    assert not list(forecasts.messages({}, one)) and not list(forecasts.messages({}, {other_run: (1, 2, 3)}))
    assert list(forecasts.messages({}, {key("a"): (1, 2)})) and list(forecasts.messages({}, {key("b"): (1, 2)}))


def test_the_receipt_of_an_aborted_request_is_in_one_of_several_engines() -> None:
    sent, asked, ended = {"tokens": {"translated": 3}}, request(), list[Any]()

    async def answer(*_: Any, engine: int) -> Any:
        return sent if engine else None

    async def end_here(driver: Driver) -> None:
        generating = asyncio.ensure_future(asyncio.sleep(0))
        driver._generating[asked.request_id] = generating
        response: Any = SimpleNamespace(request=asked, has_begun=True, end=ended.append)
        await driver._serve(response, generating)

    core = SimpleNamespace(core_engines=[0, 1], _call_utility_async=answer)
    driver = Driver(True, SimpleNamespace(engine_core=core))
    asyncio.run(end_here(driver))
    assert ended == [sent] and driver.translates(asked)
