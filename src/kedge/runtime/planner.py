"""Decides, for one request, which segments are translated and which tokens are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.runtime.interfaces import KV, Anchors, Bases, Estimate, PoolKey, ReusePolicy, SampleView, Slot
from kedge.runtime.layout import Placed, later_prefixes, layout, template_key
from kedge.runtime.plan import ALL_COMPUTED, ReusePlan, Translation, spans_of
from kedge.types import GenerateRequest, Miss, ReuseMode, Source, Span


@dataclass(slots=True)
class _Draft:
    """A plan in the making: one source per prompt position, and what is to be written."""

    sources: list[Source]
    exact: int
    """Leading tokens that are exact"""
    translations: list[Translation] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)

    def sealed(self) -> ReusePlan:
        return ReusePlan(spans_of(self.sources), tuple(self.translations), tuple(self.misses), tuple(self.estimates))


class Planner:
    """Asks, segment by segment: exact? else translatable? else computed. Pure: it changes no store."""

    def __init__(self, anchors: Anchors, bases: Bases, policy: ReusePolicy, refusal: str | None) -> None:
        self._anchors, self._bases, self._policy, self._refusal = anchors, bases, policy, refusal

    def plan(self, request: GenerateRequest, exact: tuple[Span, ...]) -> ReusePlan:
        """`exact` spans tile the leading tokens that lie on the device already (fewer than the whole prompt)."""
        if request.prompt_logprobs is not None and request.reuse is not ReuseMode.OFF:
            return self._dense(request, exact, ALL_COMPUTED)
        if request.reuse is not ReuseMode.TRANSLATE or not any(s.is_placeholder for s in request.segments):
            return self._dense(request, exact)
        if self._refusal:
            return self._dense(request, exact, Miss("*", self._refusal))
        draft = _Draft(_sources(request, exact), sum(map(len, exact)))
        unknown = self._fill(request, draft)
        share = draft.sources.count(Source.TRANSLATED) / (request.prompt_tokens - draft.exact)
        if unknown:
            return self._dense(request, exact, *draft.misses)
        if share < self._policy.min_translated:
            few = Miss("*", f"only {share:.0%} of the prompt could be translated")
            return self._dense(request, exact, *draft.misses, few)
        return draft.sealed()

    @staticmethod
    def _dense(request: GenerateRequest, exact: tuple[Span, ...], *misses: Miss) -> ReusePlan:
        return ReusePlan(spans_of(_sources(request, exact)), misses=misses)

    def _fill(self, request: GenerateRequest, draft: _Draft) -> bool:
        """Drafts all segments; True where the prompt should rather be prefilled densely, to learn from it."""
        placed = layout(request)
        key = template_key(request)
        prefixes = self._bases.prefixes(request.tenant, key)
        unknown = False
        for here, after in zip(placed, [*placed[1:], None], strict=True):
            if not here.segment.is_placeholder or here.stop <= draft.exact:
                continue
            if prefixes is None and later_prefixes(placed):
                draft.misses.append(Miss(here.segment.name, "the agent's template has no base KV yet"))
                return True
            unknown |= self._fill_pair(request, draft, key, here, after, prefixes or {})
        self._compute_end(draft, placed[-1])
        return unknown

    def _fill_pair(
        self,
        request: GenerateRequest,
        draft: _Draft,
        key: str,
        here: Placed,
        after: Placed | None,
        prefixes: Mapping[int, KV],
    ) -> bool:
        """Drafts a placeholder and the prefix segment after it; True where dense prefill would teach something."""
        if len(here) <= self._policy.recompute_head:
            return False  # computing it costs no more than repairing its head
        sample = self.sample(request, here)
        if sample is None:
            draft.misses.append(Miss(here.segment.name, "no base KV of this value yet"))
            return False
        estimate = self._anchors.estimate(Slot(key, here.index), sample)
        if not estimate.shareable:
            draft.misses.append(Miss(here.segment.name, estimate.reason))
            return estimate.learnable
        draft.estimates.append(estimate)
        self._translate(draft, here, sample.base, estimate.phi, estimate.phi_table)
        weak = [here.start + i for i in estimate.weak_positions()]
        if after is not None and not after.segment.is_placeholder and len(after):
            self._translate(draft, after, prefixes[after.index], estimate.prefix, estimate.prefix_table)
        for position in weak:
            self._compute(draft, position)
        return False

    def _translate(self, draft: _Draft, placed: Placed, base: KV, blend: Any, table: Any) -> None:
        """Writes what of a segment is not exact, then computes its first tokens again."""
        skip = max(0, draft.exact - placed.start)
        if skip >= len(placed):
            return
        start = placed.start + skip
        draft.translations.append(Translation(start, base.slice(skip), blend.slice(skip), table))
        draft.sources[start : placed.stop] = [Source.TRANSLATED] * (placed.stop - start)
        for position in range(start, min(placed.start + self._policy.recompute_head, placed.stop)):
            self._compute(draft, position)

    @staticmethod
    def _compute(draft: _Draft, position: int) -> None:
        if position >= draft.exact:
            draft.sources[position] = Source.COMPUTED

    def _compute_end(self, draft: _Draft, last: Placed) -> None:
        start = last.start if self._policy.recompute_tail else last.stop - 1
        for position in range(start, last.stop):
            self._compute(draft, position)

    def sample(self, request: GenerateRequest, placed: Placed) -> SampleView | None:
        """The base KV of a placeholder's value, where it is known."""
        segment = placed.segment
        assert segment.sample is not None
        entry = self._bases.find(request.tenant, request.run, segment.sample, segment.tokens, segment.lead_in)
        if entry is None:
            return None
        return SampleView(PoolKey(request.tenant, request.workflow, segment.name), segment.tokens, entry.kv, entry.key)


def _sources(request: GenerateRequest, exact: tuple[Span, ...]) -> list[Source]:
    """One source per prompt position: what is not exact is computed, as long as nothing better is found."""
    sources = [span.source for span in exact for _ in range(len(span))]
    return sources + [Source.COMPUTED] * (request.prompt_tokens - len(sources))
