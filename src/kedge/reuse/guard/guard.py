"""The guard of one engine: what it orders for a request, which calls are checked, and what it learns from checks."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kedge.guard import GuardMode, GuardNote, GuardOrders, GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.record import GuardRecord
from kedge.settings import GuardSettings
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, GenerateRequest, Namespace, ReuseMode, WorkflowAgent, WorkflowId

logger = logging.getLogger(__name__)
TRIED = 0.5
"""Share of the calls with something withheld that are tried with it translated. From the others the anchors learn: a
trial with what was learned from the very same call would always be clean."""
RARER, RAREST = 0.5, 1 / 64
"""Factor on the share of checked calls for each call of an agent in a row that was not translated, and the least one:
what a comparison needs is gathered while a call is served, and there is nothing to compare unless it is translated.
"""


class GuardKey(NamedTuple):
    """A placeholder in the prompts of one agent of a workflow."""

    namespace: Namespace
    workflow: WorkflowId
    agent: AgentId
    placeholder: str

    def __str__(self) -> str:
        text = f"{self.workflow}/{self.agent}/{self.placeholder}"
        return text if text.isprintable() else repr(text)


class SentinelFinding(StrEnum):
    """What the sentinel tokens of a request say of its translation."""

    USUAL = "usual"
    UNUSUAL = "unusual"
    """The errors are larger than before: its answer is worth a check."""
    REFUTED = "refuted"
    """What was translated is wrong."""


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What becomes of one request."""

    orders: GuardOrders
    is_checked: bool = False
    """Whether its answer is to be compared"""
    tried: str = ""
    """The withheld placeholder that the comparison translates; "": the request itself is translated"""


class QualityGuard:
    """The records of all agents, bounded. Any thread may call."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._records: BoundedDict[GuardKey, GuardRecord] = BoundedDict(settings.max_agents)
        self._worth: BoundedDict[WorkflowAgent, float] = BoundedDict(settings.max_agents)
        """Factor on the share of checked calls; 1 for agents without an entry"""
        self._lock, self._rng = threading.Lock(), random.Random(0)
        self.suspicions = self.breaches = 0
        """Of all records, also those that are no longer kept"""

    def mode(self, request: GenerateRequest) -> GuardMode:
        """Return the mode that holds for a request; `off` for one that is not translated anyway."""
        if request.reuse is not ReuseMode.TRANSLATE or not _keys(request):
            return GuardMode.OFF
        return request.guard.mode or self._settings.mode

    def orders(self, request: GenerateRequest) -> GuardOrders:
        """Return what is withheld from translation in a request, and its agent's epoch."""
        mode = self.mode(request)
        if mode is GuardMode.OFF:
            return request.guard
        with self._lock:
            return self._orders(request, mode, _keys(request))

    def _orders(self, request: GenerateRequest, mode: GuardMode, keys: Sequence[GuardKey]) -> GuardOrders:
        records = {key: self._records.use(key, GuardRecord) for key in keys if key in self._records}
        withheld = frozenset(
            key.placeholder for key in keys if mode is GuardMode.SHADOW or (key in records and records[key].withheld)
        )
        epoch = sum(record.epoch for record in records.values())  # each of its placeholders' breaches is a new one
        return replace(request.guard, withheld=withheld, sentinels=self._settings.sentinels, epoch=epoch)

    def verdict(self, request: GenerateRequest) -> GuardVerdict:
        """Return what is ordered for a request that arrives, and whether its answer is to be compared.

        Of calls with something withheld, a share is tried with one of that translated, drawn at random: one that no
        anchor predicts would else be the only one. The others check what is translated, as all calls do.
        """
        mode = self.mode(request)
        if mode is GuardMode.OFF:
            return GuardVerdict(request.guard)
        keys = _keys(request)
        with self._lock:
            orders = self._orders(request, mode, keys)
            if orders.withheld and self._rng.random() < TRIED:
                tried = self._rng.choice(sorted(orders.withheld))
                return GuardVerdict(replace(orders, held_out=True), True, tried)
            is_translated = len(orders.withheld) < len(keys)
            share = self._worth.get(request.workflow_agent, 1.0) * self._share(keys)
            return GuardVerdict(orders, is_translated and self._rng.random() < share)

    def _share(self, keys: Sequence[GuardKey]) -> float:
        states = {self._records[key].state for key in keys if key in self._records}
        return self._settings.share if states == {GuardState.ON} else self._settings.canary_share

    def translated(self, request: GenerateRequest, placeholders: Iterable[str]) -> None:
        """Note that a request was served with these placeholders translated, if any."""
        agent, placeholders = request.workflow_agent, tuple(placeholders)
        with self._lock:
            self._worth[agent] = 1.0 if placeholders else max(RAREST, RARER * self._worth.get(agent, 1.0))
            for placeholder in placeholders:
                key = GuardKey(*request.workflow_agent, placeholder)
                record = self._records.use(key, GuardRecord)
                before = record.state
                record.translated()
                _log_change(key, before, record)

    def observe(self, request: GenerateRequest, placeholders: Iterable[str], seen: DecisionComparison) -> None:
        """Take the comparison of an answer with these placeholders translated and one by dense prefill."""
        with self._lock:
            for placeholder in placeholders:
                key = GuardKey(*request.workflow_agent, placeholder)
                record = self._records.use(key, GuardRecord)
                before, suspicions, epoch = record.state, record.suspicions, record.epoch
                record.observe(seen, self._settings)
                self.suspicions += record.suspicions - suspicions
                self.breaches += record.epoch - epoch
                _log_change(key, before, record, seen, is_breach=record.epoch > epoch)

    def sentinels_read(self, request: GenerateRequest, errors: Mapping[str, float], overall: float) -> SentinelFinding:
        """Take the mean relative error of each placeholder's sentinel tokens, and of all of them.

        A single token may be far off by chance, but not the mean of a call: above `max_sentinel_error` the placeholders
        that are above it, or all of them, are withheld.
        """
        limit = self._settings.max_sentinel_error
        is_refuted = not overall <= limit  # neither is what is not a number
        above = {name for name, error in errors.items() if not error <= limit} or set(errors)
        unusual = False
        with self._lock:
            for placeholder, error in errors.items():
                key = GuardKey(*request.workflow_agent, placeholder)
                record = self._records.use(key, GuardRecord)
                if is_refuted and placeholder in above:
                    self._refute(key, record, error)
                elif not is_refuted:
                    unusual |= record.is_unusual(error)
        if is_refuted:
            return SentinelFinding.REFUTED
        return SentinelFinding.UNUSUAL if unusual else SentinelFinding.USUAL

    def _refute(self, key: GuardKey, record: GuardRecord, error: float) -> None:
        before, suspicions, epoch = record.state, record.suspicions, record.epoch
        record.refute(self._settings)
        self.suspicions += record.suspicions - suspicions
        self.breaches += record.epoch - epoch
        logger.warning("guard: %s: %s -> %s, withheld: sentinel error %.3g", key, before, record.state, error)

    def notes(self, request: GenerateRequest) -> tuple[GuardNote, ...]:
        """Return the states of a request's placeholders, for its receipt."""
        if self.mode(request) is GuardMode.OFF:
            return ()
        with self._lock:
            return tuple(self._note(key, self._records[key]) for key in _keys(request) if key in self._records)

    def _note(self, key: GuardKey, record: GuardRecord) -> GuardNote:
        evidence = record.evidence
        bound = evidence.upper(self._settings.alpha)
        return GuardNote(key.placeholder, record.state, evidence.checks, evidence.changed, bound)

    def stats(self, owns: Callable[[Namespace], bool] = lambda _: True) -> list[dict[str, object]]:
        """Return all records of the namespaces that `owns` picks as plain data, without their tenants."""
        with self._lock:  # bounds are computed without it: requests wait for it
            mine = [
                (key, replace(record, evidence=copy(record.evidence)))
                for key, record in self._records.items()
                if owns(key.namespace)
            ]
        return [self._entry(key, record) for key, record in mine]

    def _entry(self, key: GuardKey, record: GuardRecord) -> dict[str, object]:
        note = self._note(key, record)
        return {
            "workflow": key.workflow,
            "agent": key.agent,
            "placeholder": key.placeholder,
            "state": record.state.value,
            "withheld": record.withheld,
            "checks": note.checks,
            "changed": note.changed,
            "estimate": record.evidence.share,
            "bound": note.bound,
            "max_kl": record.kl,
            "sentinel_error": record.sentinel_error,
            "suspicions": record.suspicions,
            "breaches": record.epoch,
        }

    def clear(self) -> None:
        """Forget all records."""
        with self._lock:
            self._records.clear()
            self._worth.clear()


def _keys(request: GenerateRequest) -> list[GuardKey]:
    names = dict.fromkeys(segment.name for segment in request.segments if segment.is_placeholder)
    return [GuardKey(*request.workflow_agent, name) for name in names]


def _log_change(
    key: GuardKey,
    before: GuardState,
    record: GuardRecord,
    seen: DecisionComparison | None = None,
    *,
    is_breach: bool = False,
) -> None:
    if is_breach:
        logger.warning("guard: %s is no longer translated: too many answers changed; its anchors are discarded", key)
    elif record.state is not before and record.withheld and seen:
        what = "an answer changed" if seen.changed else "a check was far off"
        logger.warning("guard: %s: %s -> %s, withheld: %s (KL %.3g)", key, before, record.state, what, seen.kl)
    elif record.state is not before:
        counts = record.evidence.changed, record.evidence.checks
        logger.info("guard: %s: %s -> %s (%d of %d checked answers changed)", key, before, record.state, *counts)
