"""Faults in one agent's translation, and clean traffic: how soon the guard stops what, and its false alarms.

A fault is put into the last agent's translation, once that is proved: into how an engine writes, into
what is stored, or by questions of another task. A call is one of that agent.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import Tensor, nn

from kedge.anchors.anchor import AnchorId, PlaceholderSite
from kedge.anchors.offsets import OffsetTable
from kedge.anchors.pool import AnchorPool
from kedge.anchors.translator import Translate, Translation, translate_into
from kedge.bench.shapes import Loaded, load_model, to_compare
from kedge.engine.base import Engine
from kedge.engine.common.watched import WatchedEngine, WatchedStream, Watcher
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError, GenerationFailed, PlanError
from kedge.guard import GuardMode
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.guard.comparison import TOP, mean_divergence
from kedge.reuse.guard.fidelity import FAR
from kedge.runner.run import run
from kedge.settings import EngineSettings, GuardSettings
from kedge.types import AgentId, Completion, GenerateRequest, ReuseMode, new_request_id
from kedge.workflow.graph import Workflow
from kedge.workloads import real
from kedge.workloads.base import QUESTION

PARTS = ("faults", "clean")
TOKENS = 24
"""First tokens of each answer, which are generated"""
WARMERS = 4
"""Questions that are answered side by side while pools fill"""
IDLE = 300.0
"""Most seconds to wait for the checks that are left"""
AT_ONCE = 8
"""Questions and prompts of dense prefill side by side"""
QUIET = 10
"""Calls in a row that translate nothing after which an agent counts as off without the guard"""
COMPARED = 20
"""Most calls whose distributions are compared"""
ROUND = 20
"""Questions of clean traffic between two looks at the guard"""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class GuardBenchSettings:
    """What all parts share. A question is one call of every agent of the team."""

    model: Path = Path("smollm2")
    task: str = "reading"
    """One of `kedge.workloads.real`"""
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

    def engine(self, **guard: Any) -> EngineSettings:
        """Return the settings of an engine that translates as soon as that is proved, whatever it costs."""
        planner = {"by_cost": False}
        return to_compare(device=self.device, kv_memory=512 << 20, planner=planner, guard=GuardSettings(**guard))

    def flow(self) -> Workflow:
        """Return the team, with short answers. Raises `ConfigError` for an unknown task."""
        if self.task not in real.TEAMS:
            raise ConfigError("task", self.task, f"must be one of {', '.join(real.TEAMS)}")
        return real.TEAMS[self.task].workflow().shortened(TOKENS)

    def questions(self, *, later: bool = False, task: str | None = None) -> Iterator[str]:
        """Yield the questions before a fault, or the `later` ones, of which none is among these."""
        return (one.text for one in real.load(task or self.task, seed=self.seed)[1][later::2])


QUICK = GuardBenchSettings(learned=8, before=2, limit=20, calls=100)


# engines --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A request with its answer."""

    request: GenerateRequest
    completion: Completion

    @property
    def is_translated(self) -> bool:
        return self.completion.receipt.translated > 0


class RankedEngine(WatchedEngine):
    """An engine that gives the log-probabilities of every answer of a run, so that it can be compared later."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Watcher())
        self.asked: dict[AgentId, GenerateRequest] = {}

    def submit(self, request: GenerateRequest) -> WatchedStream:
        self.asked[request.agent] = request = replace(request, logprobs=TOP)
        return super().submit(request)


class GuardLane:
    """A team's engine. Questions are answered one after the other, but for those that warm it up."""

    def __init__(self, loaded: Loaded, flow: Workflow, config: EngineSettings) -> None:
        self.flow, self.agent = flow, AgentId(flow.agents[-1].id)
        self.engine = LocalEngine.from_runner(*loaded, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def warm(self, questions: Iterable[str]) -> None:
        """Answer questions side by side, and carry out all checks of them."""
        with ThreadPoolExecutor(WARMERS, "kedge-guard-bench") as pool:
            list(pool.map(self.ask, questions))
        self.engine.wait_idle(IDLE)

    def ask(self, question: str, reuse: ReuseMode = ReuseMode.TRANSLATE) -> list[AnsweredCall]:
        """Return the calls of all agents; none where one fails, which a fault may lead to."""
        ranked = RankedEngine(self.engine)
        try:
            done = run(ranked, self.flow, {QUESTION: question}, reuse=reuse, on_tool_error="text")
        except GenerationFailed:
            return []
        return [AnsweredCall(ranked.asked[one.agent], one.completion) for one in done.results]

    def prove(self, questions: Iterable[str]) -> None:
        """Answer questions one after the other, each with its checks, until the last agent's prompt is translated."""
        for question in questions:
            calls = self.ask(question)
            self.engine.wait_idle(IDLE)
            if calls[-1].is_translated:
                return

    def records(self) -> list[dict[str, Any]]:
        """Return the guard's records of all placeholders."""
        guard: Any = self.engine.inspect()["guard"]
        return guard["agents"]

    def has_stopped(self) -> bool:
        """Return whether the guard withholds what the last agent would translate, or its proof no longer holds."""
        records = [one for one in self.records() if one["agent"] == self.agent]
        return any(one["withheld"] or (one["fidelity"] and not one["fidelity"]["rung"]) for one in records)


class DenseOracle(GuardLane):
    """The right answers. It shares the model with the lanes, so no lane may work while it does."""

    def __init__(self, loaded: Loaded, settings: GuardBenchSettings) -> None:
        super().__init__(loaded, settings.flow(), settings.engine(mode=GuardMode.OFF))
        self._known = dict[str, str]()

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Return the last agent's answers to these questions, which the team answers without reuse."""
        new = [one for one in dict.fromkeys(questions) if one not in self._known]
        with ThreadPoolExecutor(AT_ONCE, "kedge-oracle") as pool:
            found = pool.map(partial(self.ask, reuse=ReuseMode.OFF), new)
            self._known.update(zip(new, (calls[-1].completion.text for calls in found), strict=True))
        return [self._known[one] for one in questions]

    def compare(self, calls: Iterable[AnsweredCall]) -> list[float]:
        """Return the mean divergences of translated answers from those to the same prompts without reuse, in nats a
        token.
        """
        chosen = list(islice((call for call in calls if call.is_translated), COMPARED))
        again = (replace(one.request, request_id=new_request_id(), reuse=ReuseMode.OFF) for one in chosen)
        dense = [self.engine.submit(one) for one in again]
        found = (mean_divergence(one.result(), call.completion) for call, one in zip(chosen, dense, strict=True))
        return [one for one in found if one is not None]


# wrong writes ---------------------------------------------------------------------------------------------------------

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


def write_wrongly(parts: EngineParts, make: MakeWrite, agent: AgentId) -> None:
    """Write the translations of an agent's requests wrongly from now on."""
    right, wrong = parts.write, make(parts.runner, parts.storage)

    def write(request: GenerateRequest, table: SlotTable, items: Sequence[Translation]) -> None:
        if request.agent == agent:
            wrong(table, items)
        else:
            right(request, table, items)

    parts.write = write


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


# wrong offsets --------------------------------------------------------------------------------------------------------

POISONED, LOUDNESS = 12, 3.0
"""Anchors with random offsets, and their standard deviation over the largest right one"""


def agent_sites(parts: EngineParts, agent: AgentId) -> list[tuple[AnchorPool, PlaceholderSite]]:
    """Return the sites of an agent's placeholders, with their pools. Raises `PlanError` without any."""
    pools = parts.anchors.pools.values()
    found = [(pool, site) for pool in pools for site in pool.sites if site.agent_key.split("/")[1] == agent]
    if not found:
        raise PlanError("anchors", agent, "has nothing that could be damaged: more questions are needed before")
    return found


def swap_heads(parts: EngineParts, agent: AgentId) -> None:
    """Reverse the order of the heads in an agent's offsets."""
    spec = parts.runner.spec
    for pool, site in agent_sites(parts, agent):
        for table in pool.sites[site].tables:
            heads = table.arena.view(len(table.arena), spec.layers - 1, 2, spec.kv_heads, spec.head_dim)
            heads.copy_(heads.flip(3))


def poison_anchors(parts: EngineParts, agent: AgentId, count: int = POISONED) -> None:
    """Make the offsets of so many anchors random, wherever the agent holds them: those that were used most."""
    sites = [(pool, pool.sites[site]) for pool, site in agent_sites(parts, agent)]
    held = {(pool.anchors[one].hits, one): pool.anchors[one] for pool, offsets in sites for one in offsets.anchors}
    worst = [anchor for _, anchor in sorted(held.items(), reverse=True)[:count]]
    for (pool, offsets), anchor in product(sites, worst):
        if pool.anchors.get(anchor.id) is anchor and anchor.id in offsets.anchors:
            for table in offsets.tables:  # one may lack it: it has offsets of the value, and none of the text behind
                _randomize(table, anchor.id)


def _randomize(table: OffsetTable, anchor: AnchorId) -> None:
    rows = table.rows_of_anchors([anchor])
    right = table.arena[rows].float()
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0)).to(right.device)
    table.arena[rows] = (noise * LOUDNESS * (right.abs().max() if len(rows) else 0)).to(table.arena.dtype)


# faults ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What becomes of the last agent's translation, in one of three ways."""

    write: MakeWrite | None = None
    """How what is translated is written"""
    harm: Callable[[EngineParts, AgentId], None] | None = None
    """What is done to the agent's stored offsets"""
    drifts: bool = False
    """Whether the questions are of another task than those that were learned from"""


FAULTS: Mapping[str, Fault] = {
    "rope_base": Fault(write=at_another_base),
    "swapped_heads": Fault(write=with_swapped_heads),
    "corrupt_base": Fault(write=from_corrupt_base),
    "swapped_offsets": Fault(harm=swap_heads),
    "poisoned_anchors": Fault(harm=poison_anchors),
    "drifted_task": Fault(drifts=True),
}


@dataclass
class Served:
    """What one engine served of the last agent's calls: before the fault, and from then on."""

    before: list[AnsweredCall] = field(default_factory=list)
    after: list[AnsweredCall | None] = field(default_factory=list)
    """None for one that failed"""
    questions: list[str] = field(default_factory=list)
    """Those after the fault"""
    is_off: bool = False

    @property
    def calls(self) -> list[AnsweredCall]:
        """The calls with the fault that were answered."""
        return [call for call in self.after if call]

    def off_after(self) -> int | None:
        """Return the calls until translation was off: 0 where nothing was translated any more, None where it stayed on,
        or never was.
        """
        if not any(call.is_translated for call in self.before):
            return None
        calls = self.calls
        last = max((number for number, call in enumerate(calls, 1) if call.is_translated), default=0)
        return len(calls) if self.is_off else last if len(calls) - last >= QUIET else None

    def figures(self, oracle: DenseOracle) -> dict[str, Any]:
        """Return what became of the fault, and how much it changes: one that changes nothing is none."""
        final = real.TEAMS[oracle.flow.name].final
        decisions = zip(self.after, oracle.answers(self.questions), strict=True)
        texts = ((call.completion.text if call else "", dense) for call, dense in decisions)
        seen = oracle.compare(self.calls)
        return {
            "agent": oracle.agent,
            "calls": len(self.calls),
            "off_after": (off_after := self.off_after()),
            "detected": off_after is not None,
            "lived": sum(call.is_translated for call in self.calls),
            "changed_served": sum((final(ours) or ours) != (final(dense) or dense) for ours, dense in texts),
            "calls_before": len(self.before),
            "translated_before": sum(call.is_translated for call in self.before),
            "kl_before": fmean(oracle.compare(self.before) or [0.0]),
            "kl": fmean(seen or [0.0]),
            "far": fmean([one > FAR for one in seen] or [0.0]),
        }


def measure_fault(fault: Fault, loaded: Loaded, settings: GuardBenchSettings, proved: Path) -> Served:
    """Let an engine prove how it translates, inject the fault and ask until the guard has stopped it.

    What is learned and proved is kept in the folder `proved` for the next fault.
    """
    served = Served()
    with GuardLane(loaded, settings.flow(), settings.engine()) as lane:
        if any(proved.iterdir()):
            lane.engine.load(proved)
        else:
            questions = settings.questions()
            lane.warm(islice(questions, settings.learned))
            lane.prove(islice(questions, settings.limit))
            lane.engine.save(proved)
        later = settings.questions(later=True)
        for question in islice(later, settings.before):
            served.before += lane.ask(question)[-1:]
            lane.engine.wait_idle(IDLE)
        if make := fault.write:
            lane.engine.query(lambda parts: write_wrongly(parts, make, lane.agent))
        if fault.harm:
            lane.engine.query(lambda parts: fault.harm and fault.harm(parts, lane.agent))
        if fault.drifts:
            later = settings.questions(task=next(name for name in real.TEAMS if name != settings.task))
        for question in islice(later, settings.limit):
            served.questions.append(question)
            served.after.append(next(reversed(lane.ask(question)), None))
            if settings.idle:
                lane.engine.wait_idle(IDLE)
            if lane.has_stopped():
                served.is_off = True
                break
    return served


def measure_clean(loaded: Loaded, settings: GuardBenchSettings, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Ask a team of clients until there have been `settings.calls` calls. Returns how often an agent became suspect,
    and whether one was switched off on evidence.
    """
    calls, translated, questions, flow = 0, 0, settings.questions(), settings.flow()
    with GuardLane(loaded, flow, settings.engine()) as lane, ThreadPoolExecutor(settings.clients) as pool:
        while calls < settings.calls and (asked := list(islice(questions, ROUND))):
            for answered in pool.map(lane.ask, asked[: -(-(settings.calls - calls) // len(flow.agents))]):
                calls += len(answered)
                translated += sum(call.is_translated for call in answered)
            progress(f"clean: {calls} of {settings.calls} calls")
        figures: Any = lane.engine.inspect()["guard"]
        suspicions, breaches = (by_agent(lane.records(), name) for name in ("suspicions", "breaches"))
    return {
        "calls": calls,
        "translated": translated,
        "checks": figures["checks_done"],
        "false_alarms": suspicions,
        "ever_off": breaches > 0,
    }


def by_agent(records: Iterable[Mapping[str, Any]], name: str) -> int:
    """Return a count summed over agents: one alarm concerns several placeholders of an agent at once."""
    most: dict[str, int] = {}
    for record in records:
        most[record["agent"]] = max(most.get(record["agent"], 0), record[name])
    return sum(most.values())


def measure(settings: GuardBenchSettings, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure the chosen parts, one after the other, on one model; return the figures as written to a file of results.
    Raises `ConfigError` for an unknown name.
    """
    settings.flow()
    for key, names, known in (("fault", settings.faults, tuple(FAULTS)), ("part", settings.parts, PARTS)):
        for name in names:
            if name not in known:
                raise ConfigError(key, name, f"must be one of {', '.join(known)}")
    loaded = load_model(settings.model, to_compare(device=settings.device))
    found: dict[str, Any] = {}
    if "faults" in settings.parts:
        with ExitStack() as stack:
            proved = Path(stack.enter_context(TemporaryDirectory(prefix="kedge-guard-")))
            oracle = stack.enter_context(DenseOracle(loaded, settings))
            found["faults"] = {}
            for name in settings.faults or FAULTS:
                progress(f"fault: {name}")
                found["faults"][name] = measure_fault(FAULTS[name], loaded, settings, proved).figures(oracle)
    if "clean" in settings.parts:
        found["clean"] = measure_clean(loaded, settings, progress)
    return found
