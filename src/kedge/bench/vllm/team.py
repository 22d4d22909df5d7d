"""Five agents who read all messages before theirs, on stock vLLM and with the plug-in (KVCOMM, tables 2 and 3).

The workload is the paper's copy machine, in random tokens on random weights, so nothing follows about quality: the
criterion's thresholds are opened, its work stays in the clock. Stock vLLM is measured twice: with the agents' own
prefixes in its cache, and with an empty cache, which is dense prefill.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kedge.bench.ttft import LEAD, TAIL, CopyMachine
from kedge.bench.vllm.lane import KvRoom, VllmCall, VllmLane
from kedge.integrations.vllm.engine.requests import expected_prompt, request_hints
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.reuse.layout import with_trails
from kedge.settings import PlannerSettings
from kedge.types import GenerateRequest, Tokens

OPEN = {"gamma": 2.0, "max_error": 1e9, "weak_error": 1e9}
"""Thresholds that share everything: random weights have no meaning to keep."""
LEARNING_S = 0.25
"""Seconds between two prompts, in which the plug-in learns."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TeamSettings:
    """The workload (tokens) and the number of repeats."""

    question: int = 1000
    prefix: int = 512
    output: int = 512
    agents: int = 5
    samples: int = 8
    """Samples in every pool before the measurement."""
    repeats: int = 3
    seed: int = 0

    @property
    def room(self) -> KvRoom:
        """Room for all prompts and answers: nothing is ever evicted."""
        longest = self.prefix + self.question + self.agents * (self.output + 1 + self.samples + LEAD) + TAIL
        return KvRoom(3 * self.agents * longest, longest)

    @property
    def plugin(self) -> dict[str, Any]:
        """The plug-in's settings: pools as large as the samples."""
        pools = {"capacity": self.samples + self.repeats, "min_anchors": self.samples, "max_bytes": 8 << 30}
        anchors = {**OPEN, **pools, "max_base_bytes": 4 << 30}
        return {"anchors": anchors, "planner": {"by_cost": False}, "max_captures": 2 * self.agents}


QUICK_TEAM = TeamSettings(question=400, prefix=256, output=128, samples=4, repeats=2)
"""Fewer tokens and repeats."""


@dataclass
class VllmAgentTimes:
    """One agent's seconds to the first token, one entry per repeat."""

    agent: int
    prompt_tokens: int = 0
    translated_tokens: int = 0
    """Minimum of all repeats."""
    dense: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    kedge: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        ms = {name: [round(1e3 * one, 3) for one in getattr(self, name)] for name in ("dense", "stock", "kedge")}
        medians = {f"{name}_ms": statistics.median(values) for name, values in ms.items()}
        return {
            "agent": self.agent,
            "prompt_tokens": self.prompt_tokens,
            "translated_tokens": self.translated_tokens,
            **medians,
            "speedup_over_dense": round(medians["dense_ms"] / medians["kedge_ms"], 2),
            "speedup_over_stock": round(medians["stock_ms"] / medians["kedge_ms"], 2),
            **{f"all_{name}_ms": values for name, values in ms.items()},
        }


@dataclass(frozen=True)
class TeamResult:
    """All agents' times, and the seconds of a whole question on either engine, base prefills included."""

    settings: TeamSettings
    agents: list[VllmAgentTimes]
    seconds: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as written to a file of results."""
        tokens = self.settings.agents * self.settings.output
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        return {
            "settings": asdict(self.settings),
            "agents": [agent.as_json() for agent in self.agents],
            "seconds": {name: round(value, 3) for name, value in medians.items()},
            "tokens_per_s": {name: round(tokens / value, 2) for name, value in medians.items()},
        }


async def measure_team(settings: TeamSettings, model: Path, vocab: int, progress: Progress) -> TeamResult:
    """Fill the pools, then measure every agent `repeats` times on both engines."""
    with ExitStack() as stack:
        progress("team: starting vLLM twice")
        stock = stack.enter_context(VllmLane(model, settings.room, None))
        ours = stack.enter_context(VllmLane(model, settings.room, settings.plugin, scheduler_cls=SCHEDULER))
        team = _VllmTeam(settings, CopyMachine(settings.agents, settings.prefix, vocab, settings.seed))
        for number in range(settings.samples):
            progress(f"team: sample {number + 1} of {settings.samples}")
            await team.fill(ours, number)
        for number in range(settings.repeats):
            progress(f"team: question {number + 1} of {settings.repeats}")
            await team.measure(stock, ours, number)
    return TeamResult(settings, team.times, team.seconds)


class _VllmTeam:
    """The agents with their measurements."""

    def __init__(self, settings: TeamSettings, machine: CopyMachine) -> None:
        self._settings, self._machine = settings, machine
        self.times = [VllmAgentTimes(agent) for agent in range(settings.agents)]
        self.seconds: dict[str, list[float]] = {"stock": [], "kedge": []}

    async def fill(self, lane: VllmLane, number: int) -> None:
        """Put one sample into every pool, from given answers instead of decoded ones.

        There are too few anchors to translate from, so every prompt is prefilled densely; later samples are longer, so
        that all cover what is measured.
        """
        settings, tokens = self._settings, self._machine.tokens
        question = tokens(settings.question + number)
        answers = [tokens(settings.output + number) for _ in range(settings.agents - 1)]
        for agent in range(settings.agents):
            request = self._request(f"sample-{number}", agent, question, answers[:agent], produces=False)
            await self._ask(lane, request, 1)
            await asyncio.sleep(LEARNING_S)

    def _request(
        self, run: str, agent: int, question: Tokens, answers: list[Tokens], *, produces: bool = True
    ) -> GenerateRequest:
        """Return a request with the trails that Kedge's engine gives to values."""
        request = self._machine.request(run, agent, question, answers, produces=produces)
        return with_trails(request, PlannerSettings().trail, of_answers=False)

    async def _ask(self, lane: VllmLane, request: GenerateRequest, max_tokens: int) -> VllmCall:
        """Return the answer, after the base prefills that its receipt asks for."""
        done = await lane.ask(request.tokens, max_tokens, request_hints(request))
        for base in done.receipt["base"] if done.receipt else ():
            await lane.ask(tuple(base), 1, {"base": True})
        return done

    async def measure(self, stock: VllmLane, ours: VllmLane, number: int) -> None:
        """Send one question through all agents, each answering in full, on either engine; then the same prompts
        densely.

        Earlier requests have evicted the agents' own prefixes from stock vLLM's cache, so they are put there first.
        """
        question = self._machine.tokens(self._settings.question)
        for agent in range(self._settings.agents):
            await stock.ask(self._machine.request("", agent, question, []).segments[0].tokens, 1)
        plain = await self._question(stock, "stock", f"question-{number}", question)
        for times, call in zip(self.times, plain, strict=True):
            times.stock.append(call.ttft_s)
        hinted = await self._question(ours, "kedge", f"question-{number}", question)
        for times, call in zip(self.times, hinted, strict=True):
            self._note(times, call)
        for times, call in zip(self.times, plain, strict=True):
            await stock.forget()
            times.dense.append((await stock.ask(call.prompt, 1)).ttft_s)

    @staticmethod
    def _note(times: VllmAgentTimes, call: VllmCall) -> None:
        assert call.receipt is not None
        translated = call.receipt["tokens"]["translated"]
        times.translated_tokens = min(translated, times.translated_tokens) if times.kedge else translated
        times.prompt_tokens = len(call.prompt)
        times.kedge.append(call.ttft_s)

    async def _question(self, lane: VllmLane, name: str, run: str, question: Tokens) -> Sequence[VllmCall]:
        """Run one question. While an agent answers, the plug-in gets the next one's prompt, as from Kedge's engine."""
        began, calls, answers = time.perf_counter(), list[VllmCall](), list[Tokens]()
        for agent in range(self._settings.agents):
            request = self._request(run, agent, question, answers)
            ask = self._ask if lane.plugged else self._plain
            asked = asyncio.create_task(ask(lane, request, self._settings.output))
            if lane.plugged and agent + 1 < self._settings.agents:
                await asyncio.sleep(0)  # so that the request goes first
                await lane.tell(expected_prompt(self._request(run, agent + 1, question, [*answers, ()])))
            done = await asked
            calls.append(done)
            answers.append(done.tokens)
        self.seconds[name].append(time.perf_counter() - began)
        return calls

    @staticmethod
    async def _plain(lane: VllmLane, request: GenerateRequest, max_tokens: int) -> VllmCall:
        return await lane.ask(request.tokens, max_tokens)
