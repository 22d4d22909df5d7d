"""Two data-parallel ranks in one vLLM server: each has a scheduler, a cache and a host tier of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.integrations.vllm.test_server import FIXED, Server, cycle, serving, stock  # noqa: E402, F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(stock: object) -> Iterator[Server]:  # noqa: ARG001, F811 - one engine at a time: stock goes first
    with ExitStack() as stack:
        try:
            built = stack.enter_context(serving("-dp", "2"))
        except AssertionError:
            if starts_without_plugin():
                raise
            pytest.skip("vLLM itself does not start two ranks here: 0.33's CPU worker wants a memory node for each")
        yield built


def starts_without_plugin() -> bool:
    try:
        with serving("-dp", "2", transfer=None):
            return True
    except AssertionError:
        return False


def hints(agent: int) -> dict[str, Any]:
    steps = {f"a{other}": (other - agent) % 6 for other in range(6)}
    return {"run": "r", "agent": f"a{agent}", "fixed_tokens": FIXED, "steps": steps}


def test_ranks_do_not_share_kv(server: Server, stock: list[list[int]]) -> None:  # noqa: F811
    """A run that stays on its rank finds everything again; one that changes ranks computes it once more."""
    for turn in range(2):
        for rank in range(2):
            for agent in range(6):
                answer, found = server.complete(cycle(agent), hints(agent), rank=rank)
                assert answer == stock[agent]
                assert found["tokens"]["computed"] == (40 if turn else FIXED + 40), (turn, rank, agent)


def test_without_a_rank_answers_are_the_same(server: Server, stock: list[list[int]]) -> None:  # noqa: F811
    for agent in range(6):
        assert server.complete(cycle(agent), hints(agent))[0] == stock[agent]
