"""Who needs KV again and how soon: agents their fixed prompts, sessions their histories (KVFlow, section 3.1).

Every cache has one `Owners`, which all its tiers follow. What a tier evicts together is `Ranked`: a node of the radix
tree, or vLLM's blocks with the same owners. Both take the least step of whoever needs them.
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable
from functools import partial
from typing import Any

from kedge.cache.copies import Purpose, Transfer
from kedge.policies.eviction import NextRuns, StepView
from kedge.policies.prefetch import PREFETCH_JOBS, PREFETCH_WINDOW, is_within, may_replace
from kedge.structures.heaps import StepCounts

Owner = Hashable
"""Who needs KV again: an agent whose fixed prompt it is (tenant, client, run, agent), or a session with its history"""


class Ranked:
    """KV that is evicted together, as a policy sees it (`StepView`)."""

    __slots__ = ("last_access", "step", "steps", "varying")

    def __init__(self) -> None:
        self.last_access = 0
        self.steps: StepCounts | None = None
        """The steps of all that need it; None where nobody is known to"""
        self.step: float | None = None
        """The least of them"""
        self.varying = False
        """Whether it follows a fixed prompt"""

    def change_step(self, old: float | None, new: float | None) -> bool:
        """Replace the step of one owner; None: it does not need this. Returns whether the least step changes."""
        before = self.step
        steps = self.steps = self.steps or StepCounts()
        if old is not None:
            steps.remove(old)
        if new is not None:
            steps.add(new)
        self.step = steps.least
        if self.step is None:
            self.steps = None
        return self.step != before

    def has_steps(self, steps: Iterable[float]) -> bool:
        """Return whether these are the steps of all owners that need it."""
        found = Counter(steps)
        return self.step == min(found, default=None) and found == (self.steps.counts if self.steps else Counter())


class Owners:
    """The owners whose next run is known."""

    def __init__(self) -> None:
        self.next_runs: dict[Owner, tuple[float, float]] = {}
        """Steps, with a probability"""
        self.followers: list[Callable[[Owner, float | None, float | None], None]] = []
        """Called with an owner whose step has changed, before and now; None where nothing is known of it"""

    def step(self, owner: Owner | None) -> float | None:
        """Return in how many steps an owner runs, or None."""
        return self.next_runs[owner][0] if owner in self.next_runs else None

    def on_forecast(self, changes: NextRuns[Any]) -> None:
        """Take the changes of a forecast, or of sessions."""
        for owner, next_run in changes.items():
            old = self.step(owner)
            if next_run is None:
                self.next_runs.pop(owner, None)
            else:
                self.next_runs[owner] = next_run
            if (new := self.step(owner)) != old:
                for follow in self.followers:
                    follow(owner, old, new)


class Prefetcher:
    """Loads what is needed within the window and is on the host only, before a request asks for it (KVFlow, 3.2)."""

    def __init__(
        self,
        owners: Owners,
        lacking: Callable[[Owner], int],
        load: Callable[[Owner, Callable[[StepView], bool]], object],
        unlabelled_step: float,
    ) -> None:
        """Take `lacking`, which returns how many blocks a prefetch for an owner would load, and `load`, which loads
        them if there is room, or what its second argument accepts may go for that.
        """
        self._owners, self._lacking, self._load, self._unlabelled_step = owners, lacking, load, unlabelled_step
        self.window, self.jobs = PREFETCH_WINDOW, PREFETCH_JOBS
        """Steps within which is prefetched (benchmarks set it below 0), and how many at once"""
        self.due = self._denied = False
        """Whether to look again: a forecast, a load or the owner of a block has changed. A failed copy changes nothing:
        it would be tried again without end. And whether the last look found no room for some."""
        self._near: dict[Owner, None] = {}
        """Owners within the window"""
        owners.followers.append(self._follow)

    def _follow(self, owner: Owner, _: float | None, step: float | None) -> None:
        if is_within(step, self.window):
            self._near[owner] = None
            self.due = self.due or self._lacking(owner) > 0
        else:
            self._near.pop(owner, None)
        self.due |= self._denied

    def left(self, pending: Iterable[Transfer]) -> int:
        """Return how many prefetches may begin while these transfers are `pending`."""
        return max(0, self.jobs - sum(one.purpose is Purpose.PREFETCH for one in pending))

    def start(self, pending: Iterable[Transfer], among: Container[Owner] | None = None) -> None:
        """Start to load KV that owners need and the device lacks; with `among`, of these owners only. Order: fewest
        steps, then highest probability, then fewest blocks. Prefetches in `pending` count against `jobs`. Loads that
        find no room are tried again when due. O(owners in the window).
        """
        if not self.due:
            return
        self.due, left = False, self.left(pending)
        near = self._near if among is None else filter(among.__contains__, self._near)
        found = {owner: blocks for owner in near if left and (blocks := self._lacking(owner))}

        def order(owner: Owner) -> tuple[float, ...]:
            step, probability = self._owners.next_runs[owner]
            return step, -probability, found[owner]

        for owner in sorted(found, key=order):
            if left and self._lacking(owner):  # it has not come with one before it
                self._load(owner, self.may_evict(owner))
                left -= 1
        self._denied = any(map(self._lacking, found))

    def may_evict(self, owner: Owner | None) -> Callable[[StepView], bool]:
        """Return what a load for an owner may evict: what is needed later; for one without a step, everything."""
        if owner not in self._owners.next_runs:
            return lambda _: True
        step, odds = self._owners.next_runs[owner]
        return partial(may_replace, step=step, virtual_step=self._unlabelled_step, probability=odds)
