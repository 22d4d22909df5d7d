"""Guard and proof under vLLM's own server: what is proved before it is served, and that clients notice nothing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.integrations.vllm import guarded_server
from kedge.integrations.vllm.guarded_server import ServerGuard, start_guard
from kedge.integrations.vllm.plugin.settings import SCHEDULER, PluginSettings
from kedge.integrations.vllm.plugin.translations import UNPROVED_HERE
from kedge.reuse.guard.comparison import TOP
from kedge.reuse.guard.fidelity import LEAST, RUNGS, RungFinding
from kedge.reuse.planner import UNPROVED
from kedge.types import GenerateRequest, ReuseMode, SampleId, Segment
from tests.integrations.vllm.conftest import driver, prompt, receipt
from tests.integrations.vllm.test_server import MODEL, Server, serving
from tests.integrations.vllm.test_translation import HEAD as ROLE
from tests.integrations.vllm.test_translation import TAIL
from tests.integrations.vllm.test_translation import hints as with_value

FLAGS = (
    *("--num-gpu-blocks-override", "512"),
    *("--logits-processors", "kedge.integrations.vllm.forced_answers:ForcedAnswers"),
)
QUESTIONS = 4 * LEAST
WIDE, NONE = 5.0, 1e-12
"""Budgets that any rung, and none, is within"""
HEAD = len(ROLE)
"""Tokens of an agent's role"""


def asked(number: int, agent: str, **more: Any) -> dict[str, Any]:
    """The body of a call of one of several agents who read the same question in a run, each behind a role of its own.
    The run ends with the second one.
    """
    role, value = prompt(HEAD, sum(map(ord, agent))), prompt(60, 500 + number)
    segments = with_value(value)["segments"]
    hints = {"workflow": "w", "run": f"{more.get('kedge')}/{number}", "agent": agent, "segments": segments}
    given = {"kv_transfer_params": {"kedge": {**hints, "final": agent == "second"}}, **more}
    tokens = role + value + TAIL
    return {"model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **given}


def answered(server: Server, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text of an answer and its receipt."""
    data = server.post("/v1/completions", body)
    assert data["choices"][0]["logprobs"] is None, "what the guard asks for is no client's"
    return data["choices"][0]["text"], data["kv_transfer_params"]["kedge"]


def guard(server: Server) -> dict[str, Any]:
    return json.loads(server.get("/v1/guard"))


def after_checks(server: Server, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same, after time for a check of the call, if there is one."""
    done, found = guard(server)["checks_done"], answered(server, body)
    for _ in range(20):
        if guard(server)["checks_done"] > done:
            break
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS, extra={"planner": {"by_cost": False}, "guard": {"budget": 1.0}}) as built:
        yield built


@pytest.fixture(scope="module")
def stock(server: Server) -> Callable[[int, str], str]:
    """Answers that are computed, of the same engine: to calls that translate nothing."""

    def answer(number: int, agent: str) -> str:
        body = asked(number, agent)
        body["kv_transfer_params"] = {}
        data = server.post("/v1/completions", body)
        assert data["kv_transfer_params"] is None
        return str(data["choices"][0]["text"])

    return answer


def test_a_budget_is_proved_before_a_user_reads_what_was_translated(
    server: Server, stock: Callable[[int, str], str]
) -> None:
    before = []
    for number in range(QUESTIONS):
        for agent in ("first", "second"):
            text, found = after_checks(server, asked(number, agent, kedge={"fidelity": WIDE}))
            if found["tokens"]["translated"]:
                assert found["fidelity"]["rung"] in {rung.name for rung in RUNGS}
                assert found["fidelity"]["checks"] >= LEAST <= number
                assert found["fidelity"]["mean"] <= found["fidelity"]["bound"] <= WIDE
                agents = {one["agent"]: one for one in guard(server)["agents"]}
                assert agents[agent]["fidelity"]["rung"] == found["fidelity"]["rung"]
                assert UNPROVED in before and guard(server)["checks_dropped"] == 0
                return
            assert text == stock(number, agent), "a new team's first questions lose nothing"
            before += [one["reason"] for one in found["misses"]]
    raise AssertionError(f"nothing was translated in {QUESTIONS} questions")


def test_a_budget_that_nothing_is_within_is_never_left(server: Server, stock: Callable[[int, str], str]) -> None:
    for number in range(2 * LEAST):
        ask = after_checks if number < LEAST else answered  # by then few are tried
        text, found = ask(server, asked(number, "strict", kedge={"fidelity": NONE}))
        assert text == stock(number, "strict") and not found["tokens"]["translated"]
    assert found["fidelity"]["rung"] == "" and found["fidelity"]["checks"] > 1, "what is hopeless is seldom tried"


@pytest.mark.parametrize("kedge", [{"fidelity": "any"}, {"guard": "off"}], ids=["any", "off"])
def test_without_a_budget_the_second_reader_is_translated(server: Server, kedge: dict[str, Any]) -> None:
    for number in range(60, 60 + QUESTIONS):
        answered(server, asked(number, f"third {kedge}", kedge=kedge))
        found = answered(server, asked(number, f"fourth {kedge}", kedge=kedge))[1]
        if found["tokens"]["translated"]:
            assert found.get("fidelity") is None
            return
    raise AssertionError(f"nothing was translated in {QUESTIONS} questions")


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "logprobs": {"logprobs": 2},
    "no likeliest": {"logprobs": 0},
    "more than a check": {"logprobs": TOP},
    "two answers": {"n": 2, "temperature": 1.0, "seed": 6},
    "stop": {"stop": ["e", "a"], "ignore_eos": False},
    "biased": {"logit_bias": {"40": 60}, "logprobs": 1},
}


def read(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client reads of a stream, by choice: how tokens are dealt out to its events is a matter of time."""
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.http.post("/v1/completions", json=sent).raise_for_status()
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    found: dict[int, dict[str, Any]] = {}
    for choice in (one for line in lines for one in json.loads(line)["choices"]):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return [one for _, one in sorted(found.items())]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_client_gets_what_it_asks_for_and_nothing_else(server: Server, options: dict[str, Any]) -> None:
    guarded = asked(50, "reader", kedge={"fidelity": NONE}, **options)
    plain = {**guarded, "kv_transfer_params": {}, "kedge": {}}
    whole, expected = (server.post("/v1/completions", body)["choices"] for body in (guarded, plain))
    assert whole == expected
    streamed = [read(server, body) for body in (guarded, plain)]
    assert streamed[0] == streamed[1]
    assert [one["text"] for one in streamed[0]] == [one["text"] for one in whole]


def test_clients_that_go_away_leave_the_guard_at_work(server: Server) -> None:
    for number in range(3):
        body = {**asked(number, "leaver", kedge={"fidelity": NONE}), "max_tokens": 700, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines())
    after_checks(server, asked(5, "leaver", kedge={"fidelity": NONE}))  # in idle time: none counts as in flight


def test_the_end_of_a_run_without_a_prompt_waits_for_checks(server: Server) -> None:
    run = asked(60, "first")["kv_transfer_params"]["kedge"]["run"]
    data = server.post("/v1/hints", {"kedge": {"run": run, "final": True}})
    assert [(one["action_id"], one["outcome"]) for one in data["actions"]] == [("final", "applied")]


def test_without_the_middleware_what_is_not_proved_is_computed(tiny_llama: Path) -> None:
    hints = asked(0, "a")["kv_transfer_params"]["kedge"]
    with driver(tiny_llama, extra={"guard": {"fidelity": "fp8"}}, scheduler_cls=SCHEDULER) as built:
        first, again, free = (
            built.ask(asked(0, "a")["prompt"], kedge={**hints, **more, "final": False})
            for more in ({}, {"agent": "b"}, {"agent": "c", "guard": "off"})
        )
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert [miss["reason"] for miss in receipt(again)["misses"]] == [UNPROVED_HERE]
        assert UNPROVED_HERE not in str(receipt(free))


# without an engine ---------------------------------------------------------------------------------------------------


class Engine:
    """What the guard needs of an `AsyncLLM`, with answers of two tokens; the second may fail."""

    def __init__(self, state: Path, *, fails: bool = False) -> None:
        self.vllm_config = EngineArgs(model=MODEL, dtype="float32", max_model_len=512).create_engine_config()
        self.model_config, self.fails, self.seen = self.vllm_config.model_config, fails, list[Any]()
        self.engine_core = SimpleNamespace(client_index=3)
        self.settings = PluginSettings.model_validate({"state": str(state), "guard": {"fidelity": "fp8"}})

    async def generate(self, _: Any, params: Any, name: str, **others: Any) -> AsyncIterator[RequestOutput]:
        self.seen.append((params, others))
        for at in range(2):
            if at and self.fails:
                raise RuntimeError("out of order")
            ranked = {5: Logprob(-0.1, 1, "a"), 6: Logprob(-3.0, 2, "b")}
            one = CompletionOutput(0, "a", [5], -0.1, [ranked], finish_reason="length" if at else None)
            yield RequestOutput(name, None, [1], None, [one], finished=bool(at), num_cached_tokens=0)

    def begin(self) -> ServerGuard:
        return ServerGuard(self, self.settings, HFTokenizer.load(model_path(None)))


def hinted(tokens: list[int]) -> SamplingParams:
    segments = [{"name": "p0", "length": 1}, {"name": "q", "length": len(tokens) - 1, "sample": "q@0"}]
    extra = {"kv_transfer_params": {"kedge": {"workflow": "w", "run": "r", "agent": "a", "segments": segments}}}
    return SamplingParams(max_tokens=2, extra_args=extra, output_kind=RequestOutputKind.DELTA)


def test_an_error_of_the_engine_is_the_clients_and_ends_the_call(tmp_path: Path) -> None:
    engine = Engine(tmp_path, fails=True)

    async def call() -> list[Any]:
        guard = engine.begin()
        seen, params = [], hinted([1, 2, 3])
        with pytest.raises(RuntimeError, match="out of order"):
            async for output in guard.generate(tokens_input([1, 2, 3]), params, "same id"):
                seen.append(output.outputs[0].logprobs)
        assert guard.calls.checks._in_flight == 0 and not guard.calls._calls
        assert params.logprobs is None, "the caller's own parameters are left alone"
        await asyncio.to_thread(guard.close)
        return seen

    assert asyncio.run(call()) == [None]


def test_what_needs_no_guard_is_passed_through(tmp_path: Path) -> None:
    engine = Engine(tmp_path)

    async def calls() -> None:
        guard = engine.begin()
        for given in (SamplingParams(), SamplingParams(extra_args={"kv_transfer_params": {"kedge": {"agent": "a"}}})):
            async for _ in guard.generate(tokens_input([1, 2]), given, "r", priority=4):
                pass
            assert engine.seen[-1][0] is given and engine.seen[-1][1] == {"priority": 4}
        await asyncio.to_thread(guard.close)

    asyncio.run(calls())


def test_what_was_proved_is_known_after_a_restart_by_each_api_server(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    value = Segment((5, 6), "q", SampleId.parse("q@0"))

    async def life(found: list[RungFinding]) -> dict[str, Any]:
        guard = engine.begin()
        request = GenerateRequest((value,), reuse=ReuseMode.TRANSLATE)
        guard.calls.guard.verdict(request)
        guard.calls.guard.found(request, ["q"], found)
        seen = guard.calls.stats()["agents"]
        await asyncio.to_thread(guard.close)
        return seen[0] if seen else {}  # type: ignore[index]

    asyncio.run(life([RungFinding(0, 0.001, 0.2)]))
    assert (tmp_path / "guard-0-3").is_dir()
    assert asyncio.run(life([]))["fidelity"]["curve"] == (("moved", 0.001, 0.2),)


def test_a_server_without_a_guard_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    generate = engine.generate
    engine.vllm_config.kv_transfer_config = KVTransferConfig(kv_connector="KedgeConnector", kv_role="kv_both")
    for name, value in (("max_logprobs", 0), ("logprobs_mode", "processed_logprobs"), ("tokenizer", str(tmp_path))):
        with monkeypatch.context() as patch:
            patch.setattr(engine.model_config, name, value)
            assert asyncio.run(start_guard(engine)) is None and engine.generate == generate


def test_where_nothing_is_translated_no_prompt_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(tmp_path), list[str]()
    engine.vllm_config.kv_transfer_config = KVTransferConfig(kv_connector="KedgeConnector", kv_role="kv_both")

    async def answer(_: str, what: str, *, engine: str) -> str | None:
        asked.append(what)
        return "vLLM's scheduler is not Kedge's" if engine == "second" else None

    engine.engine_core = SimpleNamespace(core_engines=["first", "second"], _call_utility_async=answer)
    monkeypatch.setattr(guarded_server, "ServerGuard", lambda *_: pytest.fail("it has one"))
    assert asyncio.run(start_guard(engine)) is None
    assert asked == ["translation_refusal"] * 2
