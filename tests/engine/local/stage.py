"""Prompts that are assembled ahead of their requests, on an engine that is stepped by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

from kedge.engine.local.sequence import RequestSequence
from kedge.reuse.costs import EngineCosts
from kedge.settings import PlannerConstants
from kedge.types import (
    AgentId,
    ClientId,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
    WorkflowId,
)
from tests.engine.local.stepping import Stepped
from tests.engine.local.test_translation import tokens

TEMPLATE = (20, 9, 5)
"""Tokens of the prefix segments of every agent: before the question, before the answer, and the last."""
QUESTION, ANSWER = 40, 24
ASKED = tokens(70, QUESTION)
PLANNER = PlannerConstants(by_cost=False, recompute_head=2, move="never")
SPACE, RUN = Namespace(TenantId("default")), RunId("run")
RUN_KEY = RunKey(SPACE, ClientId("client"), RUN)
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
        RequestId(f"request-{next(_ids)}"),
        run=RunId(run),
        client=ClientId("client"),
        workflow=WorkflowId("flow"),
        agent=AgentId(agent),
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
        self.core.prepare(request)
        self.check()
        self.rest()

    def teach(self, *agents: str, questions: int = 3) -> None:
        """Enough dense prefills that everything is shareable from now on."""
        for at in range(questions):
            question = tokens(50 + at, QUESTION)
            answer = self.write(question, run=f"past-{at}")
            for agent in agents:
                self.serve(prompt_of(agent, question, answer, run=f"past-{at}"))
            self.core.end_run(RunKey(SPACE, "client", RunId(f"past-{at}")))
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
    return replace(request, segments=tuple(segments), request_id=RequestId(f"hint-{next(_ids)}"))
