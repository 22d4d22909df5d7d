"""When a session comes back: return times learned online, and what holding its KV until then is worth.

Every turn of a session ends with an idle time: a tool runs, or a person reads. Idle times of alike sessions go into
one survival histogram, with bins that widen with time: in each bin some of those that were still idle returned. So a
session that has not returned yet counts for as long as it has been idle, and no run has to be known to be over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from kedge.structures.bounded import BoundedDict

EDGES = tuple(0.5 * (2.0**step - 1) for step in range(19))
"""Seconds at which the bins begin; the last one has no end."""
MAX_CLASSES = 1024
"""Kinds of idle times that are distinguished; the one that was seen longest ago is forgotten first."""
BORROWED = 5.0
"""How many observations of its own outweigh what a class takes over from the wider one."""
HALF_LIFE = 20_000.0
"""Observations of a class after which older ones count half."""
PRIOR = 0.12
"""Share that returns in any bin, before anything was seen. The same in every bin, which widen: as under LRU, the value
of a session falls with its idle time."""
REFRESH = 1.1
"""Growth of the observations of a class after which its values are computed anew."""

Kind = tuple[Hashable, ...]
_WIDTHS = (*(after - before for before, after in zip(EDGES, EDGES[1:], strict=False)), EDGES[-1])


def bin_of(idle: float) -> int:
    """Return the bin that holds an idle time in seconds."""
    return max(0, bisect_right(EDGES, idle) - 1)


class _Survival:
    """Per bin, how many were idle in it, and how many of them returned in it.

    A session that is still in a bin counts half there (the actuarial estimate). If only those counted that have left
    it, the first to leave a bin would be those that returned.
    """

    __slots__ = ("exposed", "returned", "seen")

    def __init__(self) -> None:
        self.exposed, self.returned = [0.0] * len(EDGES), [0.0] * len(EDGES)
        self.seen = 0.0

    def observe(self, at: int, returned: bool) -> None:
        self.exposed[at] += 0.5
        if returned:
            self.returned[at] += 1
        else:
            self.exposed[at + 1] += 0.5
        self.seen += 1
        if self.seen > HALF_LIFE:
            self.seen /= 2
            self.exposed = [count / 2 for count in self.exposed]
            self.returned = [count / 2 for count in self.returned]

    def shares(self, wider: Sequence[float]) -> list[float]:
        """Return the share that returns in each bin, near `wider` where little was seen."""
        return [
            (returned + BORROWED * general) / (exposed + BORROWED)
            for returned, exposed, general in zip(self.returned, self.exposed, wider, strict=True)
        ]


class _Rates:
    """The values of one class by bin, each computed when it is first asked for."""

    __slots__ = ("_shares", "_values", "expires")

    def __init__(self, shares: Sequence[float], expires: float) -> None:
        self._shares = shares
        self._values: dict[int, float] = {}
        self.expires = expires
        """Observations of the class from which on they are outdated"""

    def at(self, start: int) -> float:
        """Return the value from bin `start` on."""
        value = self._values.get(start)
        if value is None:
            value = self._values[start] = best_rate(self._shares, start)
        return value


class ReturnTimes:
    """Survival histograms by class of idle time. A class is a path from the widest feature to the narrowest."""

    def __init__(self) -> None:
        self._classes: BoundedDict[Kind, _Survival] = BoundedDict(MAX_CLASSES)
        self._rates: BoundedDict[Kind, _Rates] = BoundedDict(MAX_CLASSES)

    def begin(self, kind: Kind) -> None:
        """Count a session of class `kind` that is idle from now on."""
        for depth in range(len(kind) + 1):
            self._classes.use(kind[:depth], _Survival).exposed[0] += 0.5

    def observe(self, kind: Kind, at: int, returned: bool) -> None:
        """Count a session of class `kind` that returned in bin `at`, or else stayed idle and is now in the next one.

        The last bin has no end.
        """
        for depth in range(len(kind) + 1):
            self._classes.use(kind[:depth], _Survival).observe(at, returned)

    def rate(self, kind: Kind, at: int) -> float:
        """Return the worth of holding KV for a session of class `kind` that has been idle up to bin `at`.

        It is the greatest P(return within t | idle so far) per expected second of holding, over all t (as in Gittins'
        index), in 1/s.
        """
        own = self._classes.get(kind)
        seen = own.seen if own else 0.0
        rates = self._rates.get(kind)
        if rates is None or seen >= rates.expires:
            rates = self._rates[kind] = _Rates(self._shares(kind), REFRESH * seen + 8)
        return rates.at(at)

    def _shares(self, kind: Kind) -> list[float]:
        shares = [PRIOR] * len(EDGES)
        for depth in range(len(kind) + 1):
            if survival := self._classes.get(kind[:depth]):
                shares = survival.shares(shares)
        return shares


def best_rate(shares: Sequence[float], start: int) -> float:
    """Return the greatest probability of return per expected second held, from bin `start` on.

    `shares` says of each bin how many of those that reach it return in it.
    """
    best = returned = held = 0.0
    alive = 1.0
    for at in range(start, len(shares)):
        now = alive * shares[at]
        returned += now
        held += _WIDTHS[at] * (alive - now / 2)
        if returned > best * held:
            best = returned / held
        alive -= now
        if alive < 1e-3:
            break
    return best
