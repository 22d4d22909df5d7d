"""Sessions that grow, pause and come back inside vLLM: what is kept, what comes from the host, and no other answer."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.vllm.conftest import BLOCK, Answers, Driver, driver, prompt

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
def stock(tiny_llama: Path) -> Answers:
    """Histories of sessions on vLLM without the plug-in and with room for all, by their number."""
    with driver(tiny_llama, plugged=False, num_gpu_blocks_override=1500) as plain:
        chats = [Chat(plain, number) for number in range(32)]
        for _ in range(4):
            for chat in chats:
                chat.turn()
    return {chat.number: chat.history for chat in chats}


@pytest.fixture(scope="module")
def small(tiny_llama: Path, stock: object) -> Iterator[Driver]:  # noqa: ARG001 - one engine at a time: stock goes first
    with driver(tiny_llama, extra={"tiers": {"host_memory": "700 blocks"}}, num_gpu_blocks_override=BLOCKS) as built:
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
    from kedge.policies.sessions import SessionLedger

    now = [0.0]
    monkeypatch.setattr(hosted.side.sessions, "ledger", SessionLedger(BLOCKS, lambda: now[0]))
    return now


def on_device(driver: Driver, session: str) -> int:
    """Return how many leading blocks of the history of a session with an id are on the device."""
    from kedge.integrations.vllm.plugin.block_pools import cached_prefix

    (hashes,) = (found for key, found in driver.side.loads._histories.items() if key.name == session)
    return cached_prefix(driver.pool, hashes)


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
        alone.check_rest()
    whole = chat.whole
    assert chat.turn() == whole, "least recently used, it would have gone"


def test_histories_come_back_from_the_host_with_the_same_answers(hosted: Driver, stock: Answers) -> None:
    chats = [Chat(hosted, number) for number in range(12)]
    for _ in range(4):
        for chat in chats:
            whole = chat.whole if chat.turns else 0
            assert chat.turn() == whole, hosted.side.totals()
            hosted.check_rest()
    assert [chat.history for chat in chats] == [stock[chat.number] for chat in chats]
    totals = hosted.side.totals()
    needed, on_device = 12 * (9 + 10 + 12), 3 * (BLOCKS - 1)
    assert totals["blocks_loaded"] >= needed - on_device and not totals.get("skipped_backups", 0)


def test_32_sessions_in_a_pool_of_three_answer_the_same(hosted: Driver, stock: Answers) -> None:
    chats = {number: Chat(hosted, number) for number in range(32)}
    for _ in range(4):
        names = {number: hosted.add(chat.grow(), ANSWER) for number, chat in chats.items()}
        hosted.run()
        for number, name in names.items():
            chats[number].took(hosted.finished[name])
        hosted.check_rest()
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
        if turn % 2:
            assert hosted.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=turn == 5)
        hosted.run()
        for name, chat in names.items():
            if name in hosted.finished:
                chat.took(hosted.finished[name])
        hosted.check_rest()
        if turn == 3:
            hosted.reset()
            hosted.check_rest()


@pytest.mark.parametrize("empties_host", [False, True])
@pytest.mark.parametrize("direction", ["load", "offload"])
def test_a_reset_abandons_the_copies_under_way(
    hosted: Driver, stock: Answers, direction: str, empties_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, while the workers have copied and not reported it yet; a copy that ends later brings nothing back."""
    chat, tier = Chat(hosted, 3), hosted.side.loads.tier
    chat.turn()
    if direction == "load":
        assert hosted.scheduler.reset_prefix_cache(), "the host keeps the history"
    with monkeypatch.context() as patched:
        patched.setattr(hosted.worker._copier, "drain", tuple)
        others = [hosted.add(prompt(HEAD, 950), 3), hosted.add(prompt(HEAD, 951), 60)]
        name = hosted.add(chat.grow(), ANSWER)
        hosted.run(until=lambda: (tier._loading if direction == "load" else tier._backing_up) and not tier._new_copies)
        for _ in range(2):
            assert hosted.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=empties_host)
            assert not tier._loading and not tier._backing_up and tier.busy
            hosted.side.queue.check_integrity()
            tier.queue.check_integrity()
    hosted.run()
    hosted.check_rest()
    answer = list(hosted.finished[name].outputs[0].token_ids)
    assert answer == stock[chat.number][len(chat.history) :][: len(answer)]
    assert not tier.busy and all(one in hosted.finished for one in others)


def test_an_engine_that_sleeps_copies_nothing_any_more_and_believes_in_nothing_afterwards(
    hosted: Driver, stock: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device loses in its sleep is overwritten here, as vLLM on a CPU only warns that it does not sleep."""
    chat, copier = Chat(hosted, 5), hosted.worker._copier
    chat.turn()
    assert hosted.scheduler.reset_prefix_cache(), "the host keeps the history"
    monkeypatch.setattr(copier, "_throttle", 0.1)
    hosted.add(chat.grow(), ANSWER)
    hosted.run(until=lambda: copier._orders)
    hosted.core.sleep(1)
    assert not copier._orders, "it would write to pages that are gone"
    for _, device in copier._pools:
        device.view(torch.uint8).fill_(65)
    hosted.core.wake_up()
    hosted.run()
    hosted.check_rest()
    chat.took(hosted.ask(chat.history, ANSWER))
    assert chat.cached[-1] == 0 and chat.history == stock[chat.number][: len(chat.history)]


RUN = {"client": "c", "workflow": "w", "run": "r"}
EXPECTED: dict[str, list[dict[str, Any]]] = {
    "a client": [
        {"session": "s", "keep_for": 0},
        {"expects": {"no one": 0, "s": 500}},
        {"session": "coordinator", "expects": {"s": 0}},
    ],
    "a forecast": [
        {**RUN, "agent": "writer", "session": "s", "steps": {"writer": 50}},
        {},
        {**RUN, "agent": "reader", "steps": {"writer": 0, "reader": 1}},
    ],
}
"""Hints: of the session, of a call while it is far away, and of one that expects it soon"""


@pytest.mark.parametrize("who", EXPECTED)
def test_a_session_that_is_expected_is_on_the_device_before_its_request(
    hosted: Driver, stock: Answers, clock: list[float], who: str
) -> None:
    own, far, soon = EXPECTED[who]
    chat = Chat(hosted, 7, kedge=own)
    for _ in range(3):
        chat.turn()
        clock[0] += 1.0
    assert hosted.scheduler.reset_prefix_cache(), "the host keeps the history"
    before, whole = hosted.side.totals(), chat.whole
    hosted.ask(prompt(HEAD, 970), ANSWER, kedge=far)
    assert on_device(hosted, "s") == 0
    hosted.ask(prompt(HEAD, 971), ANSWER, kedge=soon)
    assert on_device(hosted, "s") == whole // BLOCK
    hosted.check_rest()
    assert chat.turn() == whole and chat.history == stock[chat.number]
    after = hosted.side.totals()
    assert after["prefetches_completed"] == before.get("prefetches_completed", 0) + 1
    assert after.get("prefetches_late", 0) == before.get("prefetches_late", 0)
    hosted.check_rest()
