"""Sessions that grow, pause and come back inside vLLM: what is kept, what comes from the host, and no other answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.conftest import BLOCK, Driver, driver, prompt

pytest.importorskip("vllm", reason="vLLM is not installed")

BLOCKS = 49
"""Blocks on the device; vLLM keeps one of them for itself."""
HEAD = 8 * BLOCK
TURN = BLOCK + 9
ANSWER = 7


class Chat:
    """A session: every prompt holds the one before, its answer, and something new."""

    def __init__(self, driver: Driver, number: int, head: int = HEAD, **asked: Any) -> None:
        self.driver, self.number, self.asked = driver, number, asked
        self.history = prompt(head, 500 + number)
        self.cached: list[int] = []
        self.turns = 0

    def grow(self) -> list[int]:
        self.turns += 1
        self.history += prompt(TURN, 10_000 * self.turns + self.number)
        return self.history

    def took(self, output: Any) -> None:
        self.cached.append(output.num_cached_tokens)
        self.history += output.outputs[0].token_ids

    def turn(self) -> int:
        """One turn on an engine that has nothing else to do; the tokens that were cached."""
        before = len(self.history)
        self.took(self.driver.ask(self.grow(), ANSWER, **self.asked))
        assert self.cached[-1] <= before
        return self.cached[-1]

    @property
    def whole(self) -> int:
        """Tokens in the full blocks that have KV: all but the last one of the answer."""
        return (len(self.history) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> dict[int, list[int]]:
    """Histories of sessions on vLLM without the plug-in and with room for all, by their number."""
    with driver(tiny_llama, plugged=False, num_gpu_blocks_override=1500) as plain:
        chats = [Chat(plain, number) for number in range(32)]
        for _ in range(4):
            for chat in chats:
                chat.turn()
    return {chat.number: chat.history for chat in chats}


@pytest.fixture(scope="module")
def small(tiny_llama: Path, stock: object) -> Iterator[Driver]:  # noqa: ARG001 - one engine at a time: stock goes first
    with driver(tiny_llama, extra={"tiers": {"host_blocks": 700}}, num_gpu_blocks_override=BLOCKS) as built:
        yield built


@pytest.fixture
def hosted(small: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The engine with empty tiers; it loads whatever it has, however slow this machine copies."""
    small.reset()
    monkeypatch.setattr(small.side.loads.tier, "load_pays", lambda _: True)
    return small


@pytest.fixture
def alone(hosted: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The same engine without its host tier."""
    monkeypatch.setattr(hosted.side, "loads", None)
    return hosted


@pytest.fixture
def clock(hosted: Driver, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the sessions' clock, in a list of one; sessions that other tests left are forgotten."""
    from kedge.policies.sessions import SessionSteps

    now = [0.0]
    monkeypatch.setattr(hosted.side.sessions, "_clock", lambda: now[0])
    monkeypatch.setattr(hosted.side.sessions, "steps", SessionSteps())
    return now


def check(driver: Driver) -> None:
    """Every block is free, and both queues are sound."""
    assert driver.pool.get_num_free_blocks() == driver.pool.num_gpu_blocks - 1
    driver.side.queue.check_integrity()
    assert not driver.side.sessions._turns and not driver.side._loads
    if loads := driver.side.loads:
        loads.tier.queue.check_integrity()
        assert loads.tier.host.get_num_free_blocks() == loads.tier.host.num_gpu_blocks - 1


def test_a_session_that_returns_soon_outlives_later_ones(alone: Driver, clock: list[float]) -> None:
    for number in range(100, 120):
        alone.ask(prompt(HEAD, number), ANSWER)  # never seen again
        clock[0] += 60.0
    chat = Chat(alone, 0)
    for _ in range(6):
        chat.turn()
        clock[0] += 2.0
    for number in range(200, 208):
        alone.ask(prompt(HEAD, number), ANSWER)  # many times the room of the device
        clock[0] += 0.2
        check(alone)
    whole = chat.whole
    assert chat.turn() == whole, "least recently used, it would have gone"


def test_the_answer_belongs_to_the_history(alone: Driver) -> None:
    chat = Chat(alone, 1)
    chat.took(alone.ask(chat.grow(), 2 * BLOCK))
    assert chat.whole > HEAD + TURN
    whole = chat.whole
    assert chat.turn() == whole
    check(alone)


def test_histories_come_back_from_the_host_with_the_same_answers(hosted: Driver, stock: dict[int, list[int]]) -> None:
    chats = [Chat(hosted, number) for number in range(12)]
    for _ in range(4):
        for chat in chats:
            whole = chat.whole if chat.turns else 0
            assert chat.turn() == whole, hosted.side.totals()
            check(hosted)
    assert [chat.history for chat in chats] == [stock[chat.number] for chat in chats]
    totals = hosted.side.totals()
    assert totals["blocks_loaded"] > 300 and not totals.get("skipped_backups", 0)


def test_a_turn_backs_up_only_what_it_added(hosted: Driver) -> None:
    chat = Chat(hosted, 2)
    chat.turn()
    before = hosted.side.totals()["blocks_offloaded"]
    held = chat.whole
    chat.turn()
    assert hosted.side.totals()["blocks_offloaded"] - before == (chat.whole - held) // BLOCK


def test_what_a_compacted_session_leaves_behind_is_not_its_own(hosted: Driver, clock: list[float]) -> None:
    chat = Chat(hosted, 3, head=12 * BLOCK, kedge={"session": "s"})
    chat.turn()
    clock[0] += 1.0
    chat.history = [*chat.history[: 2 * BLOCK], *prompt(BLOCK, 77)]  # a summary
    assert chat.turn() == 2 * BLOCK
    key, *others = hosted.side.sessions.steps.tracker._sessions
    assert key.name == "s" and not others
    for queue in (hosted.side.queue, hosted.side.loads.tier.queue):
        assert sum(owners.members for owners in queue._owners.sets_of(key)) == chat.whole // BLOCK
    check(hosted)


def test_32_sessions_in_a_pool_of_three_answer_the_same(hosted: Driver, stock: dict[int, list[int]]) -> None:
    chats = {number: Chat(hosted, number) for number in range(32)}
    for _ in range(4):
        names = {number: hosted.add(chat.grow(), ANSWER) for number, chat in chats.items()}
        hosted.run()
        for number, name in names.items():
            chats[number].took(hosted.finished[name])
        check(hosted)
    assert {number: chat.history for number, chat in chats.items()} == stock
    hits = sum(sum(chat.cached[2:]) for chat in chats.values()) / sum(2 * (HEAD + TURN) for _ in chats)
    assert hits > 0.7, "stock vLLM: 0"


def test_aborts_and_resets_leak_nothing(hosted: Driver) -> None:
    rng = random.Random(1)
    chats = [Chat(hosted, 40 + number, head=rng.randrange(1, 20) * 10) for number in range(16)]
    for turn in range(6):
        names = {hosted.add(chat.grow(), rng.randrange(1, 40)): chat for chat in chats}
        for _ in range(rng.randrange(12)):
            hosted.step()
        hosted.engine.abort_request(rng.sample(sorted(names), 8))
        if turn % 2 and not hosted.side.loads.tier.busy:
            hosted.scheduler.reset_prefix_cache(reset_running_requests=True)
        hosted.run()
        for name, chat in names.items():
            if name in hosted.finished:
                chat.took(hosted.finished[name])
        check(hosted)
        if turn == 3:
            hosted.reset()
            check(hosted)


def test_reuse_off_is_no_session(hosted: Driver, clock: list[float]) -> None:  # noqa: ARG001
    hosted.ask(prompt(HEAD, 9), kedge={"reuse": "off"})
    assert not len(hosted.side.sessions.steps.tracker)
    check(hosted)
