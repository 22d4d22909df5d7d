"""KV events say of both tiers what is in them, so that a router that follows them is never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, Driver, driver
from tests.integrations.vllm.test_sessions import ANSWER, BLOCKS, Chat, check

pytest.importorskip("vllm", reason="vLLM is not installed")


class Router:
    """What a router knows that follows the events."""

    def __init__(self) -> None:
        self.held: dict[str, set[Any]] = {"GPU": set(), "CPU": set()}
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            self.events.append(event)
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.held = {"GPU": set(), "CPU": set()}
            elif kind == "BlockStored":
                self.held[event.medium].update(event.block_hashes)
            else:
                self.held[event.medium].difference_update(event.block_hashes)

    def stored(self, medium: str) -> list[Any]:
        return [one for one in self.events if type(one).__name__ == "BlockStored" and one.medium == medium]


@pytest.fixture(scope="module")
def publishing(tiny_llama: Path) -> Iterator[tuple[Driver, Router]]:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    extra = {"tiers": {"host_memory": "120 blocks"}}
    with driver(tiny_llama, extra=extra, num_gpu_blocks_override=BLOCKS, kv_events_config=events) as built:
        router = Router()
        built.scheduler.kv_event_publisher.publish = router.publish
        built.side.loads.tier.load_pays = lambda _: True
        yield built, router


def held(pool: Any) -> set[Any]:
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

    from kedge.integrations.vllm.plugin.block_pools import known_blocks

    return {maybe_convert_block_hash(get_block_hash(key)) for key in known_blocks(pool)}


def settle(built: Driver) -> None:
    """Let vLLM publish what is left: events go out with a step."""
    for _ in range(3):
        built.ask([3, 4, 5], 1)


def test_a_router_knows_what_each_tier_has(publishing: tuple[Driver, Router]) -> None:
    built, router = publishing
    rng, tier = random.Random(0), built.side.loads.tier
    chats = [Chat(built, number, head=rng.randrange(4, 9) * BLOCK) for number in range(10)]
    for turn in range(5):
        names = {built.add(chat.grow(), ANSWER): chat for chat in chats}
        if turn == 2:
            built.engine.abort_request(rng.sample(sorted(names), 3))
        built.run()
        for name, chat in names.items():
            if name in built.finished:
                chat.took(built.finished[name])
        if turn == 3:
            assert built.scheduler.reset_prefix_cache(), "the host keeps what it has"
        settle(built)
        assert router.held == {"GPU": held(built.pool), "CPU": held(tier.host)}
        check(built)
    assert tier.counters["blocks_loaded"] and len(router.stored("CPU")) > 120, "the host was full"
    built.reset()
    settle(built)
    assert router.held["CPU"] == held(tier.host) == set()


def test_an_event_of_the_host_has_the_content_and_the_session(publishing: tuple[Driver, Router]) -> None:
    built, router = publishing
    built.reset()
    router.events.clear()
    chat = Chat(built, 77, kedge={"session": "s"})
    chat.turn()
    built.scheduler.reset_prefix_cache()
    settle(built)
    whole = chat.whole
    assert chat.turn() == whole
    settle(built)
    on_host, content = router.stored("CPU"), {}
    for event in on_host:
        content[event.block_hashes[0]] = event.token_ids
        assert event.block_size == BLOCK == len(event.token_ids)
    assert {event.session_id for event in on_host} >= {"s"}
    tokens, parent = chat.history, None
    for at in range(whole // BLOCK):
        (event,) = {one.block_hashes[0]: one for one in on_host if one.parent_block_hash == parent and
                    list(one.token_ids) == tokens[at * BLOCK : (at + 1) * BLOCK]}.values()  # fmt: skip
        parent = event.block_hashes[0]
    loaded = [one for one in router.stored("GPU") if one.session_id == "s" and len(one.block_hashes) == 1]
    assert len(loaded) >= whole // BLOCK, "what is loaded is published too"
