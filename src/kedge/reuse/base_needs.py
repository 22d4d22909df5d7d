"""Which base prefills are worth doing: of templates, and of values that several agents read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from kedge.reuse.contracts import KV, Anchors, BaseNeed, Bases, Cut, PlaceholderSite, ReadKV, TemplateOwner
from kedge.reuse.layout import (
    Placed,
    later_prefixes,
    layout,
    reads_in_place,
    shared_text,
    template_key,
    template_tokens,
)
from kedge.reuse.plan import ReusePlan
from kedge.reuse.planner import Planner, pool_of
from kedge.reuse.readers import Readers
from kedge.reuse.upcoming import UpcomingSteps
from kedge.types import GenerateRequest


class BaseNeeds:
    """Decides which base KV is computed. It keeps count of how many agents read a placeholder's values."""

    def __init__(self, anchors: Anchors, bases: Bases, planner: Planner, expected: UpcomingSteps) -> None:
        self._anchors, self._bases, self._planner, self._expected = anchors, bases, planner, expected
        self._readers = Readers()

    def needs(self, request: GenerateRequest) -> list[BaseNeed]:
        """Return base prefills that later requests would profit from, and that have not been done yet."""
        key, placed = template_key(request), layout(request)
        self._expected.asks(TemplateOwner(request.namespace, key), request.agent)
        values = self.worth_translating(request, placed)
        if not values:
            return []
        for one in values:
            self._readers.read(pool_of(request, one), one.segment.tokens)
        others = [one for one in values if not reads_in_place(request, one)]
        missing = [self._placeholder_need(request, one) for one in others if self._lacks_base(request, one)]
        return [*self._template_need(request, key, placed), *missing]

    def in_place(self, request: GenerateRequest) -> list[Placed]:
        """Return the values whose base KV this prompt's own KV is, where that is not kept yet and others read it."""
        return [
            one
            for one in self.worth_translating(request, layout(request))
            if reads_in_place(request, one)
            and self._readers.expected(pool_of(request, one)) > 1
            and self._planner.sample(request, one) is None
        ]

    def keep_in_place(self, request: GenerateRequest, exact_tokens: int, read: ReadKV) -> None:
        """Keep the base KV that a prompt's own KV is, as far as its first `exact_tokens` are as dense prefill gives
        them.
        """
        for one in self.in_place(request):
            if one.stop <= exact_tokens:
                self._keep_value(request, one, read(one.start, one.stop))

    def shared_texts(self, request: GenerateRequest, plan: ReusePlan | None) -> list[Placed]:
        """Return the prefix segments behind moved values whose KV this prompt is the first of its run to compute, where
        others are expected to read them.
        """
        placed = layout(request)
        pairs = pairwise(placed[:-1]) if request.run else ()
        computed = (after for here, after in pairs if self._is_shared(request, here, after, plan))
        return [one for one in computed if self._planner.shared_text(request, placed, one) is None]

    def _is_shared(self, request: GenerateRequest, here: Placed, after: Placed, plan: ReusePlan | None) -> bool:
        """Return whether `after` is text behind a value that is moved with it, and is not moved in this prompt."""
        is_text = here.segment.is_placeholder and not after.segment.is_placeholder and len(after) > self._planner.short
        if not is_text or (plan and plan.writes_in(after.start, after.stop)):
            return False
        is_moved = self._planner.moves_alone(here, after) and self._planner.pays(request, here)
        return is_moved and self._readers.expected(pool_of(request, here)) > 1

    def keep_shared_texts(self, request: GenerateRequest, plan: ReusePlan | None, read: ReadKV) -> None:
        """Keep the KV of those prefix segments for the other prompts."""
        placed = layout(request)
        for one in self.shared_texts(request, plan):
            self._bases.put_shared_text(request.run_key, shared_text(placed, one), read(one.start, one.stop))

    def prerequisites(
        self, request: GenerateRequest, exact_tokens: int, *, of_later_readers: bool = False
    ) -> list[BaseNeed]:
        """Return base prefills that pay before a request is planned: of values behind its first `exact_tokens` that
        others are going to read too, and that its own agent can translate once they are there.

        The first reader of a value would compute it in its own context, and then its base KV had to be computed for
        the others; so all of them translate it. Only once it is known how good its agent's estimates are: what the
        first reader gets wrong, all others read. With `of_later_readers`, also of values that were read before, once
        its agent has seen as many as a translation needs: base KV that was to be computed beside others is not there in
        time.
        """
        key, placed = template_key(request), layout(request)
        values = [one for one in placed if one.segment.is_placeholder and one.stop > exact_tokens]
        if later_prefixes(placed) and self._bases.prefixes(request.namespace, key) is None:
            values = [one for one in values if self._moves(one)]
        ready = [one for one in values if self._is_ready(request, key, one, of_later_readers)]
        paying = [one for one in ready if self._planner.pays(request, one) and self._lacks_base(request, one)]
        return [self._placeholder_need(request, one) for one in paying]

    def _is_ready(self, request: GenerateRequest, key: str, placed: Placed, of_later_readers: bool) -> bool:
        """Return whether its agent would translate a value, once base KV of it is there."""
        if self._moves(placed):
            return not reads_in_place(request, placed)
        site, pool = PlaceholderSite(key, placed.index), pool_of(request, placed)
        experience = self._anchors.experience(site, pool)
        if experience.is_calibrated:
            return True
        was_read = of_later_readers and self._readers.reads(pool, placed.segment.tokens) > 1
        return was_read and not experience.missing

    def _moves(self, placed: Placed) -> bool:
        """Return whether a value is moved without anchors and a translated template, once base KV of it is there."""
        return placed.segment.in_context and self._planner.rotates

    def lessons_missing(self, request: GenerateRequest, exact_tokens: int) -> int:
        """Return how many prompts of its agent have to be learned from until all values behind its first `exact_tokens`
        have enough anchors.
        """
        key, values = template_key(request), self.worth_learning(request)
        wanted = (one for one in values if one.stop > exact_tokens)
        sites = ((PlaceholderSite(key, one.index), pool_of(request, one)) for one in wanted)
        return max((self._anchors.experience(*site).missing for site in sites), default=0)

    def worth_translating(self, request: GenerateRequest, placed: tuple[Placed, ...]) -> list[Placed]:
        """Return the values of a prompt that cost less to translate than to compute."""
        return [one for one in placed if one.segment.is_placeholder and self._planner.pays(request, one)]

    def worth_learning(self, request: GenerateRequest) -> list[Placed]:
        """Return those of them that anchors are to translate, or the prefix segment behind them."""
        placed = layout(request)
        after = (*placed[1:], None)
        values = self.worth_translating(request, placed)
        return [one for one in values if self._planner.needs_anchors(request, one, after[one.index])]

    def learnable(self, request: GenerateRequest, plan: ReusePlan | None) -> Iterator[tuple[Placed, Placed | None]]:
        """Yield the values that anchors serve and that a plan does not translate by them, with what follows each."""
        placed = layout(request)
        for here, after in zip(placed, [*placed[1:], None], strict=True):
            if not here.segment.is_placeholder or len(here) <= self._planner.short:
                continue
            is_written = plan is not None and plan.writes_in(here.start, here.stop) and here.index not in plan.moved
            if not is_written and self._planner.needs_anchors(request, here, after):
                yield here, after

    def is_saturated(self, request: GenerateRequest, key: str, placed: Placed) -> bool:
        """Return whether the agent with template `key` has observed enough values at this place."""
        return self._anchors.experience(PlaceholderSite(key, placed.index), pool_of(request, placed)).is_saturated

    def _lacks_base(self, request: GenerateRequest, placed: Placed) -> bool:
        """Return whether a value has no base KV yet, and computing it is worth that to its readers."""
        if self._planner.sample(request, placed) is not None:
            return False
        readers = self._readers.expected(pool_of(request, placed))
        return self._planner.base_pays(request, placed, readers)

    def _placeholder_need(self, request: GenerateRequest, placed: Placed) -> BaseNeed:
        segment = placed.segment
        lead = len(segment.base_context)
        keep = partial(self._keep_value, request, placed)
        cut = Cut(lead, lead + len(placed), keep)
        return BaseNeed(request.namespace, segment.base_context + segment.tokens, (cut,))

    def _keep_value(self, request: GenerateRequest, placed: Placed, kv: KV) -> None:
        """Keep base KV that was made off the critical path, and look up now what its next reader would look up."""
        self._bases.put_content(request.namespace, placed.segment.tokens, placed.segment.base_context, kv)
        if sample := self._planner.sample(request, placed):
            self._anchors.prepare(sample)

    def _template_need(self, request: GenerateRequest, key: str, placed: tuple[Placed, ...]) -> list[BaseNeed]:
        later = later_prefixes(placed)
        if not later or not self.worth_learning(request) or self._bases.prefixes(request.namespace, key) is not None:
            return []
        cuts, start = [], 0
        for p in placed:
            size = len(p.segment.placeholder_text) if p.segment.is_placeholder else len(p)
            if p in later:
                keep = partial(self._bases.put_prefix, request.namespace, key, p.index)
                cuts.append(Cut(start, start + size, keep))
            start += size
        return [BaseNeed(request.namespace, template_tokens(request), tuple(cuts))]
