"""Test whether a tenant can infer, from times and receipts, that another tenant has sent a prompt before.

    python scripts/tenant_probe.py --trials 1000
    python scripts/tenant_probe.py --trials 1000 --agents
    python scripts/tenant_probe.py --trials 1000 --agents --discovery

In every trial a victim sends the prompt that the spy is going to ask for, or, by the toss of a coin, another one as
long, so that the server was as busy either way. Then the spy sends the prompt and looks at everything that it gets: the
time to the first chunk and to the end, every number of its receipt, how much is still cached of a prompt of its own
(`own.…`), and by how much each number of its report of plain traffic has changed (`report.…`). For each of these the
area under the ROC curve measures how well it separates the two cases: 0.5 is a guess. To show that the probe works, a
second spy has the victim's key. Counts of tokens, requests and agents are the same in every run of a seed; times are
not.

With `--agents`, the prompts are those of two agents, and the victim's agent reads the text that the spy's reads, or
another one: what is found in plain traffic (`engine.discovery`, mode translate) is what might give it away. With
`--discovery`, that is all there is: no model runs, and the spy sees the whole request as the engine would serve it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kedge.discovery import PlainRequests
from kedge.engine.base import Engine
from kedge.server.app import create_app
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import (
    AnchorSettings,
    DiscoveryMode,
    DiscoverySettings,
    EngineSettings,
    LimitSettings,
    PlannerConstants,
)
from kedge.types import GenerateRequest, Segment, TenantId, is_owned

VICTIM, SPY = "key-of-the-victim", "key-of-the-spy"
VOCABULARY = 200
"""Tokens that prompts are made of"""
LENGTH = 160
"""Tokens of a prompt, or of what agents read."""
HEAD, TAIL = 48, 12
"""Tokens of an agent's fixed prompt, before and after what it reads"""
BLOCKS = 32
"""Blocks of the engine's device tier: less than a trial takes"""
Framed = Callable[[str, list[int]], list[int]]
"""The prompt of the victim or the spy (its name) with a text."""
Seen = dict[str, float]
"""Everything that the sender of a request can measure, by its name"""
Ask = Callable[[str, list[int]], Seen]
"""Sends a prompt as the tenant with this name, and returns what that one can measure."""
TIMES = ("first_chunk", "whole", "parts_ms.", "ttft_ms", "total_ms")
"""What the names of times begin with; all else is counted"""
TENANTS = {"victim": "victim", "spy": "spy", "twin": "victim"}
"""Who asks -> as which tenant. The twin is a spy that has the victim's key: it shows that the probe works."""
KEYS = {name: VICTIM if tenant == "victim" else SPY for name, tenant in TENANTS.items()}
MARKER = list(range(3, 3 + LENGTH))
"""A prompt of the spy's own, which it sends again and again to see how much of it has been evicted"""


def bare(_: str, text: list[int]) -> list[int]:
    """Return the text itself as prompt."""
    return text


def read_by_agents(vocabulary: int) -> Framed:
    """Return prompts of two agents around the text, the victim's and the spy's."""
    rng = random.Random("agents")
    parts = {
        name: [[rng.randrange(vocabulary) for _ in range(size)] for size in (HEAD, TAIL)] for name in ("victim", "spy")
    }
    return lambda name, text: [*parts[name][0], *text, *parts[name][1]]


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Run a server with two tenants, on a free port."""
    keys = load_keys(None, f"victim:{hashed(VICTIM)},spy:{hashed(SPY)}", LimitSettings())
    config = uvicorn.Config(create_app(engine, keys=keys), port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def over_http(http: httpx.Client) -> Ask:
    """Return what sends prompts to a server."""

    def ask(name: str, prompt: list[int]) -> Seen:
        if name == "victim":
            return send(http, KEYS[name], prompt)
        before = report(http, KEYS[name])
        seen, own = (send(http, KEYS[name], one) for one in (prompt, MARKER))
        changes = changed(before, report(http, KEYS[name]))
        return {**seen, **{f"own.{what}": value for what, value in own.items() if not is_time(what)}, **changes}

    return ask


def report(http: httpx.Client, key: str) -> dict[str, Any]:
    """Return the report of plain traffic that a tenant sees."""
    answer = http.get("/kedge/report", headers={"Authorization": f"Bearer {key}"})
    answer.raise_for_status()
    return dict(answer.json() or {})


def changed(before: dict[str, Any], after: dict[str, Any]) -> Seen:
    """Return by how much each number of a report has changed, and the length of each of its lists."""
    sizes = [{name: sized(value) for name, value in one.items()} for one in (before, after)]
    return {f"report.{name}": value - sizes[0].get(name, 0.0) for name, value in sizes[1].items()}


def sized(value: Any) -> float:
    return float(value if isinstance(value, int | float) else len(value))


def is_time(name: str) -> bool:
    """Return whether what is measured under this name is a time."""
    return name.startswith(TIMES)


def without_model() -> Ask:
    """Return what sends prompts to discovery alone, where answers repeat what their agents read."""
    plain = PlainRequests(DiscoverySettings(mode=DiscoveryMode.TRANSLATE), itertools.count().__next__)

    def ask(name: str, prompt: list[int]) -> Seen:
        request = GenerateRequest((Segment(tuple(prompt), "p0"),), tenant=TenantId(TENANTS[name]), is_plain=True)
        before = plain.report(partial(is_owned, request.tenant))
        served = plain.arrived(request)
        plain.ended(request.namespace, request.request_id, prompt[HEAD:-TAIL])
        found = plain.forecasts.take()
        expected = [one for one in (found.next_runs if found else ()) if one.namespace == request.namespace]
        values = [one for one in served.segments if one.is_placeholder]
        counts = {
            "segments": len(served.segments),
            "values": len(values),
            "value_tokens": sum(len(one.tokens) for one in values),
            "answers_read": sum(one.is_answer for one in values),
            "is_named": bool(served.agent),
            "is_read": served.produces is not None,
            "fixed": served.fixed or 0,
            "forecasts": len(expected),
        }
        after = plain.report(partial(is_owned, request.tenant))
        return {**{what: float(value) for what, value in counts.items()}, **changed(before, after)}

    return ask


def send(http: httpx.Client, key: str, prompt: list[int]) -> Seen:
    """Stream one completion. Returns what its sender can measure."""
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True}
    began, first, last = time.perf_counter(), 0.0, {}
    with http.stream("POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            first = first or time.perf_counter() - began
            if line.startswith("data: {"):
                last = json.loads(line[6:])
    receipt = last["kedge"]["receipts"][0]
    seen = {"first_chunk": first, "whole": time.perf_counter() - began, "misses": float(len(receipt["misses"]))}
    for part in ("tokens", "parts_ms"):
        seen |= {f"{part}.{name}": value for name, value in receipt[part].items()}
    return seen | {"ttft_ms": receipt["ttft_ms"], "total_ms": receipt["total_ms"]}


def trials(
    ask: Ask, spy: str, count: int, vocabulary: int, rng: random.Random, framed: Framed = bare
) -> tuple[list[bool], list[Seen]]:
    """Return for each trial whether the victim had sent the prompt, and what the spy measured, whose name is `spy`."""
    known, seen = [], []
    for _ in range(count):
        prompt, other = ([rng.randrange(vocabulary) for _ in range(LENGTH)] for _ in range(2))
        known.append(rng.random() < 0.5)
        ask("victim", framed("victim", prompt if known[-1] else other))
        seen.append(ask(spy, framed("spy", prompt)))
    return known, seen


def auc(labels: Sequence[bool], scores: Sequence[float]) -> float:
    """Return the area under the ROC curve of scores for labels (Mann and Whitney); the larger of both directions.

    A tie counts half a point: guessing gives 0.5, perfect separation 1.
    """
    ranked = sorted(range(len(scores)), key=lambda i: scores[i])
    rank, at = [0.0] * len(scores), 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and scores[ranked[end]] == scores[ranked[at]]:
            end += 1
        for i in ranked[at:end]:
            rank[i] = (at + end + 1) / 2
        at = end
    positive = sum(labels)
    negative = len(labels) - positive
    if not positive or not negative:
        return 0.5
    area = (sum(r for r, label in zip(rank, labels, strict=True) if label) - positive * (positive + 1) / 2) / (
        positive * negative
    )
    return max(area, 1 - area)


def probe(ask: Ask, spy: str, count: int, vocabulary: int, seed: int = 0, framed: Framed = bare) -> dict[str, float]:
    """Return the area under the ROC curve for every quantity that the spy measures."""
    known, seen = trials(ask, spy, count, vocabulary, random.Random(seed), framed)
    names = sorted({name for one in seen for name in one})
    return {name: auc(known, [one.get(name, 0.0) for one in seen]) for name in names}


def settings(*, translate: bool) -> EngineSettings:
    """Return an engine's settings: little memory, so that tenants evict each other's KV, and on request such that it
    translates all that it finds, whatever comes of it.
    """
    if not translate:
        return EngineSettings(kv_memory=f"{BLOCKS} blocks")
    return EngineSettings(
        kv_memory=f"{BLOCKS} blocks",
        anchors=AnchorSettings(min_anchors=2, max_error=1e9, weak_error=1e9),
        planner=PlannerConstants(by_cost=False, min_translated=0),
        discovery=DiscoverySettings(mode=DiscoveryMode.TRANSLATE),
    )


def both(ask: Ask, count: int, framed: Framed) -> dict[str, dict[str, float]]:
    """Return the areas for a spy of another tenant, and for one with the victim's key."""
    named = enumerate((("other_tenant", "spy"), ("same_tenant", "twin")))
    return {name: probe(ask, spy, count, VOCABULARY, seed, framed) for seed, (name, spy) in named}


def by_engine(model: Path | None, count: int, framed: Framed, *, translate: bool) -> dict[str, dict[str, float]]:
    """Return the areas where the embedded engine serves a model, with a server before it."""
    import torch

    from kedge.engine.local.engine import LocalEngine

    torch.set_num_threads(1)
    with (
        LocalEngine(model, config=settings(translate=translate)) as engine,
        serving(engine) as url,
        httpx.Client(base_url=url, timeout=600) as http,
    ):
        return both(over_http(http), count, framed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Can a tenant tell what another has sent?")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--model", type=Path, help="Folder of a model; default: the bundled one.")
    parser.add_argument("--agents", action="store_true", help="Prompts of agents that are found in plain traffic.")
    parser.add_argument("--discovery", action="store_true", help="Discovery alone, without a model.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    framed = read_by_agents(VOCABULARY) if given.agents else bare
    if given.discovery:
        found = both(without_model(), given.trials, framed)
    else:
        found = by_engine(given.model, given.trials, framed, translate=given.agents)
    for name, areas in found.items():
        print(f"{name}: by counts {_best(areas, False)}; by times {_best(areas, True)}")
    if given.json:
        given.json.write_text(json.dumps({"trials": given.trials, **found}, indent=1) + "\n", encoding="utf-8")


def _best(areas: dict[str, float], times: bool) -> str:
    """Return the largest of the areas, with what was measured."""
    fit = {name: area for name, area in areas.items() if is_time(name) is times}
    best = max(fit, key=lambda name: fit[name], default=None)
    return "-" if best is None else f"at most {fit[best]:.3f} ({best}, of {len(fit)})"


if __name__ == "__main__":
    main()
