"""Session caching in the embedded engine: a label on the end of every session's whole history in the cache, and one on
the fixed part of every agent's prompt (KVFlow, section 3.3).
"""

import time
from collections.abc import Callable, Sequence

from kedge.cache import CacheManager
from kedge.hints.actions import ActionOutcome
from kedge.policies.eviction import EvictionPolicy, NextRuns, lru
from kedge.policies.fixed_prompts import FixedLengths
from kedge.policies.sessions import NO_SESSIONS, SessionHints, SessionLedger, Turn, TurnEnd, refused
from kedge.structures.prefixes import chain_of
from kedge.types import AgentKey, FinishReason, GenerateRequest, Namespace, ReuseMode, TurnHints


class SessionCaching:
    """Finds the session of each request and keeps its KV for as long as its return is worth that."""

    def __init__(self, cache: CacheManager, is_on: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without sessions; unless `is_on` none are looked for. `clock` is in seconds."""
        self._cache, self._is_on = cache, is_on
        self.ledger = SessionLedger(cache.num_blocks, clock)
        self._other_policy: EvictionPolicy = lru
        self._lengths = FixedLengths(cache.block_size)

    def arrived(self, request: GenerateRequest) -> Turn | None:
        """Protect the cached part of a waiting request's prompt: the earlier it came, the more. Returns its turn, None
        for a request that reuses nothing.
        """
        if request.reuse is ReuseMode.OFF or not self._is_on:
            return None
        return self.begin(request.namespace, request.tokens, SessionHints.of(request))

    def begin(self, namespace: Namespace, tokens: Sequence[int], hints: SessionHints) -> Turn:
        """Do as `arrived` for a prompt of tokens with these hints."""
        turn = self.ledger.arrive(namespace, chain_of(tokens, self._cache.block_size), hints)
        self.advance()
        self._cache.on_label(namespace, turn.session, tokens, backed_up=False)
        return turn

    def answered(self, turn: Turn, tokens: Sequence[int], end: TurnEnd) -> None:
        """Keep the whole history of a session, `tokens`, from the end of a turn on; it is backed up."""
        key = turn.session
        self.ledger.answered(turn, chain_of(tokens, self._cache.block_size, turn.chain), end)
        self.advance()
        if self.ledger.expects(key):
            self._cache.on_label(key.namespace, key, tokens)

    def cancelled(self, turn: Turn) -> None:
        """Take the end of a turn without an answer."""
        self.ledger.cancelled(turn)
        self.advance()

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions without a request. Returns what becomes of each hint."""
        if not self._is_on:
            return refused(hints, NO_SESSIONS)
        outcomes = self.ledger.advise(namespace, hints)
        self.advance()
        return outcomes

    def called(self, request: GenerateRequest, turn: Turn | None) -> None:
        """Label the fixed prompt of a request's agent, if it has one: the exact part of its prompt is cached now."""
        if not request.agent:  # its prompt is not even hashed
            return
        chain = turn.chain if turn else chain_of(request.tokens, self._cache.block_size)
        if length := self._lengths.of(request, chain):
            self.label(request.agent_key, request.tokens[:length], turn)

    def label(self, agent: AgentKey, tokens: Sequence[int], turn: Turn | None = None) -> None:
        """Label the cached part of `tokens` as an agent's fixed prompt. The prompt of `turn`, whose hashes are known,
        begins with it.
        """
        self._cache.on_label(agent.namespace, agent, tokens)
        if self._is_on:
            self.ledger.own(agent, chain_of(tokens, self._cache.block_size, turn.chain if turn else ()))

    def on_forecast(self, changes: NextRuns[AgentKey]) -> None:
        """Take the changes of the forecast, and pass them on to the cache."""
        if self._is_on:
            self.ledger.on_forecast(changes)
        self._cache.on_forecast(changes)

    def advance(self) -> None:
        """Pass on what has changed. Call this in every step, and before blocks are evicted."""
        steps, swaps_policy = self.ledger.advance()
        if swaps_policy:
            self._other_policy = self._cache.set_policy(self._other_policy)
        if steps:
            self._cache.on_forecast(steps)


def ending(tool_mark: str, text: str, finish: FinishReason) -> str:
    """Return what the answer `text`, in which a tool call has `tool_mark`, ended with; "" where that is not known."""
    if not tool_mark or finish is not FinishReason.STOP:
        return ""
    return "tool" if tool_mark in text else "user"
