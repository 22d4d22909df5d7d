"""Tests that hints save time and change no answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kedge.engine.base import Engine
from kedge.errors import RequestError
from kedge.types import (
    AgentId,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SamplingParams,
    Segment,
    TenantId,
    TurnHints,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import NextRun
from tests.engine.conformance.harness import Harness, expect, fresh, fresh_id, fresh_text


class HintTests(Harness):
    """Tests of forecasts, preparations and the ends of runs: right, wrong, late or hostile."""

    def test_the_end_of_an_unknown_run_is_no_error(self, engine: Engine) -> None:
        engine.end_run(RunKey(Namespace(TenantId("conformance")), "", RunId("unknown")))
        self.serves(engine)

    def test_hints_change_no_token(self, engine: Engine) -> None:
        """Check forecasts that are right, wrong, late, or about unknown agents."""
        text = fresh_text("hints")
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        keys = [AgentKey(*request.run_key, AgentId(name)) for name in ("speaker", "unknown")]
        for steps in (0.0, 3.0, math.inf):
            engine.forecast(dict.fromkeys(keys, NextRun(steps)), dict.fromkeys(keys, request.segments[0].tokens))
            again = replace(request, request_id=RequestId(f"hinted-{next(fresh)}"))
            assert self.run(engine, again).tokens == plain
        engine.forecast(dict.fromkeys(keys))
        self.serves(engine)

    def test_preparing_changes_no_token(self, engine: Engine) -> None:
        """Check hints of an empty, half, whole or different prompt. An engine may ignore them."""
        text = " ".join(fresh_text("preparing") for _ in range(3))
        request = replace(self.request(engine, text), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        request = replace(request, reuse=ReuseMode.EXACT)
        other = self.request(engine, fresh_text("others"), reuse=ReuseMode.EXACT).segments
        begun = (request.segments[0], replace(request.segments[1], tokens=()), request.segments[2])
        for segments in ((), begun, request.segments, other, ()):
            engine.prepare(replace(request, segments=segments, request_id=RequestId(f"hint-{next(fresh)}")))
            done = self.run(engine, replace(request, request_id=RequestId(f"prepared-{next(fresh)}")))
            assert done.tokens == plain
            assert 0 <= done.receipt.preassembled < request.prompt_tokens
        engine.end_run(request.run_key)

    def test_hints_that_cannot_be_meant_are_ignored(self, engine: Engine) -> None:
        text = fresh_text("nonsense")
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        key: Any = AgentKey(*request.run_key, AgentId("speaker"))
        engine.forecast({key: NextRun(1.0)}, {key: request.segments[0].tokens})
        for changes, prompts in _nonsense(key):
            engine.forecast(changes, prompts)
            assert self.again(engine, request).tokens == plain
        engine.forecast({key: None})
        self.serves(engine)

    def test_impossible_preparations_are_ignored(self, engine: Engine) -> None:
        text = fresh_text("nonsense")
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        for changes in IMPOSSIBLE_PREPARATIONS:
            engine.prepare(replace(request, **{"request_id": fresh_id(), **changes}))
            assert self.again(engine, request).tokens == plain

    def test_advice_on_sessions_changes_no_token_and_is_answered(self, engine: Engine) -> None:
        """Check advice on sessions that are known, unknown, or another tenant's. An engine may take none."""
        text, name = fresh_text("advice"), fresh_id()
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), turn=TurnHints(name))
        plain = self.run(engine, request).tokens
        for namespace in (request.namespace, Namespace(TenantId("others"))):
            for said in (TurnHints(name, keep_for=9.0, returns_in=1.0), TurnHints(expects={name: math.inf, "x": 1.0})):
                outcomes = engine.advise(namespace, said)
                assert len(outcomes) == 2 and all(one.reason for one in outcomes), outcomes
                assert self.again(engine, request).tokens == plain
        assert {one.action_id for one in engine.advise(request.namespace, TurnHints(name, is_last=True))} == {"final"}
        assert engine.advise(request.namespace, TurnHints()) == ()
        assert self.again(engine, request).tokens == plain

    def test_impossible_advice_is_refused(self, engine: Engine) -> None:
        space = Namespace(TenantId("conformance"))
        for said in IMPOSSIBLE_ADVICE:
            expect(RequestError, partial(engine.advise, space, said))
        for namespace in IMPOSSIBLE_NAMESPACES:
            expect(RequestError, partial(engine.advise, namespace, TurnHints("s", keep_for=1.0)))
        self.serves(engine)

    def test_the_end_of_a_run_ends_no_request(self, engine: Engine) -> None:
        """Check the end of another run, of another tenant's run, and of the request's own run."""
        request = replace(self.request(engine, fresh_text("runs"), reuse=ReuseMode.TRANSLATE), run=RunId("run"))
        plain = self.again(engine, request, reuse=ReuseMode.OFF).tokens
        for tenant, run in (("others", "run"), (request.tenant, "other"), ("", ""), (request.tenant, "run")):
            stream = engine.submit(replace(request, request_id=fresh_id(), reuse=ReuseMode.EXACT))
            engine.end_run(RunKey(Namespace(TenantId(tenant)), request.client, RunId(run)))
            assert stream.result(self.timeout_s).tokens == plain


IMPOSSIBLE_ADVICE: tuple[Any, ...] = (
    None,
    "keep it",
    TurnHints(5),  # type: ignore[arg-type]
    TurnHints("\ud800"),
    TurnHints("s", keep_for=math.nan),
    TurnHints("s", keep_for=-1.0),
    TurnHints("s", returns_in="soon"),  # type: ignore[arg-type]
    TurnHints(expects={"": 1.0}),
    TurnHints(expects={"s": -1.0}),
    TurnHints(expects={"s": None}),  # type: ignore[dict-item]
    TurnHints(expects=dict.fromkeys(map(str, range(65)), 1.0)),
    TurnHints(expects=["s"]),  # type: ignore[arg-type]
)
IMPOSSIBLE_NAMESPACES: tuple[Any, ...] = (None, "conformance", Namespace(TenantId("")), Namespace(TenantId("a"), 5))  # type: ignore[arg-type]
IMPOSSIBLE_PREPARATIONS: tuple[dict[str, Any], ...] = (
    {"segments": ()},
    {"segments": (Segment((-1, 2**70), "p0"),)},
    {"segments": (Segment((1, 1.5), "p0"),)},  # type: ignore[arg-type]
    {"sampling": SamplingParams(temperature=math.nan)},
    {"sampling": SamplingParams(max_tokens=-1)},
    {"request_id": RequestId("")},
    {"tenant": 5},
    {"fixed": "all"},
    {"segments": None},
)


def _nonsense(key: Any) -> Iterator[tuple[Any, Any]]:
    """Yield invalid forecasts, with prompts."""
    runs: list[Any] = [(steps, 1.0) for steps in (math.nan, -1.0, -math.inf, "soon", None, True)]
    runs += [(1.0, probability) for probability in (math.nan, -1.0, 2.0, "likely", None)]
    for run in runs:
        yield {key: NextRun(*run)}, {key: (1, 2)}
        yield {key: run}, {}
    keys: list[Any] = [None, "speaker", ("a", "b"), AgentKey(*runs[:4]), key._replace(namespace="text")]
    for other in keys:
        yield {other: NextRun(1.0)}, {other: (1, 2)}
    prompts: list[Any] = [None, "text", (), (-1,), (2**70,), (1.5,), ([],), [1, 2]]
    for tokens in prompts:
        yield {key: NextRun(1.0)}, {key: tokens}
    for nothing in (None, (), "text", 5):
        yield nothing, nothing
