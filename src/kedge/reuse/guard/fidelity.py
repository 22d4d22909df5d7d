"""How an agent earns the cheapest way of translating its prompts that stays within a budget of fidelity.

The ways are rungs: base KV that is only moved, or anchors with fewer or more tokens computed. While none is proved, an
agent's prompts are computed, and each is tried on the rungs beside: what translation would have given, and the
divergence (KL, nats a token) of the answer's tokens over it. The cheapest rung whose mean divergence is
below the budget, with confidence, serves from then on, and goes on being compared.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf, log, sqrt
from typing import NamedTuple, Self

from pydantic import BaseModel

from kedge.discovery.bounds import MAX_OF_ONE
from kedge.guard import FidelityNote
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, WorkflowAgent

FORGET = 0.95
"""Factor on a comparison's weight at every later one: anchors change"""
LEAST = 6
"""Comparisons of a rung before it can serve"""
SETTLED = 40
"""Comparisons after which a bound hardly gets tighter: older ones weigh an eighth"""
STAYS = 0.9
"""A cheaper rung takes over only if it computes less than this share of the serving rung's tokens"""
MAX_BUDGETS = 6
"""Budgets of one agent whose proofs are kept apart"""
RETRIED = 4
"""Of the times that rungs are tried, one in so many includes those by anchors that were too far off"""
URGENT = 1.0
"""Suspicion from which an agent's comparisons do not wait: that of one divergence 2.7 times the geometric mean of what
is usual and the budget. One in 12 to 18 of SmolLM2's that reads is above that mean, none of 36 so far
"""
FAR = 0.1
"""Nats a token of a single answer from which it counts as changed: fifty times what KV in fp8 does"""


class Rung(NamedTuple):
    """A way of translating a prompt."""

    name: str
    usual: float
    """Mean divergence with SmolLM2 that reads (`docs/results/fidelity.md`): what is assumed before a comparison"""
    weak_error: float = inf
    """Predicted relative error above which a token is computed; infinite: no offsets are added"""

    @property
    def by_anchors(self) -> bool:
        """Whether offsets of anchors are added; where there are none yet, the value is computed."""
        return self.weak_error < inf


RUNGS = (
    Rung("moved", 0.03),
    Rung("anchors 0.25", 0.01, 0.25),
    Rung("anchors 0.15", 0.0015, 0.15),
    Rung("anchors 0.1", 0.0007, 0.1),
    Rung("anchors 0.08", 0.0005, 0.08),
    Rung("anchors 0.06", 0.0002, 0.06),
)
LEARNING = next(number for number, rung in enumerate(RUNGS) if rung.by_anchors)
"""The rung of calls that are computed: anchors are learned from them"""


@dataclass(slots=True)
class MeanEvidence:
    """The mean of a quantity that is compared again and again, with bounds that hold at any time.

    They are an asymptotic confidence sequence (Waudby-Smith et al., *Time-uniform central limit theory and asymptotic
    confidence sequences*, 2021), tightest at some 20 comparisons; older ones weigh less.
    """

    weight: float = 0.0
    squared_weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Weighted sum of squared distances from the mean"""
    count: int = 0

    def observe(self, value: float) -> None:
        """Take one more value."""
        self.weight = FORGET * self.weight + 1
        self.squared_weight = FORGET**2 * self.squared_weight + 1
        away = value - self.mean
        self.mean += away / self.weight
        self.spread = FORGET * self.spread + away * (value - self.mean)
        self.count += 1

    def upper(self, alpha: float) -> float:
        """Return the upper bound of the mean, wrong with probability `alpha`; infinite below `LEAST` values."""
        # Divergences have long tails, of which few values show nothing: with less than this for a deviation, a bound
        # that is looked at often is wrong in a third of the cases (exponential), or in half (lognormal).
        return self.mean + self._radius(alpha, least=1.5 * self.mean)

    def lower(self, alpha: float) -> float:
        """Return the lower bound of the mean, wrong with probability `alpha`."""
        return max(0.0, self.mean - self._radius(alpha, least=0.0))

    def missing(self, budget: float, alpha: float) -> int:
        """Return how many more values like the mean it takes until the upper bound is within `budget`."""
        ahead = replace(self)
        for more in range(SETTLED):
            if ahead.upper(alpha) <= budget:
                return more
            ahead.observe(self.mean)
        return SETTLED

    def _radius(self, alpha: float, least: float) -> float:
        if self.count < LEAST:
            return inf
        count, deviation = self.weight**2 / self.squared_weight, max(sqrt(self.spread / self.weight), least)
        rho = 0.35  # the square of the sequence's parameter
        wide = count * rho + 1
        return deviation * sqrt(2 * wide / (count**2 * rho) * log(sqrt(wide) / (2 * alpha)))


@dataclass(slots=True)
class RungRecord:
    """What was seen of one agent on one rung."""

    divergence: MeanEvidence = field(default_factory=MeanEvidence)
    """Nats a token"""
    computed: MeanEvidence = field(default_factory=MeanEvidence)
    """Share of the prompt that was computed"""


class RungFinding(NamedTuple):
    """One comparison of a prompt that was translated on a rung with dense prefill."""

    rung: int
    divergence: float
    computed: float


@dataclass(slots=True)
class Serving:
    """The rung that serves an agent, and its calls since none was left for being off."""

    rung: int | None = None
    calls: int = 0
    suspicion: float = 0.0
    """How far the last comparisons are nearer to the budget than to what was usual: a CUSUM of logarithms"""
    usual: float = 0.0
    since: MeanEvidence = field(default_factory=MeanEvidence)
    """Comparisons since `suspicion` was last 0, the likeliest start of a change. `usual` is the mean before it."""

    def has_risen(self, divergence: float, usual: float, budget: float, most: float = 7.0, limit: float = 4.0) -> bool:
        """Take a comparison. Returns whether the mean has risen: older comparisons say nothing of it any more."""
        if not self.suspicion:
            self.usual, self.since = max(usual, budget / 10), MeanEvidence()
        times = divergence / (sqrt(self.usual) * sqrt(budget))
        self.suspicion = max(0.0, self.suspicion + log(min(max(times, 1 / most), most)))
        self.since.observe(divergence)
        return self.suspicion > limit


@dataclass(slots=True)
class Proof:
    """What is proved of one agent's translation, under one wording of its template."""

    rungs: dict[int, RungRecord] = field(default_factory=dict)
    noise: MeanEvidence = field(default_factory=MeanEvidence)
    """Nats a token from one dense answer to the same one in a pass of another shape: rounding alone"""
    serving: BoundedDict[float, Serving] = field(default_factory=lambda: BoundedDict(MAX_BUDGETS))
    """By budget: calls may have budgets of their own"""
    seen: BoundedDict[tuple[int, int], None] = field(default_factory=lambda: BoundedDict(1024))
    """Rungs and hashes of the prompts that were compared on them"""
    tried: int = 0
    """Times that rungs were tried"""
    untranslated: Counter[int] = field(default_factory=Counter)
    """Times in a row that nothing was translated on a rung"""

    def observe(self, finding: RungFinding, prompt: int, noise: float | None = None) -> None:
        """Take a comparison of the prompt with this hash, less the `noise` of rounding, by default the usual one. A
        prompt that was compared before only shows what got worse.
        """
        self.untranslated.pop(finding.rung, None)
        record = self.rungs.setdefault(finding.rung, RungRecord())
        usual = record.divergence.mean
        excess = finding.divergence - (self.noise.mean if noise is None else noise)
        if (key := (finding.rung, prompt)) in self.seen and record.divergence.count and excess <= usual:
            return
        self.seen[key] = None
        record.divergence.observe(excess)
        record.computed.observe(finding.computed)
        for budget, one in [*self.serving.items()]:
            if one.rung == finding.rung and one.has_risen(excess, usual, budget):
                if RUNGS[finding.rung].by_anchors and one.since.mean > budget:  # the others use the same anchors
                    self.forget_anchors()
                self.rungs[finding.rung] = RungRecord(one.since, record.computed)
                one.suspicion = 0.0

    def choose(self, budget: float, alpha: float) -> int | None:
        """Return the rung to serve on: the cheapest that is proved; the one that serves until it is no longer within
        the budget in the mean. None: none is. All rungs together are wrong with probability `alpha`.
        """
        proved = [number for number in self.rungs if self._upper(number, alpha) <= budget]
        kept = self.serving.use(budget, Serving).rung
        if kept is not None and kept in self.rungs and self.rungs[kept].divergence.mean <= budget:
            proved.append(kept)

        def cost(number: int) -> tuple[float, int]:
            return self.rungs[number].computed.mean * (STAYS if number == kept else 1), number

        chosen = min(proved, key=cost, default=None)
        if chosen != kept:  # to a cheaper one it moves on its own comparisons: no call counts as a first one again
            self.serving[budget] = Serving(chosen, self.serving[budget].calls if kept in proved else 0)
        return chosen

    def _upper(self, rung: int, alpha: float) -> float:
        """Return the upper bound of a rung's mean. With probability 1 - `alpha` the bounds of all rungs hold."""
        return self.rungs[rung].divergence.upper(alpha / len(RUNGS))

    def to_try(self, budget: float, alpha: float, hopeless: float = 4.0) -> list[int]:
        """Return the rungs that may be cheaper than the serving one and are not known to be too far off; the one that
        lacks the fewest comparisons comes first. Rungs by anchors are tried again now and then, since anchors get
        better. So are rungs with a mean of `hopeless` budgets after two comparisons: each costs as many tokens as the
        answer has. Rungs that translated nothing are tried less and less.
        """
        served = self.choose(budget, alpha)
        least = RUNGS[served].weak_error if served is not None and RUNGS[served].by_anchors else 0.0
        dearest = inf if served is None else self.rungs[served].computed.mean
        self.tried += 1
        found = []
        for number, rung in enumerate(RUNGS):
            seen = self.rungs.get(number)
            is_turn = self.tried % RETRIED == 0
            if self.tried % RETRIED ** min(self.untranslated[number] // LEAST, 3):  # each computes a whole prompt
                continue
            is_far = seen is not None and seen.divergence.count > 1 and seen.divergence.mean > hopeless * budget
            is_near = seen is None or (seen.divergence.lower(alpha) <= budget and (is_turn or not is_far))
            is_open = is_near or (rung.by_anchors and is_turn)
            is_cheaper = rung.weak_error > least if seen is None else seen.computed.mean < dearest
            if number != served and is_open and is_cheaper:
                found.append(number)
        return sorted(found, key=lambda number: self._missing(number, budget, alpha))

    def _missing(self, number: int, budget: float, alpha: float) -> tuple[int, float]:
        """Return how many comparisons a rung lacks if they go on as they are, or are as is usual; and their mean."""
        seen = self.rungs.get(number)
        known = seen.divergence if seen else MeanEvidence(1.0, 1.0, RUNGS[number].usual, 0.0, 1)
        return known.missing(budget, alpha / len(RUNGS)) + (seen is None), known.mean

    @property
    def is_settled(self) -> bool:
        """Whether more comparisons of the rung that was compared most would hardly make its bound tighter."""
        return any(one.divergence.count >= SETTLED for one in self.rungs.values())

    def note(self, budget: float, alpha: float) -> FidelityNote:
        """Return the proof as it stands, for receipts."""
        curve = tuple(
            (RUNGS[number].name, max(0.0, one.divergence.mean), one.computed.mean)
            for number, one in sorted(self.rungs.items())
        )
        served = self.choose(budget, alpha)
        if served is None:
            checks = max((one.divergence.count for one in self.rungs.values()), default=0)
            return FidelityNote(budget, "", None, None, checks, curve)
        seen = self.rungs[served].divergence
        bound = self._upper(served, alpha) if seen.count >= LEAST else None
        return FidelityNote(budget, RUNGS[served].name, max(0.0, seen.mean), bound, seen.count, curve)

    def nearness(self, budget: float, alpha: float) -> float:
        """Return the upper bound over the budget, at most 1; 1 where nothing serves."""
        served = self.choose(budget, alpha)
        return 1.0 if served is None else min(1.0, self._upper(served, alpha) / budget)

    def forget_anchors(self) -> None:
        """Forget what was seen of anchors that are discarded."""
        self.rungs = {number: one for number, one in self.rungs.items() if not RUNGS[number].by_anchors}


class Proofs(BoundedDict[WorkflowAgent, BoundedDict[str, Proof]]):
    """The proofs of all agents, by the wording of their templates: a proof of one says nothing about another."""

    def wordings(self, agent: WorkflowAgent) -> BoundedDict[str, Proof]:
        """Return an agent's proofs, the agent as the newest: of as many wordings as are found in plain traffic."""
        return self.use(agent, lambda: BoundedDict(MAX_OF_ONE))

    def of(self, request: GenerateRequest) -> Proof:
        """Return the proof of a request's template as the newest, made where there is none."""
        return self.wordings(request.workflow_agent).use(request.template_digest, Proof)


class SavedProof(BaseModel):
    """An agent's proof as plain data, rungs by name: unknown ones are left out. Data of another shape raises
    `ValueError`.
    """

    agent: str
    wording: str = ""
    """Digest of the template that it is of; "": of none that is known, as earlier versions saved it"""
    rungs: dict[str, tuple[MeanEvidence, MeanEvidence]]
    noise: MeanEvidence | None = None
    serving: list[tuple[float, str, int]] = []
    """Budgets, the rung that serves under each, and its calls so far"""

    @classmethod
    def of(cls, agent: str, wording: str, proof: Proof) -> Self:
        """Return a proof as data."""
        rungs = {RUNGS[at].name: (seen.divergence, seen.computed) for at, seen in proof.rungs.items()}
        known = ((budget, one) for budget, one in proof.serving.items() if one.rung is not None)
        served = [(budget, RUNGS[one.rung or 0].name, one.calls) for budget, one in known]
        noise = proof.noise if proof.noise.count else None
        return cls(agent=agent, wording=wording, rungs=rungs, noise=noise, serving=served)

    def proof(self) -> Proof:
        """Return the proof as it goes on."""
        numbers = {rung.name: number for number, rung in enumerate(RUNGS)}
        known = {numbers[name]: RungRecord(*pair) for name, pair in self.rungs.items() if name in numbers}
        proof = Proof(known, self.noise or MeanEvidence())
        for budget, rung, calls in self.serving:
            if numbers.get(rung) in known:
                proof.serving[budget] = Serving(numbers[rung], calls)
        return proof
