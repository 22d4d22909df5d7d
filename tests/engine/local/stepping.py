"""An embedded engine without its thread, so that a test takes its steps, sees every pass and checks the books."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest

from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.local import build
from kedge.engine.local.core import EngineCore
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Sampler
from kedge.engine.local.sequence import RequestSequence, Work
from kedge.reuse.costs import EngineCosts, LinearCost
from kedge.settings import AnchorSettings, EngineSettings, PlannerConstants, PlannerSettings
from kedge.types import GenerateRequest, Namespace, ReuseMode, RunKey, SampleId, SamplingParams, Segment, Tokens
from tests.engine.local.conftest import tiny_model, tiny_tokenizer
from tests.engine.local.test_engine import prompt as tokens

OPEN = {"min_anchors": 1, "max_error": 1e9, "weak_error": 1e9}
"""Thresholds so wide that whatever was observed once is shared."""
ENOUGH = 5000
"""Steps after which an engine that still has something to do never ends"""


class KnownCosts(EngineCosts):
    """Costs that stay what they are, whatever the clock says: seconds of a pass, its tokens and its sequences, and of
    a translation's segments and tokens.
    """

    passes = (2e-3, 1e-4, 3e-4)
    translations = (1e-3, 1e-5)

    def __init__(self, *, by_cost: bool = True) -> None:
        super().__init__(by_cost=by_cost)
        self._passes, self._translations = LinearCost(self.passes), LinearCost(self.translations)

    def observe_pass(self, tokens: int, sequences: int, seconds: float) -> None:
        pass

    def observe_translation(self, segments: int, tokens: int, seconds: float) -> None:
        pass


@cache
def runner() -> ModelRunner:
    return checked_runner(tiny_model("llama"))


class Stepped:
    """An engine that is stepped by hand."""

    def __init__(
        self, costs: type[EngineCosts] = KnownCosts, model: ModelRunner | None = None, **settings: object
    ) -> None:
        defaults: dict[str, object] = {
            "kv_memory": "256 blocks",
            "device": "cpu",
            "anchors": AnchorSettings(**OPEN),
            "planner": PlannerSettings(by_cost=False),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "EngineCosts", costs)
            self.core: EngineCore
            self.core = EngineCore(build.EngineParts(model or runner(), EngineSettings(**{**defaults, **settings})))
        self.passes: list[list[Work]] = []
        """All passes so far"""
        schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = lambda: self._noted(schedule())  # type: ignore[method-assign]

    def _noted(self, work: list[Work]) -> list[Work]:
        if work:
            self.passes.append(work)
        return work

    def submit(self, request: GenerateRequest) -> RequestSequence:
        return self.queue(self.sequence(request))

    def sequence(self, request: GenerateRequest) -> RequestSequence:
        """Return the sequence of a request that is not queued yet."""
        return RequestSequence(
            request.request_id, request.namespace, list(request.tokens), request=request,
            stream=TokenStream(request.request_id), sampler=Sampler(request.sampling),
            text=TextStream(tiny_tokenizer(), ()), max_tokens=request.sampling.max_tokens,
        )  # fmt: skip

    def queue(self, sequence: RequestSequence) -> RequestSequence:
        self.core.requests.submit(sequence)
        self.check()
        return sequence

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
            self.check()

    def check(self) -> None:
        """Look at the books, as after every step."""
        self.core.parts.cache.check_integrity()

    def until(self, condition: Callable[[], object]) -> None:
        """Step until it holds."""
        for _ in range(ENOUGH):
            if condition():
                return
            self.step()
        pytest.fail("it never came to that")

    def rest(self) -> None:
        """Step until nothing is left but learning."""
        self.until(lambda: self.core.idle and not self.core.parts.cache.transferring)

    def learn(self) -> None:
        """Learn all that is left to be learned."""
        for _ in range(ENOUGH):
            if not self.core.can_learn:
                return
            self.core.parts.learning.backlog.step()
            self.check()
        pytest.fail("learning never ends")

    def serve(self, request: GenerateRequest) -> RequestSequence:
        """Serve a request to its end, then learn from it."""
        sequence = self.submit(request)
        self.rest()
        self.learn()
        return sequence

    def stats(self, part: str) -> dict[str, Any]:
        return self.core.parts.stats()[part]

    @property
    def leased(self) -> int:
        """Blocks that somebody holds."""
        return self.stats("cache")["leased_blocks"]

    def cost(self, work: list[Work]) -> float:
        """Return what a pass over this work takes."""
        tokens = sum(len(item.positions) for item in work)
        return self.core.parts.costs.pass_seconds(tokens, len(work)) if work else 0.0


# prompts of a team, and those that are assembled ahead of their requests ----------------------------------------------

TEMPLATE = (20, 9, 5)
"""Tokens of the prefix segments of every agent: before the question, before the answer, and the last."""
QUESTION, ANSWER = 40, 24
ASKED = tokens(70, QUESTION)
PLANNER = PlannerConstants(by_cost=False, recompute_head=2, move="never")
SPACE, RUN = Namespace("default"), "run"
RUN_KEY = RunKey(SPACE, "client", RUN)
_ids = count()


def prompt_of(
    agent: str,
    question: Tokens,
    answer: Tokens | None = None,
    reuse: ReuseMode = ReuseMode.TRANSLATE,
    run: str = RUN,
    produces: str | None = None,
    **sampling: object,
) -> GenerateRequest:
    """An agent's prompt around a question and the writer's answer; `answer=()` is one that is yet to come."""
    seed = sum(agent.encode())
    around = {"base_context": tokens(1, 3), "placeholder_text": tokens(2, 6)}
    p0, p1, p2 = (Segment(tokens(seed + i, size), f"p{i}") for i, size in enumerate(TEMPLATE))
    segments = [p0, Segment(question, "user_question", SampleId.parse("input_user_question@0"), **around), p1]
    if answer is not None:
        segments += [Segment(answer, "agent_writer_current", SampleId.parse("agent_writer@0"), **around), p2]
    return GenerateRequest(
        tuple(segments),
        SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}),  # type: ignore[arg-type]
        reuse,
        f"request-{next(_ids)}",
        run=run,
        client="client",
        workflow="flow",
        agent=agent,
        produces=SampleId.parse(produces) if produces else None,
    )


class Stage(Stepped):
    """An engine that is stepped by hand, with the books of what is prepared."""

    def __init__(self, **settings: object) -> None:
        self.answer: Tokens = ()
        """The writer's, to `ASKED`."""
        self._before: dict[str, int] = {}
        super().__init__(EngineCosts, **{"kv_memory": "128 blocks", "planner": PLANNER, **settings})

    def check(self) -> None:
        super().check()
        told = self.told
        assert told["begun"] == sum(told[name] for name in ("live", *ENDS))
        for one in self.core.parts.preassembly.expected.values():
            assert one.todo == sorted(set(one.todo))
            assert one.plan is None or one.request.prompt_tokens - 1 not in one.todo, "that is the request's"

    def prepare(self, request: GenerateRequest) -> None:
        """Tells what is expected, and assembles it."""
        self.core.parts.preassembly.expect(request)
        self.check()
        self.rest()

    def teach(self, *agents: str, questions: int = 3) -> None:
        """Enough dense prefills that everything is shareable from now on."""
        for at in range(questions):
            question = tokens(50 + at, QUESTION)
            answer = self.write(question, run=f"past-{at}")
            for agent in agents:
                self.serve(prompt_of(agent, question, answer, run=f"past-{at}"))
            self.core.end_run(RunKey(SPACE, "client", f"past-{at}"))
        self.core.parts.cache.clear()

    def write(self, question: Tokens, run: str = RUN) -> Tokens:
        """The writer's answer to a question."""
        asked = prompt_of("writer", question, run=run, produces="agent_writer@0", max_tokens=ANSWER)
        return tuple(self.serve(asked).response)

    def fresh(self) -> Stage:
        """As it was when it had been taught: nothing is cached, expected or counted."""
        self.rest()
        self.core.parts.preassembly.clear()
        self.core.parts.cache.clear()
        self._before = {name: value for name, value in self.stats("preassembly").items() if name != "live"}
        return self

    @property
    def told(self) -> dict[str, int]:
        """Since it was last `fresh`."""
        return {name: value - self._before.get(name, 0) for name, value in self.stats("preassembly").items()}


ENDS = ("used", "wasted", "given_back", "cancelled", "failed")


@cache
def _taught(planner: PlannerConstants) -> Stage:
    stage = Stage(planner=planner)
    stage.teach("reader")
    stage.answer = stage.write(ASKED)
    return stage


def taught(planner: PlannerConstants = PLANNER) -> Stage:
    """Translates what the reader is asked about `ASKED`, to which the writer's answer is known."""
    return _taught(planner).fresh()


def outcome(sequence: RequestSequence) -> tuple[object, ...]:
    """What must not depend on whether a prompt was assembled ahead."""
    receipt = sequence.receipt()
    return tuple(sequence.response), receipt.spans, receipt.misses


def pieces(request: GenerateRequest) -> GenerateRequest:
    """The request as it is known before the writer has answered."""
    segments = (
        replace(one, tokens=()) if one.sample == SampleId.parse("agent_writer@0") else one for one in request.segments
    )
    return replace(request, segments=tuple(segments), request_id=f"hint-{next(_ids)}")
