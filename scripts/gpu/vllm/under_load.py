"""Stock vLLM and the same with Kedge's connector under load.

    python under_load.py --step load|aborts [--size tiny|8b] [--json FILE]

load    teams of five agents at once, on two engines that start side by side and stay: teams a minute, times to first
        token
aborts  many requests of ten agents from 32 clients, every fifth aborted, in a full pool, with a host tier: whether all
        others have the tokens that stock vLLM gives each alone, and all blocks are free at the end; then as many of
        teams whose messages are translated
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.ttft import CopyMachine
from kedge.bench.load import OPEN, TeamSizes, drive, random_team, warm, word_tokenizer
from kedge.bench.shapes import SHAPES
from kedge.bench.vllm import BLOCK, KEDGE, MODES, STOCK, KvRoom, VllmLane, engine_settings, save_random_llama
from kedge.engine.common.model_folder import model_path, read_config
from kedge.integrations.vllm.engine.engine import VLLMEngine
from kedge.integrations.vllm.plugin.hints import request_hints
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.types import Tokens

CLIENTS, AGENTS, PREFIX, OUTPUT = 32, 10, 256, 16
ROOM = KvRoom(4096, 4096)
"""Tokens: for less than all that run, so that requests wait and are preempted, and for one prompt as long as it"""
SHARED = {"workflow": "aborts", "reuse": "exact", "fixed_tokens": PREFIX}
EXACT = {"reuse": "exact", "tiers": {"host_memory": f"{2 * AGENTS * PREFIX // BLOCK} blocks"}}
TRANSLATE = {"guard": {"fidelity": "any"}, "planner": {"by_cost": False}, "anchors": OPEN}
Work = Callable[[int, Random], Coroutine[Any, Any, None]]
"""(client, its random numbers) -> a few requests, one after the other"""


def load(size: str, counts: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure both engines, one after the other, with each number of clients."""
    sizes = TeamSizes(24, 8) if size == "tiny" else TeamSizes(1000, 128)
    team, found = random_team(vocab := SHAPES[size]["vocab_size"], sizes, 0), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_random_llama(size, Path(folder))
        word_tokenizer(vocab).inner.save_pretrained(folder)
        settings = engine_settings(Path(folder), team, KvRoom(131_072, 4096))

        def start(kind: str) -> VLLMEngine:
            return stack.enter_context(VLLMEngine(folder, settings, plugged=kind == KEDGE))

        with ThreadPoolExecutor() as pool:
            engines = dict(zip(MODES, pool.map(start, MODES), strict=True))
        for engine in engines.values():
            warm(engine, team)
        for clients in counts:
            for kind, engine in engines.items():
                record = drive(nullcontext(engine), team, seconds, clients, MODES[kind])
                found.setdefault(str(clients), {})[kind] = record.as_json()
                print(f"load: {clients} clients, {kind}: {json.dumps(found[str(clients)][kind])}", flush=True)
    return found


async def crowd(requests: int, work: Work) -> Counter[str]:
    """Let `CLIENTS` clients work at once until so many requests were made. Returns how they ended."""
    made = iter(range(requests))

    async def client(number: int) -> Counter[str]:
        ended, rng = Counter[str](), Random(number)
        for _ in made:
            ended[await one(number, rng)] += 1
        return ended

    async def one(number: int, rng: Random) -> str:
        task = asyncio.create_task(work(number, rng))
        if rng.randrange(5) == 0:
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
            return "answered"
        return "aborted"

    return sum(await asyncio.gather(*map(client, range(CLIENTS))), Counter[str]())


async def aborts(requests: int) -> dict[str, Any]:
    """Abort a fifth of many requests, of exact reuse and of translation."""
    model = Path(model_path(None))
    vocab = read_config(model).vocab_size
    rng = Random(0)
    fixed = [tuple(rng.randrange(2, vocab) for _ in range(PREFIX)) for _ in range(AGENTS)]
    prompts = [(*one, *(rng.randrange(2, vocab) for _ in range(20 + number))) for one in fixed for number in range(20)]
    with ExitStack() as stack:
        start, found = partial(VllmLane, model, ROOM), dict[str, Any]()
        starts = partial(start, None), partial(start, EXACT), partial(start, TRANSLATE, scheduler_cls=SCHEDULER)
        stock, exact, moved = map(stack.enter_context, await asyncio.gather(*map(asyncio.to_thread, starts)))
        alone = [(await stock.ask(prompt, OUTPUT)).tokens for prompt in prompts]
        for name, ended in (
            (STOCK, same_tokens(stock, requests, prompts, alone)),
            (KEDGE, same_tokens(exact, requests, prompts, alone)),
            ("translated", translated(moved, requests, vocab)),
        ):
            found[name] = await ended
            print(f"aborts: {name}: {json.dumps(found[name])}", flush=True)
    return found


async def same_tokens(lane: VllmLane, requests: int, prompts: list[Tokens], alone: list[Tokens]) -> dict[str, Any]:
    """Return how many answers have the tokens of each alone: in bf16 a batch may change some of stock vLLM's too."""
    same = Counter[bool]()

    async def work(client: int, rng: Random) -> None:
        at = rng.randrange(len(prompts))
        hints = {**SHARED, "run": f"r{client}", "agent": f"a{at // 20}"} if lane.plugged else None
        same[(await lane.ask(prompts[at], OUTPUT, hints)).tokens == alone[at]] += 1

    return {**await crowd(requests, work), "same_tokens": same[True], "other_tokens": same[False], **await rest(lane)}


async def translated(lane: VllmLane, requests: int, vocab: int) -> dict[str, Any]:
    """Return how many tokens of the prompts of teams were translated."""
    agents = 4
    machine, tokens = CopyMachine(agents, PREFIX, vocab, 0), Counter[str]()
    runs: dict[int, tuple[int, Tokens, list[Tokens]]] = {}
    """Of each client: the number of its run, its question and the answers to it"""

    async def work(client: int, _: Random) -> None:
        run, question, answers = runs.get(client, (0, (), []))
        if not question or len(answers) == agents:
            run, question, answers = run + 1, machine.tokens(200), []
        runs[client] = run, question, [*answers, machine.tokens(64)]  # of one that is aborted
        request = machine.request(f"{client}-{run}", len(answers), question, answers)
        done = await lane.ask(request.tokens, 64, request_hints(request))
        runs[client][2][-1] = done.tokens
        tokens.update((done.receipt or {"tokens": {}})["tokens"])

    return {**await crowd(requests, work), "tokens": dict(tokens), **await rest(lane)}


async def rest(lane: VllmLane, seconds: float = 60) -> dict[str, bool]:
    """Return whether all blocks are free once all requests have ended: a prompt that needs every one is answered."""
    try:
        await asyncio.wait_for(lane.ask((2,) * (ROOM.longest - 1), 1), seconds)
    except TimeoutError:
        return {"all_blocks_free": False}
    return {"all_blocks_free": True}


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", required=True, choices=["load", "aborts"])
    parser.add_argument("--size", default="8b")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    is_load = args.step == "load"
    found = load(args.size, args.clients, args.seconds) if is_load else asyncio.run(aborts(args.requests))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
