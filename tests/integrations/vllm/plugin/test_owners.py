"""Sessions on vLLM's own block pools, without an engine: turns of any length, in any order, that end in any way."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import RequestStatus

from kedge.cache.owners import Owners
from kedge.integrations.vllm.plugin.block_pools import leading_blocks
from kedge.integrations.vllm.plugin.owners import SessionHistories
from kedge.integrations.vllm.plugin.requests import LiveRequest
from tests.integrations.vllm.plugin import pools
from tests.integrations.vllm.plugin.pools import SIZE, admitted, chain, opened

BLOCKS = 40
STOPPED, ABORTED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED


prompt = partial(chain, letter=4)
"""Hashes of prompts that share their beginning: four blocks for each letter"""


class Engine:
    """A block pool with sessions, and what vLLM's scheduler does with both."""

    def __init__(self) -> None:
        self.pool = opened(BLOCKS)
        self.queue: Any = self.pool.free_block_queue
        self.now = 0.0
        self.sessions = SessionHistories(self.queue.owners, lambda: self.now)
        self.sessions.bind(self.pool)
        self.running: dict[str, tuple[Any, list[Any]]] = {}
        self.live: dict[str, LiveRequest] = {}
        self._count = 0

    def request(self, hashes: list[BlockHash], session_id: str | None = None) -> Any:
        """Return a new request that waits."""
        self._count += 1
        tokens = SIZE * len(hashes)
        asked = SimpleNamespace(
            request_id=f"r{self._count}", block_hashes=hashes, cache_salt=None, status=RequestStatus.WAITING,
            stop_reason=None, num_computed_tokens=0, num_prompt_tokens=tokens, session_id=session_id,
        )  # fmt: skip
        live = self.live[asked.request_id] = LiveRequest(asked)  # type: ignore[arg-type]
        self.sessions.arrive(live)
        return asked

    def admit(self, asked: Any) -> int:
        """Run a request; the number of blocks that were cached. -1: there is no room for it."""
        found = admitted(self.pool, asked.block_hashes)
        if found is None:
            return -1
        blocks, cached = found
        self.live[asked.request_id].device = SIZE * cached
        self.running[asked.request_id] = (asked, blocks)
        return cached

    def end(self, name: str, status: RequestStatus = STOPPED, computed: int | None = None) -> None:
        """End a running request after so many blocks have KV."""
        asked, blocks = self.running.pop(name)
        count = len(blocks) if computed is None else computed
        pools.computed(self.pool, asked.block_hashes[:count], blocks[:count])
        asked.status, asked.num_computed_tokens = status, SIZE * count
        self.finish(asked, [block.block_id for block in blocks[:count]])
        self.pool.free_blocks(reversed(blocks))

    def finish(self, asked: Any, *blocks: list[int]) -> None:
        self.sessions.finish(self.live.pop(asked.request_id), *blocks)

    def turn(self, hashes: list[BlockHash]) -> int:
        """Run a request from its arrival to its end; the number of blocks that were cached."""
        asked = self.request(hashes)
        cached = self.admit(asked)
        self.end(asked.request_id)
        self.now += 1.0
        return cached

    def owned(self) -> int:
        """Return how many blocks have an owner."""
        return sum(bool(self.queue.set_of[block.block_id].owners) for block in self.pool.blocks)


def test_the_session_that_a_client_gives_vllm_counts_for_any_prompt() -> None:
    engine = Engine()
    for hashes, name in ((prompt("a", 4), "mine"), (prompt("b", 3), "mine"), (prompt("b", 5), None)):
        asked = engine.request(hashes, name)
        engine.admit(asked)
        engine.end(asked.request_id)
    assert [key.name for key in engine.sessions.ledger.tracker._sessions] == ["mine"], "b continues it"
    assert engine.owned() == 5, "what it has left behind is not its own"


def test_what_is_cached_of_a_waiting_request_goes_last() -> None:
    engine = Engine()
    engine.turn(prompt("aX", 8))
    waiting = engine.request(prompt("aY", 8))  # another session with the same head of four blocks
    for number in range(12):
        engine.turn(prompt(chr(ord("b") + number), 8))
    assert engine.admit(waiting) == 4
    engine.end(waiting.request_id)
    engine.queue.check_integrity()


def test_the_end_of_a_history_goes_first_though_a_backup_has_held_it_longer() -> None:
    engine = Engine()
    asked = engine.request(prompt("a", 8))
    engine.admit(asked)
    held = engine.running[asked.request_id][1][5:]
    engine.pool.touch(held)
    engine.end(asked.request_id)
    engine.pool.free_blocks(reversed(held))
    engine.pool.get_new_blocks(BLOCKS - 5)
    assert len(leading_blocks(engine.pool, prompt("a", 8))) == 5


def test_blocks_of_all_groups_are_owned() -> None:
    engine = Engine()
    asked = engine.request(prompt("a", 2))
    engine.admit(asked)
    others = engine.pool.get_new_blocks(2)
    asked.num_computed_tokens, asked.status = 2 * SIZE, STOPPED
    _, blocks = engine.running.pop(asked.request_id)
    engine.finish(asked, [block.block_id for block in blocks], [block.block_id for block in others])
    assert engine.owned() == 4 and not engine.queue.set_of[0].owners, "vLLM's null block has no owner"


def test_before_it_is_bound_it_does_nothing() -> None:
    idle = SessionHistories(Owners())
    asked: Any = SimpleNamespace(request_id="r", cache_salt=None, block_hashes=[])
    idle.arrive(live := LiveRequest(asked))
    assert live.session is None and idle.finish(live, []) is None


class Turns(RuleBasedStateMachine):
    """Requests wait, run and end in any order; whatever happens, the queue is sound and nothing is kept for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.waiting: list[Any] = []

    @rule(name=st.sampled_from(["a", "ab", "abc", "b", "c", "cd"]), length=st.integers(0, 12))
    def arrive(self, name: str, length: int) -> None:
        self.waiting.append(self.engine.request(prompt(name, length)))

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        if self.engine.admit(self.waiting[0]) >= 0:
            self.waiting.pop(0)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), status=st.sampled_from([STOPPED, ABORTED]), share=st.floats(0, 1))
    def end(self, data: st.DataObject, status: RequestStatus, share: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.running)))
        length = len(self.engine.running[name][1])
        self.engine.end(name, status, length if status is STOPPED else int(share * length))

    @precondition(lambda self: self.waiting)
    @rule()
    def abort(self) -> None:
        asked = self.waiting.pop()
        asked.status = ABORTED
        self.engine.finish(asked, [])

    @rule(seconds=st.sampled_from([0.1, 3.0, 500.0, 1e6]))
    def pass_time(self, seconds: float) -> None:
        self.engine.now += seconds
        self.engine.sessions.advance()

    @precondition(lambda self: not self.engine.running)
    @rule()
    def reset(self) -> None:
        assert self.engine.pool.reset_prefix_cache()
        self.engine.queue.forget_blocks()

    @invariant()
    def sound(self) -> None:
        engine = self.engine
        engine.queue.check_integrity()
        assert len(engine.queue.owners.next_runs) <= len(engine.sessions.ledger.tracker._sessions)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
