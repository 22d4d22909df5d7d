"""The life of reuse around one request: plan, what base KV it needs, what it leaves behind, what is learned from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial

from kedge.reuse.contracts import (
    KV,
    Anchors,
    BaseNeed,
    Bases,
    Costs,
    Cut,
    ReadKV,
    Slot,
    TemplateOwner,
)
from kedge.reuse.expected import Expected
from kedge.reuse.layout import Placed, later_prefixes, layout, template_key, template_tokens
from kedge.reuse.plan import ReusePlan, Translation
from kedge.reuse.planner import NO_COSTS, Draft, Planner, pool_of
from kedge.reuse.readers import Readers
from kedge.settings import PlannerSettings
from kedge.types import GenerateRequest, ReuseMode, RunId, Span, TenantId, Tokens
from kedge.workflow.forecast import AgentKey

REFRESH = 8
"""Of the dense prompts of an agent that has seen enough values, one in so many is learned from"""


class Runtime:
    """One per engine, called by its owner thread only."""

    def __init__(
        self,
        anchors: Anchors,
        bases: Bases,
        policy: PlannerSettings,
        refusal: str | None,
        expected: Expected | None = None,
        costs: Costs = NO_COSTS,
    ) -> None:
        """`expected` passes the forecast on to the stores; `costs` decides which values are worth translating."""
        self._anchors, self._bases, self._refusal = anchors, bases, refusal
        self._expected = expected or Expected()
        self._planner = Planner(anchors, bases, policy, refusal, costs)
        self._short = policy.recompute_short
        self._readers = Readers()
        self._saturated = 0

    def plan(self, request: GenerateRequest, exact: tuple[Span, ...]) -> ReusePlan:
        """The plan for a request whose leading tokens are `exact` on the device; counts the anchors it uses."""
        self._anchors.begin()
        plan = self._planner.plan(request, exact)
        self.use(plan)
        return plan

    def use(self, plan: ReusePlan) -> None:
        """Counts the anchors that a plan leans on; to be called once for a plan that is carried out."""
        for estimate in plan.estimates:
            self._anchors.use(estimate)

    def draft(self, request: GenerateRequest, exact: tuple[Span, ...]) -> Draft:
        """A plan for a request of which not all may be known yet, to be grown and sealed."""
        return self._planner.draft(request, exact)

    def grow(self, draft: Draft, request: GenerateRequest, segments: int) -> tuple[Translation, ...]:
        """Drafts the first `segments` of the request; the translations that this adds, to be written at once."""
        self._anchors.begin()
        before = len(draft.translations)
        self._planner.grow(draft, request, segments)
        return tuple(draft.translations[before:])

    def seal(self, draft: Draft, request: GenerateRequest) -> ReusePlan:
        """The plan of a request that has been drafted to its end."""
        return self._planner.seal(draft, request)

    def needs(self, request: GenerateRequest) -> list[BaseNeed]:
        """Base prefills that this request's agents would profit from and that nobody has done yet."""
        if not self.learns(request):
            return []
        self._expected.asks(TemplateOwner(request.tenant, template_key(request)), request.agent)
        placed = layout(request)
        values = self._worth_translating(request, placed)
        if not values:
            return []
        for one in values:
            self._readers.read(pool_of(request, one), one.segment.tokens)
        missing = [self._placeholder_need(request, one) for one in values if self._lacks_base(request, one)]
        return [*self._template_need(request, placed), *missing]

    def prerequisites(self, request: GenerateRequest, exact_tokens: int) -> list[BaseNeed]:
        """Return base prefills that pay before a request is planned: of values behind its first `exact_tokens` that
        others are going to read too, and that its own agent can translate once they are there.

        The first reader of a value would compute it in its own context, and then its base KV had to be computed for
        the others; so all of them translate it. Only once its agent has seen enough values: what the first reader gets
        wrong, all others read.
        """
        if not self.learns(request) or request.prompt_logprobs is not None:
            return []
        key, placed = template_key(request), layout(request)
        if later_prefixes(placed) and self._bases.prefixes(request.tenant, key) is None:
            return []
        values = [one for one in placed if one.segment.is_placeholder and one.stop > exact_tokens]
        return [self._placeholder_need(request, one) for one in values if self._comes_first(request, key, one)]

    def _comes_first(self, request: GenerateRequest, key: str, placed: Placed) -> bool:
        saturated = self._is_saturated(request, key, placed)
        return saturated and self._planner.pays(request, placed) and self._lacks_base(request, placed)

    def learns(self, request: GenerateRequest) -> bool:
        """Whether something of this request may be translated, or kept for others."""
        return request.reuse is ReuseMode.TRANSLATE and self._refusal is None

    def _lacks_base(self, request: GenerateRequest, placed: Placed) -> bool:
        """Return whether a value has no base KV yet, and computing it is worth that to its readers."""
        if self._planner.sample(request, placed) is not None:
            return False
        readers = self._readers.expected(pool_of(request, placed))
        return self._planner.base_pays(request, placed, readers)

    def _placeholder_need(self, request: GenerateRequest, placed: Placed) -> BaseNeed:
        segment = placed.segment
        lead = len(segment.lead_in)
        keep = partial(self._keep_value, request, placed)
        cut = Cut(lead, lead + len(placed), keep)
        return BaseNeed(request.tenant, segment.lead_in + segment.tokens, (cut,))

    def _keep_value(self, request: GenerateRequest, placed: Placed, kv: KV) -> None:
        """Keeps base KV that was made off the critical path; what the next reader would look up is looked up now."""
        self._bases.put_content(request.tenant, placed.segment.tokens, placed.segment.lead_in, kv)
        if sample := self._planner.sample(request, placed):
            self._anchors.prepare(sample)

    def _template_need(self, request: GenerateRequest, placed: tuple[Placed, ...]) -> list[BaseNeed]:
        key, later = template_key(request), later_prefixes(placed)
        if not later or self._bases.prefixes(request.tenant, key) is not None:
            return []
        cuts, start = [], 0
        for p in placed:
            size = len(p.segment.stand_in) if p.segment.is_placeholder else len(p)
            if p in later:
                keep = partial(self._bases.put_prefix, request.tenant, key, p.index)
                cuts.append(Cut(start, start + size, keep))
            start += size
        return [BaseNeed(request.tenant, template_tokens(request), tuple(cuts))]

    def keep_response(self, request: GenerateRequest, tokens: Tokens, kv: KV, *, exact: bool) -> None:
        """A response's own KV, with that of what comes behind it everywhere, becomes the base KV of the placeholder
        that it fills.
        """
        if self.learns(request) and request.produces is not None:
            self._bases.put_sample(request.tenant, request.run, request.produces, tokens, kv, exact_lineage=exact)

    def wants_harvest(self, request: GenerateRequest, plan: ReusePlan) -> bool:
        """Return whether to learn from a request: its whole prompt was computed, and its offsets are worth measuring.

        Those of an agent that has seen enough values are, once in `REFRESH` times, so that they follow what changes.
        """
        if plan.translates or not self.learns(request):
            return False
        key = template_key(request)
        values = self._worth_translating(request, layout(request))
        if not all(self._is_saturated(request, key, one) for one in values):
            return True
        self._saturated += bool(values)
        return bool(values) and (plan.teaches or self._saturated % REFRESH == 0)

    def _worth_translating(self, request: GenerateRequest, placed: tuple[Placed, ...]) -> list[Placed]:
        return [one for one in placed if one.segment.is_placeholder and self._planner.pays(request, one)]

    def _is_saturated(self, request: GenerateRequest, key: str, placed: Placed) -> bool:
        return self._anchors.is_saturated(Slot(key, placed.index), pool_of(request, placed))

    def observe(self, request: GenerateRequest, read: ReadKV) -> Iterator[Placed]:
        """Measures the offsets of a densely prefilled prompt and feeds the anchor pools.

        One placeholder a step, so that decodes beside it are not held up for long; yields what was measured.
        """
        key, placed = template_key(request), layout(request)
        prefixes = self._bases.prefixes(request.tenant, key)
        if prefixes is None and later_prefixes(placed):
            return
        for here, after in zip(placed, [*placed[1:], None], strict=True):
            if not here.segment.is_placeholder or len(here) <= self._short:
                continue
            sample = self._planner.sample(request, here)
            if sample is not None:
                base_prefix = prefixes.get(after.index) if prefixes and after else None
                real_prefix = read(after.start, after.stop) if base_prefix is not None and after else None
                real = read(here.start, here.stop)
                self._anchors.observe(Slot(key, here.index), sample, real, base_prefix, real_prefix)
                yield here

    def end_run(self, tenant: TenantId, run: RunId) -> None:
        """Forgets what a run shared between its agents."""
        self._bases.end_run(tenant, run)

    @property
    def learned(self) -> tuple[Anchors, Bases]:
        """The anchors and the base KV: what may outlive a process."""
        return self._anchors, self._bases

    def on_forecast(self, changes: Mapping[AgentKey, tuple[float, float] | None]) -> None:
        """Takes what has changed in the forecast: by it anchors and base KV move between device and host."""
        self._expected.on_forecast(changes)
        for store in (self._anchors, self._bases):
            store.notice()

    @property
    def due(self) -> bool:
        """Whether `fetch` may have something to do."""
        return self._anchors.due or self._bases.due

    def fetch(self) -> bool:
        """Brings one piece of what is needed soon from the host; False where there is none."""
        return (self._bases.due and self._bases.fetch()) or (self._anchors.due and self._anchors.fetch())

    def stats(self) -> dict[str, object]:
        """Figures of the anchors and of the base KV."""
        return {"anchors": asdict(self._anchors.stats()), "base_kv": asdict(self._bases.stats())}

    def pool_stats(self, owns: Callable[[TenantId], bool]) -> list[dict[str, object]]:
        """The anchor pools of the tenants that `owns` picks; their tenants stay out."""
        return [asdict(pool) for pool in self._anchors.pool_stats(owns)]

    def clear(self) -> None:
        """Forgets all anchors and all base KV."""
        self._anchors.clear()
        self._bases.clear()
