"""Two real vLLM replicas on the CPU behind Ray Serve: a run stays, spreads with others, and survives its replica."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("ray.serve.llm", reason="Ray Serve LLM is not installed")

from scripts.scale_out import BLOCK, complete, fleet, words  # noqa: E402

PROMPT = words(3 * BLOCK + 4, "the same for all")
LONG = 400
"""Tokens of an answer that takes long enough to be interrupted."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fleet(2, {"num_gpu_blocks_override": 192}, {"tiers": {"host_memory": "64 blocks"}}) as address:
        yield address


def ask(url: str, run: str, count: int = 4, **hints: Any) -> tuple[str, int]:
    """An answer, and how many tokens of the prompt were on the device."""
    text, tokens = complete(url, PROMPT, {"run": run, **hints}, count)
    assert sum(tokens.values()) == len(PROMPT)
    return text, tokens["device"]


def replicas() -> dict[str, int]:
    """Names of the replicas' actors -> their processes."""
    import ray

    named = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    actors = {name: ray.get_actor(name, "serve") for name in named if "LLMServer" in name and "REPLICA" in name}
    return {name: ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for name, actor in actors.items()}


def test_runs_are_spread_and_each_stays_where_its_kv_is(url: str) -> None:
    """Both ask the same: who finds nothing is where nobody has asked before."""
    firsts = [ask(url, run) for run in ("x", "y")]
    assert [device for _, device in firsts] == [0, 0], "the second run goes where nothing is held yet"
    again = [ask(url, run) for run in ("x", "y", "x", "y")]
    assert {device for _, device in again} == {3 * BLOCK}
    assert len({text for text, _ in (*firsts, *again)}) == 1


def test_a_killed_replica_loses_no_call_and_its_runs_go_on(url: str) -> None:
    expected, _ = ask(url, "x", LONG)
    before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(6) as clients:
        calls = [clients.submit(ask, url, run, LONG) for run in ("x", "y", "x", "y", "x", "y")]
        time.sleep(0.3)
        assert not any(call.done() for call in calls), "they should be under way"
        os.kill(next(iter(before.values())), signal.SIGKILL)
        assert [call.result()[0] for call in calls] == [expected] * 6
    text, device = ask(url, "x")
    assert ask(url, "y") == (text, device)
    assert device == 3 * BLOCK, "both are now where one of them has been all the time"
    assert expected.startswith(text)
