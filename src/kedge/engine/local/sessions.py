"""Session caching in the embedded engine: a label on the end of every session's whole history in the cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kedge.cache import CacheManager, EvictionPolicy
from kedge.policies.eviction import lru
from kedge.policies.sessions import Guard, SessionHints, SessionKey, SessionSteps, StopReason
from kedge.types import AgentKey, FinishReason, GenerateRequest, Namespace, ReuseMode


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session, from its arrival to the end of its answer."""

    session: SessionKey
    began: float
    chain: Sequence[Hashable]
    """Prefix hashes of the full blocks of its prompt"""


class SessionCaching:
    """Finds the session of each request and keeps its KV for as long as its return is worth that."""

    def __init__(self, cache: CacheManager, is_on: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without sessions; unless `is_on` none are looked for. `clock` is in seconds."""
        self._cache, self._is_on, self._clock = cache, is_on, clock
        self._arrivals = itertools.count()
        self.steps, self.guard = SessionSteps(), Guard(cache.num_blocks)
        self._other_policy: EvictionPolicy = lru

    def arrived(self, request: GenerateRequest) -> Turn | None:
        """Protect what is cached of the prompt of a request that waits, more than that of those that come later.

        None for a request that reuses nothing.
        """
        if request.reuse is ReuseMode.OFF or not self._is_on:
            return None
        agent = request.agent_key if request.agent else None
        flow = (request.namespace, request.workflow, request.agent) if agent else None
        place = next(self._arrivals)
        return self.begin(request.namespace, request.tokens, SessionHints(flow=flow), agent, place)

    def begin(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        hints: SessionHints,
        agent: AgentKey | None = None,
        place: float = 0.0,
    ) -> Turn:
        """Do as `arrived` for a prompt of tokens with these hints."""
        now = self._clock()
        chain = chain_of(tokens, self._cache.block_size)
        key = self.steps.arrive(namespace, chain, now, hints, agent, place)
        if self.guard.access(key, chain):
            self._other_policy = self._cache.set_policy(self._other_policy)
        self.advance()
        self._cache.on_label(namespace, key, tokens, backed_up=False)
        return Turn(key, now, chain)

    def waiting(self, turns: Iterable[Turn]) -> None:
        """Protect what is cached of waiting prompts by their place in the order of service, those that go last least.

        Places count by powers of two, so that one that goes first changes the labels of few others.
        """
        for place, turn in enumerate(turns):
            self.steps.hold(turn.session, place.bit_length())

    def answered(
        self,
        turn: Turn,
        tokens: Sequence[int],
        stop: StopReason = StopReason.UNKNOWN,
        tool: str = "",
        returns_in: float | None = None,
    ) -> None:
        """Keep the whole history of a session, `tokens`, from the end of a turn on; it is backed up."""
        now, key = self._clock(), turn.session
        self.steps.observe_call(key, now - turn.began)
        chain = chain_of(tokens, self._cache.block_size, turn.chain)
        self.steps.answered(key, chain, now, stop, tool, returns_in)
        if len(chain) > len(turn.chain):
            self.guard.own(key, chain)
        self.advance()
        if self.steps.expects(key):
            self._cache.on_label(key.namespace, key, tokens)

    def cancelled(self, turn: Turn) -> None:
        """Take the end of a turn without an answer."""
        self.steps.cancelled(turn.session, self._clock())
        self.advance()

    def labelled(self, agent: AgentKey, tokens: Sequence[int]) -> None:
        """Take the fixed prompt of an agent, which the cache has labelled."""
        if self._is_on:
            self.guard.own(agent, chain_of(tokens, self._cache.block_size))

    def on_forecast(self, changes: Mapping[AgentKey, tuple[float, float] | None]) -> None:
        """Take the changes of the forecast, which the cache has taken."""
        if self._is_on:
            self.steps.on_forecast(changes)
            self.guard.on_steps(changes)

    def advance(self) -> None:
        """Pass on the steps that have changed. Call this in every step, and before blocks are evicted."""
        if changes := self.steps.advance(self._clock()):
            self._cache.on_forecast(changes)
            self.guard.on_steps(changes)


def stop_reason(tool_mark: str, text: str, finish: FinishReason) -> StopReason:
    """Return what a session waits for after the answer `text`, in which a tool call has `tool_mark` ("": unknown)."""
    if not tool_mark or finish is not FinishReason.STOP:
        return StopReason.UNKNOWN
    return StopReason.TOOL if tool_mark in text else StopReason.USER


def chain_of(tokens: Sequence[int], block_size: int, known: Sequence[Hashable] = ()) -> list[Hashable]:
    """Return the prefix hashes of the full blocks of `tokens`; `known` are those of what they begin with, or more."""
    chain = list(known[: len(tokens) // block_size])
    before = chain[-1] if chain else 0
    for stop in range((len(chain) + 1) * block_size, len(tokens) + 1, block_size):
        before = hash((before, *tokens[stop - block_size : stop]))
        chain.append(before)
    return chain
