"""Test whether a tenant can infer, from times and receipts, that another tenant has sent a prompt before.

    python scripts/tenant_probe.py --trials 1000
    python scripts/tenant_probe.py --trials 1000 --agents

In every trial a victim sends the prompt that the spy is going to ask for, or, by the toss of a coin, another one as
long, so that the server was as busy either way. Then the spy sends the prompt and looks at everything that it gets: the
time to the first chunk and to the end, and every number of its receipt. For each of these the area under the ROC curve
measures how well it separates the two cases: 0.5 is a guess. To show that the probe works, a second spy has the
victim's key.

With `--agents`, the prompts are those of two agents, and the victim's agent reads the text that the spy's reads, or
another one: what is found in plain traffic (`engine.discovery`, mode translate) is what might give it away.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kedge.engine.base import Engine
from kedge.server.app import create_app
from kedge.server.tenancy import hashed, load_keys
from kedge.settings import (
    AnchorSettings,
    DiscoveryMode,
    DiscoverySettings,
    EngineSettings,
    LimitSettings,
    PlannerSettings,
)

VICTIM, SPY = "key-of-the-victim", "key-of-the-spy"
VOCABULARY = 200
"""Tokens that prompts are made of"""
LENGTH = 160
"""Tokens of a prompt, or of what agents read."""
HEAD, TAIL = 48, 12
"""Tokens of an agent's fixed prompt, before and after what it reads"""
Framed = Callable[[str, list[int]], list[int]]
"""The prompt of the victim or the spy (its name) with a text."""


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


def send(http: httpx.Client, key: str, prompt: list[int]) -> dict[str, float]:
    """Stream one completion. Returns everything that its sender can measure."""
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
    url: str, spy: str, count: int, vocabulary: int, rng: random.Random, framed: Framed = bare
) -> tuple[list[bool], list[dict[str, float]]]:
    """Return for each trial whether the victim had sent the prompt, and what the spy measured."""
    known, seen = [], []
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(count):
            prompt, other = ([rng.randrange(vocabulary) for _ in range(LENGTH)] for _ in range(2))
            known.append(rng.random() < 0.5)
            send(http, VICTIM, framed("victim", prompt if known[-1] else other))
            seen.append(send(http, spy, framed("spy", prompt)))
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


def probe(url: str, spy: str, count: int, vocabulary: int, seed: int = 0, framed: Framed = bare) -> dict[str, float]:
    """Return the area under the ROC curve for every quantity that the spy measures."""
    known, seen = trials(url, spy, count, vocabulary, random.Random(seed), framed)
    names = sorted({name for one in seen for name in one})
    return {name: auc(known, [one.get(name, 0.0) for one in seen]) for name in names}


def settings(*, translate: bool) -> EngineSettings:
    """Return an engine's settings, on request such that it translates all that it finds, whatever comes of it."""
    if not translate:
        return EngineSettings()
    return EngineSettings(
        anchors=AnchorSettings(min_anchors=2, max_error=1e9, weak_error=1e9),
        planner=PlannerSettings(by_cost=False, min_translated=0),
        discovery=DiscoverySettings(mode=DiscoveryMode.TRANSLATE),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Can a tenant tell what another has sent?")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--model", type=Path, help="Folder of a model; default: the bundled one.")
    parser.add_argument("--agents", action="store_true", help="Prompts of agents that are found in plain traffic.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    import torch

    from kedge.engine.local.engine import LocalEngine

    framed = read_by_agents(VOCABULARY) if given.agents else bare
    torch.set_num_threads(1)
    result: dict[str, Any] = {"trials": given.trials}
    with LocalEngine(given.model, config=settings(translate=given.agents)) as engine, serving(engine) as url:
        for seed, (name, key) in enumerate((("other_tenant", SPY), ("same_tenant", VICTIM))):
            result[name] = probe(url, key, given.trials, VOCABULARY, seed, framed)
    for name in ("other_tenant", "same_tenant"):
        best = max(result[name], key=result[name].get)
        print(f"{name}: at most {result[name][best]:.3f} (by {best}); by first_chunk {result[name]['first_chunk']:.3f}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
