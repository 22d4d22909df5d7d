"""Fixed or varying: where the part of an agent's prompt ends that is the same in every call (KVFlow, section 3.3).

An explicit marker says it. Without one, the history of an agent's prompts does: what they all begin with. Trap: in a
template whose first variable stands early, such as a `{date}` in its first line, the fixed part ends there. Prompts
of one day have much more in common than that, so a length that was once contradicted is not believed again quickly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from kedge.errors import ConfigError
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Tokens


@dataclass
class _History:
    """Of the prompts of one agent: the last one, and how long each of the last K was like the one before it."""

    last: Tokens
    used: float
    common: deque[int]
    """Tokens; their minimum is the longest common prefix of all these prompts."""
    length: int | None = None
    doubt: int = 0
    """Calls for which the length may not grow, because more was contradicted."""


class FixedBoundary:
    """Declares the length of every agent's fixed prompt, in tokens. One thread owns it.

    A length is declared once the longest common prefix of the last `window` prompts (K) has been met by
    `confirmations` of them (m). It shrinks with the first prompt that has less in common, and grows once the last
    `confirmations` prompts have more in common; but not before `window` calls have passed since a prompt last fell back
    from more to what is declared, or to less. An agent is forgotten when it has not called for `ttl` seconds, or
    when `capacity` agents have called since: memory is one prompt per agent.

    Raises `ConfigError` for settings outside 1 <= confirmations <= window, ttl > 0 and capacity >= 1.
    """

    def __init__(self, window: int = 8, confirmations: int = 3, ttl: float = 3600.0, capacity: int = 4096) -> None:
        _require("confirmations", confirmations, 1 <= confirmations <= window, f"must be in 1..{window} (window)")
        _require("ttl", ttl, ttl > 0, "must be above 0 seconds")
        _require("capacity", capacity, capacity >= 1, "must be at least 1")
        self._window, self._confirmations, self._ttl = window, confirmations, ttl
        self._histories: BoundedDict[Hashable, _History] = BoundedDict(capacity)

    def observe(self, agent: Hashable, prompt: Tokens, now: float, marker: int | None = None) -> int | None:
        """Return the length of the fixed part of `prompt`, which `agent` calls with at `now`; None: not known (yet).

        `marker` is what the request says. It wins, where it lies inside the prompt; elsewhere it is no marker.
        """
        self._expire(now)
        history = self._histories.get(agent)
        if history is None:
            history = _History(prompt, now, deque(maxlen=self._window))
        else:
            self._compare(history, prompt)
        history.last, history.used = prompt, now
        self._histories[agent] = history
        return marker if marker is not None and 0 <= marker <= len(prompt) else history.length

    def length(self, agent: Hashable, now: float) -> int | None:
        """Return the length that is declared for `agent`; None where there is none."""
        self._expire(now)
        history = self._histories.get(agent)
        return history.length if history else None

    def __len__(self) -> int:
        """Return how many agents are remembered."""
        return len(self._histories)

    def _compare(self, history: _History, prompt: Tokens) -> None:
        common = common_prefix(history.last, prompt)
        previous = history.common[-1] if history.common else common
        history.common.append(common)
        history.doubt = max(0, history.doubt - 1)
        if history.length is None:
            history.length = self._declared(history)
        elif common <= history.length:
            if common < max(history.length, previous):
                history.length, history.doubt = common, self._window
        elif not history.doubt:
            history.length = max(history.length, min(list(history.common)[-self._confirmations :]))

    def _declared(self, history: _History) -> int | None:
        shortest = min(history.common)
        return shortest if history.common.count(shortest) >= self._confirmations else None

    def _expire(self, now: float) -> None:
        while self._histories and next(iter(self._histories.values())).used + self._ttl <= now:
            self._histories.popitem(last=False)


class FixedLengths:
    """The number of fixed leading tokens of an agent's prompts, from hints, segments or the agent's history."""

    def __init__(self) -> None:
        self._boundary = FixedBoundary()

    def of(self, request: GenerateRequest, now: float) -> int | None:
        """Return the request's own length, else that of its first prefix segment if others follow, else its history's.

        `now` is in seconds on any clock that does not go backwards. None: not known (yet).
        """
        if request.fixed is not None and 0 <= request.fixed <= request.prompt_tokens:
            return request.fixed
        first, *others = request.segments
        if others and not first.is_placeholder:
            return len(first.tokens)
        agent = (request.namespace, request.client, request.workflow, request.agent)
        return self._boundary.observe(agent, request.tokens, now)


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return how many tokens both begin with. Slices are compared at once, which spares Python's loop."""
    same, end = 0, min(len(one), len(other))
    while same < end:
        middle = (same + end + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def _require(key: str, value: object, good: bool, why: str) -> None:
    if not good:
        raise ConfigError(f"boundary: {key}", value, why)
