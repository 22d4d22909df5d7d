"""The faults, each injected into one agent's translation through extension points or stored state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from kedge.anchors.anchor import AnchorId, PlaceholderSite
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.translator import Translate, Translation, translate_into
from kedge.bench.shapes import Loaded, to_compare
from kedge.engine.base import Stream
from kedge.engine.common.watched import WatchedEngine, Watcher
from kedge.engine.local.build import EngineParts
from kedge.engine.local.components import Assembler, EngineComponents, Translating
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError, GenerationFailed, PlanError
from kedge.guard import GuardMode
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.reuse.plan import ReusePlan
from kedge.runner.run import run
from kedge.settings import EngineSettings, GuardSettings, PlannerSettings
from kedge.types import AgentId, Completion, GenerateRequest, RequestId, ReuseMode, TenantId
from kedge.workflow.graph import Workflow
from kedge.workloads import real
from kedge.workloads.base import QUESTION, Question
from kedge.workloads.miniature import TASKS

Move = Literal["always", "unlearned", "never"]
LEARNED_MOVE: Move = "never"
"""All values are translated by anchors, so that faults of anchors show: offsets of what is moved without are zero"""
DEFAULT_MOVE: Move = PlannerSettings().move
PARTS = ("faults", "clean", "clean_default")
"""What can be measured, by the names of the figures"""


@dataclass(frozen=True)
class GuardTask:
    """What a team is asked."""

    name: str
    flow: Workflow
    final: Callable[[str], str | None] = field(repr=False)
    """The decision in the last agent's answer"""
    questions: Callable[[int], Iterator[Question]] = field(repr=False)
    """By seed; those of an odd seed are none of the even one before"""
    is_toy: bool = True

    def texts(self, seed: int) -> Iterator[str]:
        """Return the questions' texts."""
        return (question.text for question in self.questions(seed))


def guard_task(name: str, tokens: int = 24) -> GuardTask:
    """Return a task by name: a bundled one, or one of real text, of whose answers the first `tokens` are generated.
    Raises `ConfigError` for an unknown one.
    """
    if name in TASKS:
        toy = TASKS[name]
        return GuardTask(name, toy.workflow(), toy.final, partial(toy.questions, "test"))
    if name not in real.TEAMS:
        raise ConfigError("task", name, f"must be one of {', '.join((*TASKS, *real.TEAMS))}")
    flow = real.TEAMS[name].workflow()
    shorter = tuple(replace(agent, max_tokens=min(agent.max_tokens, tokens)) for agent in flow.agents)
    return GuardTask(name, replace(flow, agents=shorter), real.TEAMS[name].final, partial(_half, name), is_toy=False)


def _half(name: str, seed: int) -> Iterator[Question]:
    return iter(real.load(name, seed=seed // 2)[1][seed % 2 :: 2])


@dataclass(frozen=True)
class GuardBenchSettings:
    """What all parts share. A question is one call of every agent of the team."""

    model: Path | None = None
    """None: the bundled one, a toy"""
    task: str = "code"
    """Of the bundled tasks, `code` depends most on what is translated"""
    parts: tuple[str, ...] = PARTS
    """What is measured"""
    faults: tuple[str, ...] = ()
    """Names of the faults to inject; none: all"""
    learned: int = 24
    """Questions that fill the pools; then more are asked, at most `limit`, until it is proved how to translate"""
    before: int = 8
    """Questions after those, for the distributions without the fault"""
    limit: int = 50
    """Questions after which a fault counts as not found"""
    calls: int = 1000
    """Calls without a fault"""
    idle: bool = False
    """Whether checks are carried out after every question, as in a pause of the traffic; else only within their
    budget"""
    clients: int = 4
    seed: int = 0
    device: str = "auto"

    def engine(self, guard: GuardSettings | None = None, move: Move = LEARNED_MOVE) -> EngineSettings:
        """Return the settings of an engine that translates as soon as that is proved: on a real model, where only
        anchors are near enough, also with the default `move`.
        """
        planner = {"by_cost": False, "move": move if self.model is None else DEFAULT_MOVE}
        return to_compare(device=self.device, kv_memory=512 << 20, planner=planner, guard=guard or GuardSettings())


QUICK = GuardBenchSettings(learned=8, before=2, limit=20, calls=100)


WARMERS = 4
"""Questions that are answered side by side while pools fill"""
IDLE = 300.0
"""Most seconds to wait for the checks that are left"""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A request with its answer."""

    request: GenerateRequest
    completion: Completion


@dataclass
class CallRecorder(Watcher):
    """A watcher that keeps every answered call."""

    calls: list[AnsweredCall] = field(default_factory=list)
    _open: dict[RequestId, GenerateRequest] = field(default_factory=dict)

    def submitted(self, request: GenerateRequest) -> None:
        self._open[request.request_id] = request

    def ended(self, tenant: TenantId, request_id: RequestId, completion: Completion | None = None) -> None:  # noqa: ARG002
        request = self._open.pop(request_id, None)
        if request and completion:
            self.calls.append(AnsweredCall(request, completion))


class RankedEngine(WatchedEngine):
    """An engine that gives the log-probabilities of every answer, so that it can be compared later."""

    def submit(self, request: GenerateRequest) -> Any:
        return super().submit(replace(request, logprobs=TOP))


class GuardLane(AbstractContextManager["GuardLane"]):
    """A team's engine. Questions are answered one after the other, but for those that warm it up."""

    def __init__(
        self,
        loaded: Loaded,
        flow: Workflow,
        config: EngineSettings,
        components: EngineComponents = EngineComponents(),  # noqa: B008 (it is frozen)
    ) -> None:
        runner, tokenizer = loaded
        self.flow, self.engine = flow, LocalEngine.from_runner(runner, tokenizer, config, components=components)

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def warm(self, questions: Iterable[str], flow: Workflow | None = None) -> None:
        """Answer questions side by side, and carry out all checks of them."""
        with ThreadPoolExecutor(WARMERS, "kedge-guard-bench") as pool:
            list(pool.map(lambda question: self.ask(question, flow), questions))
        self.engine.wait_idle(IDLE)

    def ask(
        self, question: str, flow: Workflow | None = None, reuse: ReuseMode = ReuseMode.TRANSLATE
    ) -> tuple[str, list[AnsweredCall]]:
        """Return the last agent's answer, and all calls in the order in which they ended."""
        recorder = CallRecorder()
        return self._run(question, flow or self.flow, reuse, recorder), recorder.calls

    def attempt(self, question: str) -> tuple[str, list[AnsweredCall]]:
        """As `ask`; where a call fails, which a fault may lead to, the answer is empty and the calls end before it."""
        recorder = CallRecorder()
        try:
            return self._run(question, self.flow, ReuseMode.TRANSLATE, recorder), recorder.calls
        except GenerationFailed:
            return "", recorder.calls

    def _run(self, question: str, flow: Workflow, reuse: ReuseMode, recorder: CallRecorder) -> str:
        ranked = RankedEngine(self.engine, recorder)
        return run(ranked, flow, {QUESTION: question}, reuse=reuse, on_tool_error="text").text

    def again(self, call: AnsweredCall) -> Stream:
        """Submit the request of another lane's call once more, computed densely."""
        request = replace(call.request, request_id=RequestId(f"{call.request.request_id}-dense"))
        return self.engine.submit(replace(request, reuse=ReuseMode.OFF, logprobs=TOP))

    def prove(self, questions: Iterable[str]) -> None:
        """Answer questions one after the other, each with its checks, until the last agent's prompt is translated."""
        for question in questions:
            _, calls = self.ask(question)
            self.engine.wait_idle(IDLE)
            if calls[-1].completion.receipt.translated:
                return

    def stopped(self, agent: AgentId) -> bool:
        """Return whether the guard withholds what an agent's calls would translate, or its proof no longer holds."""
        records = [one for one in guard_records(self.engine) if one["agent"] == agent]
        return any(one["withheld"] or (one["fidelity"] and not one["fidelity"]["rung"]) for one in records)


def guard_records(engine: LocalEngine) -> list[dict[str, Any]]:
    """Return the guard's records of all placeholders."""
    guard: Any = engine.inspect()["guard"]
    return guard["agents"]


AT_ONCE = 8
"""Questions and prompts that are computed side by side"""


class DenseOracle(AbstractContextManager["DenseOracle"]):
    """The right answers. It shares the model with the lanes, so no lane may work while it does."""

    def __init__(self, loaded: Loaded, flow: Workflow, device: str) -> None:
        config = EngineSettings(device=device, guard=GuardSettings(mode=GuardMode.OFF))
        self._lane, self._known = GuardLane(loaded, flow, config), dict[str, str]()

    def __exit__(self, *error: object) -> None:
        self._lane.engine.close()

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Return the last agent's answers to these questions, which the team answers without reuse."""
        new = [one for one in dict.fromkeys(questions) if one not in self._known]
        with ThreadPoolExecutor(AT_ONCE, "kedge-oracle") as pool:
            texts = pool.map(lambda question: self._lane.ask(question, reuse=ReuseMode.OFF)[0], new)
            self._known.update(zip(new, texts, strict=True))
        return [self._known[one] for one in questions]

    def compare(self, calls: Sequence[AnsweredCall]) -> list[float]:
        """Return the mean divergences of answers from those to the same prompts without reuse, in nats a token."""
        streams = [(call, self._lane.again(call)) for call in calls]
        found = [mean_divergence(stream.result(), call.completion) for call, stream in streams]
        return [one for one in found if one is not None]


TIMES_BASE = 50.0
"""The wrong base over the model's: that of long-context models over the usual 10000"""


class WrongBase(nn.Module):
    """A rotary module with the model's frequencies as they are at another base."""

    def __init__(self, rotary: Rotation) -> None:
        super().__init__()
        if rotary.tables is None:
            raise ConfigError("model", "rotation", "the fault needs one rotation of all layers, half with half")
        cos, sin = rotary.tables
        frequencies = torch.atan2(sin[1], cos[1])
        places = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
        self._frequencies = frequencies / TIMES_BASE**places

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, positions, rotary_dim]."""
        angles = position_ids[..., None] * self._frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


EVERY = 61
"""Distance of flipped bytes: no multiple of a number's bytes, so that all of them are met"""

MakeWrite = Callable[[ModelRunner, PagedStorage], Translate]


@dataclass(slots=True)
class WrongWrites:
    """The component: the translations of `agent`'s requests are written wrongly, once there is one."""

    make: MakeWrite
    agent: AgentId | None = None

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        """Return the assembler of an engine."""
        return _WrongAssembler(self, Translating(runner, storage), self.make(runner, storage))


@dataclass(frozen=True, slots=True)
class _WrongAssembler:
    works_ahead: ClassVar[bool] = False
    fault: WrongWrites
    right: Assembler
    wrong: Translate

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.agent != self.fault.agent:
            return self.right.assemble(request, table, plan)
        self.wrong(table, plan.translations)
        return plan


def at_another_base(runner: ModelRunner, storage: PagedStorage) -> Translate:
    """Rotate keys by another RoPE base than the model's."""
    other = copy.copy(storage)
    other.rotary = Rotary(WrongBase(runner.rotary), runner.max_positions, runner.device)
    return translate_into(other)


def with_swapped_heads(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Write the heads in reverse order."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        for item in translations:
            translate(table, [item])
            slots = table.slots[item.start : item.start + item.base.tokens].to(storage.keys.device)
            for pool in (storage.keys, storage.values):
                pool[:, slots] = pool[:, slots].flip(2)

    return write


def from_corrupt_base(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Read base KV of which bytes are flipped."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        translate(table, [replace(item, base=_corrupt(item.base)) for item in translations])

    return write


def flip_bytes(numbers: Tensor) -> None:
    """Flip some bytes of contiguous numbers, in place."""
    raw = numbers.view(torch.uint8).flatten()
    raw[::EVERY] ^= 0xFF


def _corrupt(base: KVSegment) -> KVSegment:
    keys, values = (numbers.clone(memory_format=torch.contiguous_format) for numbers in (base.keys, base.values))
    flip_bytes(keys)
    flip_bytes(values)
    return KVSegment(keys, values)


def agent_sites(parts: EngineParts, agent: AgentId) -> list[tuple[AnchorPool, PlaceholderSite]]:
    """Return the sites of an agent's placeholders, with their pools."""
    pools = parts.learned[0].pools.values()
    return [(pool, site) for pool in pools for site in pool.sites if site.agent_key.split("/")[1] == agent]


def swap_wordings(parts: EngineParts, agent: AgentId, stale: Iterable[PlaceholderSite]) -> None:
    """Exchange the offsets of an agent's sites with those at the same places of an earlier wording. What was learned
    of how well offsets predict stays: that they are others goes unnoticed.
    """
    earlier = set(stale)
    pairs = [
        (pool, max(now, key=_held_in(pool)), max(then, key=_held_in(pool)))
        for pool in parts.learned[0].pools.values()
        if (now := [site for held, site in agent_sites(parts, agent) if held is pool and site not in earlier])
        and (then := [site for site in pool.sites if site in earlier])
    ]
    _require("earlier wording", agent, pairs)
    for pool, site, other in pairs:
        ours, theirs = pool.sites[site], pool.sites[other]
        pool.sites[site], pool.sites[other] = theirs, ours
        ours.calibration, theirs.calibration = theirs.calibration, ours.calibration


def _held_in(pool: AnchorPool) -> Callable[[PlaceholderSite], int]:
    """Return how many anchors a site holds: a rare prompt in which a value came from elsewhere has a site of its
    own.
    """
    return lambda site: len(pool.sites[site].holders)


def swap_heads(parts: EngineParts, agent: AgentId, spec: KVSpec) -> None:
    """Reverse the order of the heads in an agent's offsets."""
    for table in _tables(parts, agent):
        heads = table.arena.view(len(table.arena), spec.layers - 1, 2, spec.kv_heads, spec.head_dim)
        heads.copy_(heads.flip(3))


def poison_anchors(parts: EngineParts, agent: AgentId, count: int, loudness: float) -> None:
    """Make the offsets of so many anchors random, wherever the agent holds them: those that were used most. Their
    standard deviation is `loudness` times the largest right one.
    """
    sites = [(pool, pool.sites[site]) for pool, site in agent_sites(parts, agent)]
    held = {(pool.anchors[one].hits, one): pool.anchors[one] for pool, offsets in sites for one in offsets.holders}
    _require("anchors", agent, held)
    worst = [anchor for _, anchor in sorted(held.items(), reverse=True)[:count]]
    for (pool, offsets), anchor in product(sites, worst):
        if pool.anchors.get(anchor.id) is anchor and anchor.id in offsets.holders:
            for table in offsets.tables:  # one may lack it: it has offsets of the value, and none of the text behind
                _randomize(table, anchor.id, loudness)


def _randomize(table: OffsetTable, anchor: AnchorId, loudness: float) -> None:
    rows = table.rows_of_anchors([anchor])
    right = table.arena[rows].float()
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)).to(right.device)
    table.arena[rows] = (noise * loudness * (right.abs().max() if len(rows) else 0)).to(table.arena.dtype)


def _tables(parts: EngineParts, agent: AgentId) -> Iterator[OffsetTable]:
    sites = agent_sites(parts, agent)
    _require("anchors", agent, sites)
    return (table for pool, site in sites for table in pool.sites[site].tables)


def _require(key: str, agent: str, found: Sized) -> None:
    if not found:
        raise PlanError(key, agent, "has nothing that could be damaged: more questions are needed before the fault")


EARLIER = (
    "You give the final answer. An example: Lena leaves Rome. Lena sells pens. Lena owns 4 keys. Which city does Lena "
    "leave? Options: Oslo, Rome, Lima, Bern. The answer is Rome."
)
"""An earlier version of a role: of those that were tried, one under which offsets differ most from those of a role that
the bundled model knows"""
KNOWN_KIND, LATER_KIND = "city", "all"
"""Kinds of questions of a task that has several: those that are learned from, and those that come later. The prompts
look the same, but the answers to the later ones depend on numbers in all sentences, not on one city"""


class GuardFault:
    """A fault of the last agent's translation; one object per engine."""

    move: Move = LEARNED_MOVE
    """How the toy's engine moves values"""
    learns_alike: ClassVar[bool] = True
    """Whether what is learned and proved before it is the same as before others"""

    @classmethod
    def fits(cls, task: GuardTask) -> bool:  # noqa: ARG003
        """Return whether a task can have it."""
        return True

    def components(self) -> EngineComponents:
        """Return what the engine is built with."""
        return EngineComponents()

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        """Do what must happen before the pools fill."""

    def learned(self, task: GuardTask) -> GuardTask:
        """Return the task whose questions are learned from."""
        return task

    def later(self, task: GuardTask) -> GuardTask:
        """Return the task whose questions are asked once the fault is there."""
        return task

    def inject(self, lane: GuardLane) -> AgentId:
        """Inject the fault. Returns the agent that it concerns."""
        agent = last_agent(lane.flow)
        self.harm(lane, agent)
        return agent

    def harm(self, lane: GuardLane, agent: AgentId) -> None:
        """Make an agent's translation wrong from now on; nothing where the questions alone are others."""


def last_agent(flow: Workflow) -> AgentId:
    """Return the agent that decides."""
    return AgentId(flow.agents[-1].id)


class WrongWritesOf(GuardFault):
    """What translation writes is wrong, in one way or another."""

    def __init__(self, make: MakeWrite, move: Move = LEARNED_MOVE) -> None:
        self._writes, self.move = WrongWrites(make), move

    def components(self) -> EngineComponents:
        return EngineComponents(assembler=self._writes)

    def harm(self, lane: GuardLane, agent: AgentId) -> None:  # noqa: ARG002
        self._writes.agent = agent


class StaleAnchors(GuardFault):
    """Offsets that were measured under another wording of the role are used for this one."""

    learns_alike = False

    def __init__(self) -> None:
        self._stale: list[PlaceholderSite] = []

    def before(self, lane: GuardLane, questions: list[str]) -> None:
        *others, last = lane.flow.agents
        lane.warm(questions, replace(lane.flow, agents=(*others, replace(last, system=EARLIER))))
        sites = lane.engine.query(partial(agent_sites, agent=last_agent(lane.flow)))
        self._stale = [site for _, site in sites]

    def harm(self, lane: GuardLane, agent: AgentId) -> None:
        lane.engine.query(partial(swap_wordings, agent=agent, stale=self._stale))


class SwappedOffsets(GuardFault):
    """The heads of the offsets are in another order."""

    def harm(self, lane: GuardLane, agent: AgentId) -> None:
        lane.engine.query(partial(swap_heads, agent=agent, spec=lane.engine.kv_spec))


class DriftedTask(GuardFault):
    """The questions are of another task than those that were learned from."""

    def later(self, task: GuardTask) -> GuardTask:
        names = TASKS if task.is_toy else real.TEAMS
        other = guard_task(next(name for name in names if name != task.name))
        return replace(task, questions=other.questions)


class DriftedQuestions(GuardFault):
    """The questions look like those that were learned from, but the answers depend on other tokens of them."""

    learns_alike = False

    @classmethod
    def fits(cls, task: GuardTask) -> bool:
        return "kind" in next(task.questions(0)).facts

    def learned(self, task: GuardTask) -> GuardTask:
        return _of_kind(task, KNOWN_KIND)

    def later(self, task: GuardTask) -> GuardTask:
        return _of_kind(task, LATER_KIND)


def _of_kind(task: GuardTask, kind: str) -> GuardTask:
    def questions(seed: int) -> Iterator[Question]:
        return (question for question in task.questions(seed) if question.facts["kind"] == kind)

    return replace(task, questions=questions)


class PoisonedAnchors(GuardFault):
    """The offsets of the anchors that were used most are random, with a standard deviation of `loudness` times the
    largest right one.
    """

    def __init__(self, count: int, loudness: float) -> None:
        self._count, self._loudness = count, loudness

    def harm(self, lane: GuardLane, agent: AgentId) -> None:
        lane.engine.query(partial(poison_anchors, agent=agent, count=self._count, loudness=self._loudness))


FAULTS: Mapping[str, Callable[[], GuardFault]] = {
    "rope_base": partial(WrongWritesOf, at_another_base),
    "stale_anchors": StaleAnchors,
    "swapped_heads": partial(WrongWritesOf, with_swapped_heads),
    "swapped_offsets": SwappedOffsets,
    "drifted_task": DriftedTask,
    "drifted_questions": DriftedQuestions,
    "poisoned_anchor": partial(PoisonedAnchors, 1, 3.0),
    "poisoned_anchors": partial(PoisonedAnchors, 12, 3.0),
    "default_rope_base": partial(WrongWritesOf, at_another_base, DEFAULT_MOVE),
    "default_swapped_heads": partial(WrongWritesOf, with_swapped_heads, DEFAULT_MOVE),
    "default_corrupt_base": partial(WrongWritesOf, from_corrupt_base, DEFAULT_MOVE),
}
"""Name -> a new one for each engine"""
