"""A team on vLLM whose messages are translated (KVCOMM, tables 2 and 3): times to first token.

The team is the paper's copy machine, in random tokens on random weights, so nothing follows about quality: the
criterion's thresholds are opened, its work stays in the clock. Stock vLLM is measured twice: with the agents' own
prefixes in its cache, and with an empty cache, which is dense prefill.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ttft import LEAD, TAIL, CopyMachine
from kedge.bench.flows import with_given
from kedge.bench.load import OPEN
from kedge.bench.vllm import KEDGE, STOCK, Figures, KvRoom, Progress, VllmBenchSettings, VllmCall, VllmLane, VllmTrial
from kedge.integrations.vllm.plugin.hints import ask, expected_prompt, request_hints
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.types import GenerateRequest, Tokens

LEARNING_S = 0.25
"""Seconds between two prompts, in which the plug-in learns."""


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


QUICK_TEAM = TeamSettings(question=400, prefix=256, output=128, samples=4, repeats=2)


class ToldLane(VllmLane):
    """A vLLM engine with the plug-in, which also hears of the next prompt, as from Kedge's engine."""

    async def expect(self, request: GenerateRequest) -> None:
        """Send the plug-in the hint that such a request is expected."""
        await ask(self._engine.engine_core, "tell", [expected_prompt(request)])


async def measure_team(settings: TeamSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Fill the pools, which are as large as the samples, then measure every agent `repeats` times on both engines.

    There is room for all prompts and answers: nothing is ever evicted.
    """
    longest = settings.prefix + settings.question + TAIL
    longest += settings.agents * (settings.output + 1 + settings.samples + LEAD)
    room = KvRoom(3 * settings.agents * longest, longest)
    pools = {"capacity": settings.samples + settings.repeats, "min_anchors": settings.samples}
    anchors = {**OPEN, **pools, "max_bytes": 8 << 30, "max_base_bytes": 4 << 30}
    free = {"planner": {"by_cost": False}, "guard": {"fidelity": "any"}}
    ours = {"anchors": anchors, **free}
    with ExitStack() as stack:
        progress("team: starting vLLM twice")
        started = stack.enter_context(ThreadPoolExecutor(1)).submit(VllmLane, model, room, None)
        kedge = stack.enter_context(ToldLane(model, room, ours, scheduler_cls=SCHEDULER))
        stock = stack.enter_context(started.result())
        team = _VllmTeam(settings, CopyMachine(settings.agents, settings.prefix, vocab, settings.seed))
        for number in range(settings.samples):
            progress(f"team: sample {number + 1} of {settings.samples}")
            await team.fill(kedge, number)
        rounds = []
        for number in range(settings.repeats):
            progress(f"team: question {number + 1} of {settings.repeats}")
            rounds.append(await team.round(stock, kedge, f"question-{number}"))
    tokens = settings.agents * settings.output
    seconds = {name: statistics.median(one[name].seconds for one in rounds) for name in (STOCK, KEDGE)}
    return {
        "settings": asdict(settings),
        "agents": [agent_figures(agent, rounds) for agent in range(settings.agents)],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "tokens_per_s": {name: round(tokens / value, 2) for name, value in seconds.items()},
    }


DENSE = "dense"
VllmRound = Mapping[str, VllmTrial]
"""`DENSE`, `STOCK` and `KEDGE` -> the calls of all agents for one question."""


def agent_figures(agent: int, rounds: Sequence[VllmRound]) -> dict[str, Any]:
    """Return an agent's times to first token, and the fewest tokens that were translated for it."""
    ms = {name: [round(1e3 * one[name].calls[agent].ttft_s, 3) for one in rounds] for name in (DENSE, STOCK, KEDGE)}
    medians = {name: statistics.median(values) for name, values in ms.items()}
    hinted = [one[KEDGE].calls[agent] for one in rounds]
    return {
        "agent": agent,
        "prompt_tokens": len(hinted[-1].prompt),
        "translated_tokens": min(call.receipt["tokens"]["translated"] for call in hinted if call.receipt),
        **{f"{name}_ms": median for name, median in medians.items()},
        "speedup_over_dense": round(medians[DENSE] / medians[KEDGE], 2),
        "speedup_over_stock": round(medians[STOCK] / medians[KEDGE], 2),
        **{f"all_{name}_ms": values for name, values in ms.items()},
    }


class _VllmTeam:
    """The agents of the copy machine on both engines."""

    def __init__(self, settings: TeamSettings, machine: CopyMachine) -> None:
        self._settings, self._machine = settings, machine

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

    async def round(self, stock: VllmLane, ours: VllmLane, run: str) -> VllmRound:
        """Send one question through all agents, each answering in full, on either engine; then the same prompts
        densely.

        Earlier requests have evicted the agents' own prefixes from stock vLLM's cache, so they are put there first.
        """
        question = self._machine.tokens(self._settings.question)
        for agent in range(self._settings.agents):
            await stock.ask(self._machine.request("", agent, question, []).segments[0].tokens, 1)
        found = {STOCK: await self._question(stock, run, question), KEDGE: await self._question(ours, run, question)}
        dense, began = list[VllmCall](), time.perf_counter()
        for call in found[STOCK].calls:
            await stock.forget()
            dense.append(await stock.ask(call.prompt, 1))
        return {**found, DENSE: VllmTrial(time.perf_counter() - began, tuple(dense))}

    async def _question(self, lane: VllmLane, run: str, question: Tokens) -> VllmTrial:
        """Run one question. While an agent answers, the plug-in gets the next one's prompt, as from Kedge's engine."""
        began, calls, answers = time.perf_counter(), list[VllmCall](), list[Tokens]()
        for agent in range(self._settings.agents):
            request = self._request(run, agent, question, answers)
            asked = asyncio.create_task(self._ask(lane, request, self._settings.output))
            if isinstance(lane, ToldLane) and agent + 1 < self._settings.agents:
                await asyncio.sleep(0)  # so that the request goes first
                await lane.expect(self._request(run, agent + 1, question, [*answers, ()]))
            done = await asked
            calls.append(done)
            answers.append(done.tokens)
        return VllmTrial(time.perf_counter() - began, tuple(calls))

    def _request(
        self, run: str, agent: int, question: Tokens, answers: list[Tokens], *, produces: bool = True
    ) -> GenerateRequest:
        return self._machine.request(run, agent, question, answers, produces=produces)

    async def _ask(self, lane: VllmLane, request: GenerateRequest, max_tokens: int) -> VllmCall:
        """Return the answer. Stock vLLM gets no hints."""
        return await lane.ask(request.tokens, max_tokens, request_hints(request) if lane.plugged else None)


def team_case(settings: VllmBenchSettings, model: Path, vocab: int, progress: Progress) -> Figures:
    """Measure a team whose messages are translated."""
    usual = QUICK_TEAM if settings.quick else TeamSettings()
    return asyncio.run(measure_team(with_given(usual, samples=settings.samples), model, vocab, progress))
