"""Fixed or varying: where the part of an agent's prompt ends that is the same in every call (KVFlow, section 3.3).

An explicit marker says it. Without one, the history of the agent's prompts does: what several of them begin with, where
they are prompts of different sessions. Trap: in a template whose first variable stands early, such as a `{date}` in its
first line, the fixed part ends there. Prompts of one day have much more in common than that, so a length that was once
contradicted is not believed again quickly.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kedge.errors import ConfigError
from kedge.policies.prefix_clusters import PrefixClusters
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Tokens


@dataclass
class _History:
    """The prompts of one agent, and the length that was declared with the last of them."""

    clusters: PrefixClusters
    used: float
    length: int | None = None


class FixedBoundary:
    """Declares the length of the fixed part of every agent's prompts, in tokens. One thread owns it.

    An agent may have several: its prompts form clusters by what they begin with, as in two versions of a template. A
    session that grows, each prompt continuing the last, counts as one prompt. `PrefixClusters` has the rules: a
    length is confirmed by `confirmations` prompts (m), and a contradicted one is doubted for `window` prompts (K).

    An agent is forgotten when it has not called for `ttl` seconds. The one that called longest ago is forgotten when
    there are more than `capacity` agents, or more than `max_tokens` tokens kept of all prompts, at 8 bytes each.

    Raises `ConfigError` for settings outside 1 <= confirmations <= window, ttl > 0, capacity >= 1 and max_tokens >= 0.
    """

    def __init__(
        self,
        window: int = 8,
        confirmations: int = 3,
        ttl: float = 3600.0,
        capacity: int = 4096,
        max_tokens: int = 4 * 1024**2,
    ) -> None:
        _require("confirmations", confirmations, 1 <= confirmations <= window, f"must be in 1..{window} (window)")
        _require("ttl", ttl, ttl > 0, "must be above 0 seconds")
        _require("capacity", capacity, capacity >= 1, "must be at least 1")
        _require("max_tokens", max_tokens, max_tokens >= 0, "must be at least 0")
        self._window, self._confirmations, self._ttl, self._max_tokens = window, confirmations, ttl, max_tokens
        self._histories: BoundedDict[Hashable, _History] = BoundedDict(capacity, self._on_forgotten)
        self.tokens = 0
        """Tokens that are kept of all prompts."""

    def observe(self, agent: Hashable, prompt: Tokens, now: float, marker: int | None = None) -> int | None:
        """Return the length of the fixed part of `prompt`, which `agent` calls with at `now`; None: not known (yet).

        `marker` is what the request says. It wins, where it lies inside the prompt; elsewhere it is no marker.
        """
        self._expire(now)
        history = self._histories.use(agent, lambda: _History(PrefixClusters(self._window, self._confirmations), now))
        self.tokens -= history.clusters.tokens
        history.length, history.used = history.clusters.observe(prompt), now
        self.tokens += history.clusters.tokens
        while self.tokens > self._max_tokens:
            self._forget_oldest()
        return marker if marker is not None and 0 <= marker <= len(prompt) else history.length

    def length(self, agent: Hashable, now: float) -> int | None:
        """Return the length that was declared with the last prompt of `agent`; None where there is none."""
        self._expire(now)
        history = self._histories.get(agent)
        return history.length if history else None

    def __len__(self) -> int:
        """Return how many agents are remembered."""
        return len(self._histories)

    def _expire(self, now: float) -> None:
        while self._histories and next(iter(self._histories.values())).used + self._ttl <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._on_forgotten(*self._histories.popitem(last=False))

    def _on_forgotten(self, _agent: Hashable, history: _History) -> None:
        self.tokens -= history.clusters.tokens


class FixedLengths:
    """The number of fixed leading tokens of an agent's prompts, from hints, segments or the agent's history."""

    def __init__(self) -> None:
        self._boundary = FixedBoundary()

    def of(self, request: GenerateRequest, now: float) -> int | None:
        """Return the request's own length, else that of its first prefix segment if others follow, else its history's.

        `now` is in seconds on any clock that does not go backwards. None: not known (yet).
        """
        declared = _declared(request)
        return self._boundary.observe(_caller(request), request.tokens, now) if declared is None else declared

    def known(self, request: GenerateRequest, now: float) -> int | None:
        """Return as `of` does, without taking the request into the agent's history."""
        declared = _declared(request)
        return self._boundary.length(_caller(request), now) if declared is None else declared


def _declared(request: GenerateRequest) -> int | None:
    """Return the length that a request itself gives."""
    if request.fixed is not None and 0 <= request.fixed <= request.prompt_tokens:
        return request.fixed
    first, *others = request.segments
    return len(first.tokens) if others and not first.is_placeholder else None


def _caller(request: GenerateRequest) -> Hashable:
    return request.namespace, request.client, request.workflow, request.agent


def _require(key: str, value: object, good: bool, why: str) -> None:
    if not good:
        raise ConfigError(f"boundary: {key}", value, why)
