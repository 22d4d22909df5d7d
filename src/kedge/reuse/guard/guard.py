"""The guard of one engine: what it orders for a request, which calls are checked, and what it learns from checks."""

import logging
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf, isinf
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel

from kedge.guard import EVERYTHING, FidelityNote, GuardMode, GuardNote, GuardOrders, GuardState
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.fidelity import LEARNING, RUNGS, URGENT, MeanEvidence, Proofs, RungFinding, SavedProof, Serving
from kedge.reuse.guard.record import ALPHA, SETTLED, Errors, GuardRecord, refuted_by_drawn, refuted_by_weak
from kedge.reuse.layout import layout, reads_in_place
from kedge.settings import GuardSettings
from kedge.structures.bounded import ENTRIES, BoundedDict
from kedge.types import AgentId, GenerateRequest, Namespace, WorkflowAgent, WorkflowId

logger = logging.getLogger(__name__)
SENTINELS = 2
"""Translated tokens of every value that the model computes as well in an agent's first calls and in a random share of
the others. Where they are off by more than `MAX_SENTINEL_ERROR` in the mean, the prompt is computed before its first
token. In other calls of an agent whose values are translated whole, one token each of two values, which both have to be
off"""
MAX_SENTINEL_ERROR = 0.5
"""Highest mean relative error of a call's sentinel tokens: the norm of the difference over the norm of computed keys or
values. At 1 translated KV says nothing of computed KV. With one token each of two values: the highest error of each,
and half of their highest mean"""
TRIED = 0.5
"""Share of the calls with something withheld that are tried with it translated. From the others the anchors learn: a
trial with what was learned from the very same call would always be clean."""
WATCHED = 0.25
"""Share of an agent's calls in which translated tokens of all values are drawn as sentinels, once it is not new. The
draw is random, so that no fault keeps clear of it. In the others, weak tokens are sentinels."""
MORE = 4.0
"""Times the usual share of compared calls near the limit, or while it is not known whether decisions change"""

Group = tuple[Namespace, WorkflowId]
"""What records are saved by"""


class SavedGroup(BaseModel):
    """What is saved of one workflow of a namespace. Data of another shape raises `ValueError`."""

    records: list[tuple[str, str, GuardRecord]]
    """Agents, placeholders, and what is known of them"""
    proofs: list[SavedProof]
    epochs: dict[str, int] = {}
    """By agent, the breaches so far"""


class GuardKey(NamedTuple):
    """A placeholder in the prompts of one agent of a workflow."""

    of: WorkflowAgent
    placeholder: str

    def __str__(self) -> str:
        text = f"{self.of.workflow}/{self.of.agent}/{self.placeholder}"
        return text if text.isprintable() else repr(text)


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    """What becomes of one request."""

    orders: GuardOrders
    is_checked: bool = False
    """Whether its answer is to be compared"""
    tried: str = ""
    """The withheld placeholder that the comparison translates, or `EVERYTHING`; "": the request itself is translated"""
    is_settled: bool = False
    """Whether the comparison can wait: its agent's first calls have been compared, and its mean hardly seems to rise.
    Or so many have been compared that proved nothing
    """


class QualityGuard:
    """The records of all agents, bounded. Any thread may call."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        of, owner = attrgetter("of.namespace.tenant"), attrgetter("namespace.tenant")
        self._records: BoundedDict[GuardKey, GuardRecord] = BoundedDict(ENTRIES, owner=of)
        self._epochs: BoundedDict[WorkflowAgent, int] = BoundedDict(16 * ENTRIES, owner=owner)
        """Breaches of all placeholders: what was condemned stays so, also once the records are no longer kept"""
        self._proofs = Proofs(ENTRIES, owner=owner)
        self._noise = MeanEvidence()
        """Nats a token of rounding alone, of all agents"""
        self._lock, self._rng = threading.Lock(), random.Random(0)
        self.suspicions = self.breaches = 0
        """Of all records, also after they were forgotten"""

    def mode(self, request: GenerateRequest) -> GuardMode:
        """Return the mode that holds for a request; `off` for one that is not translated anyway."""
        return (request.guard.mode or self._settings.mode) if request.wants_translation else GuardMode.OFF

    def _orders(self, request: GenerateRequest, mode: GuardMode, keys: Sequence[GuardKey]) -> GuardOrders:
        """Return what is withheld from translation in a request, how the rest is translated, and its agent's epoch."""
        records = {key: self._records.use(key, GuardRecord) for key in keys if key in self._records}
        withheld = frozenset(key.placeholder for key in keys if key in records and records[key].withheld)
        watched = self._watched({key.placeholder: records.get(key) for key in keys})
        is_proving = not isinf(budget := self.budget(request))
        rung = self._proofs.of(request).choose(budget, ALPHA) if is_proving else None
        if mode is GuardMode.SHADOW or (is_proving and rung is None):
            withheld, rung = frozenset((EVERYTHING,)), LEARNING if is_proving else None
        epoch = self._epochs.get(request.workflow_agent, 0)
        return replace(request.guard, withheld=withheld, rung=rung, epoch=epoch, sentinels=SENTINELS, watched=watched)

    def _is_outdated(self, request: GenerateRequest) -> bool:
        """Return whether the anchors that a request used are discarded: it says nothing about later ones."""
        return request.guard.epoch < self._epochs.get(request.workflow_agent, 0)

    def budget(self, request: GenerateRequest) -> float:
        """Return the mean divergence that a request's agent may have; infinite: any, without proof."""
        return self._settings.fidelity if request.guard.fidelity is None else request.guard.fidelity

    def _watched(self, records: Mapping[str, GuardRecord | None]) -> frozenset[str]:
        """Return the placeholders of a request whose translated tokens are drawn as sentinels: new ones always, all in
        a share of the calls. Where one is withheld, what else is translated is not trusted either.
        """
        if self._rng.random() < WATCHED or any(record and record.withheld for record in records.values()):
            return frozenset(records)
        return frozenset(name for name, record in records.items() if record is None or record.is_new)

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
            if EVERYTHING in orders.withheld:
                # what is read where it was computed is exact
                moves = any(one.segment.is_placeholder and not reads_in_place(request, one) for one in layout(request))
                return GuardVerdict(orders, moves, EVERYTHING, is_settled=self._proofs.of(request).is_settled)
            if orders.withheld and self._rng.random() < TRIED:
                tried = self._rng.choice(sorted(orders.withheld))
                return GuardVerdict(replace(orders, held_out=True), True, tried)
            is_translated = len(orders.withheld) < len(keys)
            is_new = {self._records[key].state for key in keys if key in self._records} != {GuardState.ON}
            share, is_settled = self._share(request, is_new=is_new)
            return GuardVerdict(orders, is_translated and self._rng.random() < share, is_settled=is_settled)

    def _share(self, request: GenerateRequest, *, is_new: bool) -> tuple[float, bool]:
        """Return the share of an agent's translated calls that are compared, and whether that can wait: all of the
        first, of those after an unusual comparison, and while the bound is above the budget; else by how near it is.
        """
        budget, near = self.budget(request), float(is_new)
        if not isinf(budget):
            proof = self._proofs.of(request)
            serving, near = proof.serving.use(budget, Serving), max(near, bound := proof.nearness(budget, ALPHA))
            if serving.calls < SETTLED or serving.suspicion or bound == 1:
                can_wait = bound < 1 or proof.is_settled
                return 1.0, can_wait and serving.calls >= SETTLED and serving.suspicion < URGENT
        return min(1.0, self._settings.share * (1 + (MORE - 1) * near)), True

    def to_try(self, request: GenerateRequest, tried: str) -> list[int | None]:
        """Return the rungs on which a check translates what it tries: the serving one, or all that may come to serve;
        beside a check of a served call, all that may be cheaper. Empty for a call that was computed while its agent was
        proved: others need that time for their proof.
        """
        if tried not in ("", EVERYTHING):
            return [request.guard.rung]
        with self._lock:
            if isinf(budget := self.budget(request)):
                return [request.guard.rung] if tried else []
            proof = self._proofs.of(request)
            if tried and self.mode(request) is GuardMode.ON and proof.choose(budget, ALPHA) is not None:
                return []
            return [*proof.to_try(budget, ALPHA)]

    def needs_control(self, request: GenerateRequest) -> bool:
        """Return whether a trial has to measure what rounding alone makes of an answer: not where two of any agents had
        less than 1 % of the budget, as it is the model's. Noise that these miss counts as the translation's, which is
        on the safe side.
        """
        with self._lock:
            return self._noise.count < 2 or self._noise.mean > 0.01 * self.budget(request)

    def translated(self, request: GenerateRequest, placeholders: Iterable[str]) -> None:
        """Note that a request was served with these placeholders translated, if any."""
        agent, placeholders = request.workflow_agent, tuple(placeholders)
        with self._lock:
            if placeholders and not isinf(budget := self.budget(request)):
                self._proofs.of(request).serving.use(budget, Serving).calls += 1
            for placeholder in placeholders:
                key = GuardKey(agent, placeholder)
                record = self._records.use(key, GuardRecord)
                before = record.state
                record.translated()
                _log_change(key, before, record)

    def found(
        self,
        request: GenerateRequest,
        placeholders: Iterable[str],
        findings: Sequence[RungFinding],
        untranslated: Iterable[int] = (),
        noise: float | None = None,
    ) -> None:
        """Take what a request's prompt, with these placeholders translated on rungs, gave beside dense prefill, and
        the `noise` of that alone, if known. On the rungs in `untranslated` nothing was translated.
        """
        budget = self.budget(request)
        with self._lock:
            is_known = request.template_digest in self._proofs.get(request.workflow_agent, {})
            if not is_known or self._is_outdated(request):
                return
            for placeholder in placeholders:  # so that agents that are never proved are shown too
                self._records.use(GuardKey(request.workflow_agent, placeholder), GuardRecord)
            proof = self._proofs.of(request)
            before = None if isinf(budget) else proof.choose(budget, ALPHA)
            proof.untranslated.update(untranslated)
            if noise is not None:
                proof.noise.observe(noise)
                self._noise.observe(noise)
            for finding in findings:
                proof.observe(finding, hash(request.tokens), noise)
            served = before if isinf(budget) else proof.choose(budget, ALPHA)
        if served != before:
            names = ["computed" if one is None else RUNGS[one].name for one in (before, served)]
            logger.info("guard: %s/%s: %s -> %s", request.workflow, request.agent, *names)

    def observe(self, request: GenerateRequest, placeholders: Iterable[str], seen: DecisionComparison) -> None:
        """Take the comparison of an answer with these placeholders translated and one by dense prefill."""
        with self._lock:
            for placeholder in () if self._is_outdated(request) else placeholders:
                key = GuardKey(request.workflow_agent, placeholder)
                record = self._records.use(key, GuardRecord)
                before = record.state
                is_breach = self._learn(key, record, partial(record.observe, seen, self._settings))
                _log_change(key, before, record, seen, is_breach=is_breach)

    def sentinels_read(self, request: GenerateRequest, drawn: Errors, weak: Errors) -> bool:
        """Take the relative errors of a request's sentinel tokens. Returns whether they refute what was translated:
        placeholders are withheld then.
        """
        with self._lock:
            keys = {name: GuardKey(request.workflow_agent, name) for name in sorted({*drawn, *weak})}
            records = {name: self._records.use(key, GuardRecord) for name, key in keys.items()}
            limit = inf if self._settings.max_changed == 1 else MAX_SENTINEL_ERROR
            usual = {name: one.weak_errors for name, one in records.items()}
            blamed = refuted_by_drawn(drawn, limit) | refuted_by_weak(weak, usual, limit)
            for name, key in keys.items() if not self._is_outdated(request) else ():
                found = [*drawn.get(name, ()), *weak.get(name, ())]
                if name in weak and not blamed:
                    usual[name].observe(fmean(weak[name]))
                record, refuted = records[name], name in blamed
                before = record.state
                self._learn(key, record, partial(record.read_sentinels, self._settings, refuted=refuted))
                if refuted:
                    what = "guard: %s: %s -> %s, withheld: sentinel error %.3g"
                    logger.warning(what, key, before, record.state, fmean(found))
        return bool(blamed)

    def _learn(self, key: GuardKey, record: GuardRecord, learn: Callable[[], None]) -> bool:
        """Let a record learn something, and add what it finds to the counts of all records. Returns whether it is a
        breach, after which nothing is known of the agent's anchors.
        """
        suspicions, epoch = record.suspicions, record.epoch
        learn()
        self.suspicions += record.suspicions - suspicions
        if is_breach := record.epoch > epoch:
            self.breaches += 1
            self._epochs[key.of] = self._epochs.get(key.of, 0) + 1
            for proof in self._proofs.get(key.of, {}).values():
                proof.forget_anchors()
        return is_breach

    def notes(self, request: GenerateRequest) -> tuple[GuardNote, ...]:
        """Return the states of a request's placeholders, for its receipt."""
        if self.mode(request) is GuardMode.OFF:
            return ()
        with self._lock:
            return tuple(self._note(key, self._records[key]) for key in _keys(request) if key in self._records)

    def fidelity(self, request: GenerateRequest) -> FidelityNote | None:
        """Return what is known of the fidelity of a request's agent, for its receipt."""
        budget = self.budget(request)
        if self.mode(request) is GuardMode.OFF or isinf(budget):
            return None
        with self._lock:
            return self._proofs.of(request).note(budget, ALPHA)

    def _note(self, key: GuardKey, record: GuardRecord) -> GuardNote:
        seen = record.evidence
        return GuardNote(key.placeholder, record.state, seen.checks, seen.changed, seen.upper(seen.alpha))

    def stats(self, owns: Callable[[Namespace], bool] = lambda _: True) -> list[dict[str, object]]:
        """Return all records of the namespaces that `owns` picks as plain data, without their tenants, each with the
        proof of the wording in which its agent asked last.
        """
        found: list[dict[str, object]] = []
        for key, record in self._locked(owns):
            proof = next(reversed(self._proofs.get(key.of, {}).values()), None)
            fidelity = proof.note(next(reversed(proof.serving)), ALPHA) if proof and proof.serving else None
            entry = {
                "workflow": key.of.workflow,
                "agent": key.of.agent,
                **asdict(self._note(key, record)),
                "withheld": record.withheld,
                "estimate": record.evidence.share,
                "max_kl": record.kl,
                "fidelity": fidelity and asdict(fidelity),
                "suspicions": record.suspicions,
                "breaches": record.epoch,
            }
            found.append(entry)
        return found

    def _locked(self, owns: Callable[[Namespace], bool] = lambda _: True) -> Iterator[tuple[GuardKey, GuardRecord]]:
        """Yield the records, those used longest ago first, each under the lock: requests wait for one, not for all."""
        with self._lock:
            records = [*self._records.items()]
        for key, record in records:
            if owns(key.of.namespace):
                with self._lock:
                    yield key, record

    def saved(self) -> dict[Group, dict[str, object]]:
        """Return all records and proofs as plain data, by namespace and workflow, those used longest ago first."""
        groups: defaultdict[Group, SavedGroup] = defaultdict(lambda: SavedGroup(records=[], proofs=[]))
        for key, record in self._locked():
            held = groups[key.of.namespace, key.of.workflow].records
            held.append((key.of.agent, key.placeholder, deepcopy(record)))
        with self._lock:
            for agent, wordings in self._proofs.items():
                kept = (SavedProof.of(agent.agent, *one).model_copy(deep=True) for one in wordings.items())
                groups[agent.namespace, agent.workflow].proofs.extend(kept)
            for agent, epoch in self._epochs.items():
                groups[agent.namespace, agent.workflow].epochs[agent.agent] = epoch
        return {group: saved.model_dump(mode="json") for group, saved in groups.items()}

    def restore(self, groups: Mapping[Group, SavedGroup]) -> None:
        """Replace all records and proofs by these, as far as there is room."""
        with self._lock:
            for forgotten in (self._records, self._proofs, self._epochs):
                forgotten.clear()
            for group, held in groups.items():
                for agent, epoch in held.epochs.items():
                    self._epochs[WorkflowAgent(*group, AgentId(agent))] = epoch
                for agent, placeholder, record in held.records:
                    self._records[GuardKey(WorkflowAgent(*group, AgentId(agent)), placeholder)] = record
                for proof in held.proofs:
                    agent_of = WorkflowAgent(*group, AgentId(proof.agent))
                    if proof.wording:
                        self._proofs.wordings(agent_of)[proof.wording] = proof.proof()
                    else:
                        logger.warning("guard: a proof of %s says not of what wording it is: dropped", proof.agent)

    def clear(self) -> None:
        """Forget all records and proofs."""
        self.restore({})


def _keys(request: GenerateRequest) -> list[GuardKey]:
    agent = request.workflow_agent
    names = dict.fromkeys(segment.name for segment in request.segments if segment.is_placeholder)
    return [GuardKey(agent, name) for name in names]


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
