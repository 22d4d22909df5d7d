"""Base prefills: their order, interruption by requests, and bound. No vLLM is needed."""

from __future__ import annotations

import asyncio

import pytest

from kedge.integrations.vllm.engine import requests as bases
from kedge.integrations.vllm.engine.requests import BasePrefills
from kedge.types import Namespace, TenantId, Tokens

SPACE = Namespace(TenantId("t"))


class Prefills:
    """Notes what was begun and what came to its end; each takes until `go` is set."""

    def __init__(self) -> None:
        self.begun: list[Tokens] = []
        self.done: list[Tokens] = []
        self.go = asyncio.Event()

    async def __call__(self, tenant: TenantId, tokens: Tokens) -> None:
        assert tenant == SPACE
        self.begun.append(tokens)
        await self.go.wait()
        self.done.append(tokens)


def ask(wanted: BasePrefills, *prompts: Tokens) -> None:
    for tokens in prompts:
        wanted.add(SPACE, tokens)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "GRACE", 0.0)


async def settle() -> None:
    """Let everything be done that waits for nobody."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_after_the_other_once_there_is_time() -> None:
    async def scene() -> None:
        prefills = Prefills()
        wanted = BasePrefills(prefills)
        ask(wanted, (1,), (2,), (1,))
        await settle()
        assert not prefills.begun, "not before `resume`"
        wanted.resume()
        await settle()
        assert prefills.begun == [(1,)] and len(wanted) == 2, "what was asked for last comes first"
        prefills.go.set()
        await settle()
        assert prefills.done == [(1,), (2,)] and not len(wanted)
        ask(wanted, (3,))
        wanted.resume()
        await settle()
        assert prefills.done[-1] == (3,)

    asyncio.run(scene())


def test_a_request_that_comes_interrupts_and_nothing_is_lost() -> None:
    async def scene() -> None:
        prefills = Prefills()
        wanted = BasePrefills(prefills)
        ask(wanted, (1,), (2,))
        wanted.resume()
        await settle()
        wanted.pause()
        prefills.go.set()
        await settle()
        assert not prefills.done
        wanted.resume()
        await settle()
        assert prefills.begun == [(2,), (2,), (1,)] and prefills.done == [(2,), (1,)]

    asyncio.run(scene())


def test_the_oldest_prompt_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        monkeypatch.setattr(bases, "MAX_PROMPTS", 2)
        prefills = Prefills()
        prefills.go.set()
        wanted = BasePrefills(prefills)
        ask(wanted, (1,), (2,), (3,))
        wanted.resume()
        await settle()
        assert prefills.done == [(3,), (2,)]
        ask(wanted, (4,))
        wanted.resume()
        await wanted.close()
        await settle()
        assert prefills.done == [(3,), (2,)]

    asyncio.run(scene())
