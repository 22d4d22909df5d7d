"""Reuse around one request: its plan, the base KV that it needs, what it leaves behind, what is learned from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from kedge.reuse.base_needs import BaseNeeds
from kedge.reuse.contracts import (
    KV,
    Anchors,
    BaseNeed,
    Bases,
    Costs,
    PlaceholderSite,
    Places,
    ReadKV,
)
from kedge.reuse.layout import Placed, later_prefixes, layout, template_key
from kedge.reuse.plan import ReusePlan, Translation
from kedge.reuse.planner import NO_COSTS, Draft, Planner
from kedge.reuse.upcoming import UpcomingSteps
from kedge.settings import PlannerSettings
from kedge.types import GenerateRequest, Namespace, ReuseMode, RunKey, Span, Tokens
from kedge.workflow.forecast import AgentKey

REFRESH = 8
"""Of the dense prompts of an agent that has seen enough values, one in so many is learned from"""


class Runtime:
    """The reuse of one engine, called by its owner thread only."""

    def __init__(
        self,
        anchors: Anchors,
        bases: Bases,
        policy: PlannerSettings,
        refusal: str | None,
        expected: UpcomingSteps | None = None,
        costs: Costs = NO_COSTS,
    ) -> None:
        """Begin with what the stores hold; `expected` passes the forecast on to them, `costs` says what is worth it."""
        self._anchors, self._bases, self._refusal = anchors, bases, refusal
        self._expected = expected or UpcomingSteps()
        self._planner = Planner(anchors, bases, policy, refusal, costs)
        self.surprise = policy.surprise
        self._needs = BaseNeeds(anchors, bases, self._planner, self._expected)
        self._saturated = 0

    def plan(self, request: GenerateRequest, exact: tuple[Span, ...]) -> ReusePlan:
        """Plan a request whose leading tokens are `exact` on the device, and count the anchors that the plan uses."""
        self._anchors.begin()
        plan = self._planner.plan(request, exact)
        self.use(plan)
        return plan

    def use(self, plan: ReusePlan) -> None:
        """Count the anchors that a plan uses. Call this once for a plan that is carried out."""
        for estimate in plan.estimates:
            self._anchors.use(estimate)

    def has_bases(self, request: GenerateRequest, segments: range) -> bool:
        """Return whether base KV is there for all values among these segments that are worth translating."""
        values = [one for one in layout(request) if one.index in segments and one.segment.is_placeholder]
        wanted = [one for one in values if self._planner.pays(request, one)]
        return all(self._planner.sample(request, one) is not None for one in wanted)

    def draft(self, request: GenerateRequest, exact: tuple[Span, ...]) -> Draft:
        """Begin the plan of a request of which not all may be known yet, to be grown and sealed."""
        return self._planner.draft(request, exact)

    def grow(
        self, draft: Draft, request: GenerateRequest, segments: int, *, again: bool = False
    ) -> tuple[Translation, ...]:
        """Draft the first `segments` of the request, see `Planner.grow`. Returns the translations that this adds, to be
        written at once.
        """
        self._anchors.begin()
        before = len(draft.translations)
        self._planner.grow(draft, request, segments, again=again)
        return tuple(draft.translations[before:])

    def seal(self, draft: Draft, request: GenerateRequest) -> ReusePlan:
        """Return the plan of a request that has been drafted to its end."""
        return self._planner.seal(draft, request)

    def needs(self, request: GenerateRequest) -> list[BaseNeed]:
        """Return base prefills that later requests would profit from, and that have not been done yet."""
        return self._needs.needs(request) if self.learns(request) else []

    def prerequisites(
        self, request: GenerateRequest, exact_tokens: int, *, of_later_readers: bool = False
    ) -> list[BaseNeed]:
        """Return base prefills that pay before this request is planned, see `BaseNeeds.prerequisites`."""
        if not self.learns(request) or request.prompt_logprobs is not None:
            return []
        return self._needs.prerequisites(request, exact_tokens, of_later_readers=of_later_readers)

    def learns(self, request: GenerateRequest) -> bool:
        """Return whether something of this request may be translated, or kept for others."""
        return request.reuse is ReuseMode.TRANSLATE and self._refusal is None

    def keep_response(
        self, request: GenerateRequest, tokens: Tokens, kv: KV, *, exact: bool, surprising: Places = ()
    ) -> None:
        """Keep an answer's own KV, with that of what follows it everywhere, as the base KV of the placeholder that it
        fills. Its readers compute its `surprising` tokens.
        """
        if self.learns(request) and request.produces is not None:
            run, sample = request.run_key, request.produces
            self._bases.put_sample(run, sample, tokens, kv, exact_lineage=exact, surprising=surprising)

    def leaves_base(self, request: GenerateRequest, plan: ReusePlan | None = None) -> bool:
        """Return whether `keep_base` has something to keep from this request's prompt, once it is computed."""
        if not self.learns(request):
            return False
        return bool(self._needs.in_place(request) or self._needs.shared_texts(request, plan))

    def keep_base(self, request: GenerateRequest, read: ReadKV, plan: ReusePlan | None = None) -> None:
        """Keep from a computed prompt what other prompts of its run read: the base KV of values that it reads in their
        base context, and of template text behind values. With a `plan`, of values only what is before all translated
        tokens, of text only what was not translated.
        """
        if self.learns(request):
            exact = request.prompt_tokens if plan is None else plan.exact_tokens
            self._needs.keep_in_place(request, exact, read)
            self._needs.keep_shared_texts(request, plan, read)

    def wants_harvest(self, request: GenerateRequest, plan: ReusePlan) -> bool:
        """Return whether to learn from a request: its whole prompt was computed, or a value in it because that teaches
        something, and its offsets are worth measuring.

        Dense prompts of an agent that has seen enough values are, once in `REFRESH` times, so that they follow what
        changes.
        """
        if plan.translates or not self.learns(request):
            return plan.teaches and self.learns(request)
        key = template_key(request)
        values = self._needs.worth_learning(request)
        if not all(self._needs.is_saturated(request, key, one) for one in values):
            return True
        self._saturated += bool(values)
        return bool(values) and (plan.teaches or self._saturated % REFRESH == 0)

    def lessons_missing(self, request: GenerateRequest, exact_tokens: int) -> int:
        """Return how many prompts of the request's agent have to be learned from until all values behind its first
        `exact_tokens` can be translated.
        """
        return self._needs.lessons_missing(request, exact_tokens) if self.learns(request) else 0

    def observe(self, request: GenerateRequest, read: ReadKV, plan: ReusePlan | None = None) -> Iterator[Placed]:
        """Measure the offsets of the values that were computed in a prompt, and feed the anchor pools. With a `plan`,
        values that it translates are left out; one that it moved by rotation alone counts as having none, for the sake
        of the prefix segment after it.

        One placeholder a step, so that decodes beside it are not held up for long; yields what was measured.
        """
        key, placed = template_key(request), layout(request)
        prefixes = self._bases.prefixes(request.namespace, key)
        if prefixes is None and later_prefixes(placed):
            return
        for here, after in self._needs.learnable(request, plan):
            base_prefix = prefixes.get(after.index) if prefixes and after else None
            is_moved = plan is not None and here.index in plan.moved
            if is_moved and base_prefix is None:
                continue
            if (sample := self._planner.sample(request, here)) is not None:
                real = sample.base if is_moved else read(here.start, here.stop)
                real_prefix = read(after.start, after.stop) if base_prefix is not None and after else None
                self._anchors.observe(PlaceholderSite(key, here.index), sample, real, base_prefix, real_prefix)
                yield here

    def may_observe(self, request: GenerateRequest, plan: ReusePlan | None = None) -> bool:
        """Return whether `observe` may find something in a prompt, once its base KV is there."""
        return self.learns(request) and next(self._needs.learnable(request, plan), None) is not None

    def end_run(self, run: RunKey) -> None:
        """Forget what a run shared between its agents."""
        self._bases.end_run(run)

    @property
    def learned(self) -> tuple[Anchors, Bases]:
        """The anchors and the base KV: what may outlive a process."""
        return self._anchors, self._bases

    def on_forecast(self, changes: Mapping[AgentKey, tuple[float, float] | None]) -> None:
        """Take the changes of the forecast, by which anchors and base KV move between device and host."""
        self._expected.on_forecast(changes)
        for store in (self._anchors, self._bases):
            store.notice()

    @property
    def due(self) -> bool:
        """Whether `fetch` may have something to do."""
        return self._anchors.due or self._bases.due

    def fetch(self) -> bool:
        """Bring one piece of what is needed soon from the host. Returns False where there is none."""
        return (self._bases.due and self._bases.fetch()) or (self._anchors.due and self._anchors.fetch())

    def stats(self) -> dict[str, object]:
        """Return figures of the anchors and of the base KV."""
        return {"anchors": asdict(self._anchors.stats()), "base_kv": asdict(self._bases.stats())}

    def pool_stats(self, owns: Callable[[Namespace], bool]) -> list[dict[str, object]]:
        """Return figures of the anchor pools of the tenants that `owns` picks, without their tenants."""
        return [asdict(pool) for pool in self._anchors.pool_stats(owns)]

    def clear(self) -> None:
        """Forget all anchors and all base KV."""
        self._anchors.clear()
        self._bases.clear()
