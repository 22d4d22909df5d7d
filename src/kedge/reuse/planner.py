"""Decides, for one request, which segments are translated and which tokens are computed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kedge.anchors.anchor import PlaceholderSite, PoolKey, SampleView
from kedge.anchors.base_store import BaseStore, KnownBase
from kedge.anchors.sites import OffsetEstimate
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translation
from kedge.guard import EVERYTHING
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.reuse.guard.fidelity import RUNGS, Rung
from kedge.reuse.layout import Placed, can_move, later_prefixes, layout, reads_in_place, shared_text, template_key
from kedge.reuse.plan import CHEAPER, ReusePlan, Sentinel, spans_of
from kedge.settings import PlannerConstants, PlannerSettings
from kedge.types import GenerateRequest, Miss, Source, Span

SHORT_TEMPLATE = 64
"""Tokens behind a moved value that are computed: to look them up among anchors would take as long"""
WITHHELD = "the guard withholds it: with it translated, answers changed"
UNREAD = "no base KV of this value yet"
UNPROVED = "how near its answers would be to dense prefill is being measured before it is translated"
UNLEARNED = "nothing is known yet of the template behind this value"


@dataclass(slots=True)
class Draft:
    """A plan in the making, segment by segment: one source per prompt position so far, and what is to be written."""

    request: GenerateRequest
    """The request as last looked at: values that were pending come later"""
    placed: tuple[Placed, ...]
    """Its segments with their positions"""
    exact: tuple[Span, ...]
    sources: list[Source]
    drafted: int = 0
    """Segments that have been looked at"""
    teaches: bool = False
    """It is dense because that teaches something about one of its values"""
    dense: bool = False
    """Nothing of this prompt is translated, for its segments or those before them forbid it"""
    translations: list[Translation] = field(default_factory=list)
    estimates: list[OffsetEstimate] = field(default_factory=list)
    sentinels: list[Sentinel] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    """Numbers of the values that are translated without offsets, with the prefix segment after it computed"""
    texts: list[tuple[Placed, Placed]] = field(default_factory=list)
    """Moved values with the prefix segments behind them that no other prompt of the run had left when drafted"""

    @property
    def exact_tokens(self) -> int:
        return sum(map(len, self.exact))

    @property
    def is_outdated(self) -> bool:
        """Whether learning has moved offsets that were to be added since: nothing of it can be written any more."""
        return any(one.blend.version != one.table.version for one in self.translations)

    def computed(self, start: int) -> list[int]:
        """Return the positions from `start` on that run through the model, ascending."""
        return [at for at in range(start, len(self.sources)) if self.sources[at] is Source.COMPUTED]

    def extend(self, stop: int) -> None:
        """Mark the positions up to `stop` as computed, as long as nothing better is found."""
        self.sources += [Source.COMPUTED] * (stop - len(self.sources))

    def give_up(self, *misses: Miss) -> None:
        """Compute everything that is not exact after all."""
        exact, size = self.exact_tokens, len(self.sources)
        self.sources[exact:] = [Source.COMPUTED] * (size - exact)
        self.dense = True
        for found in (self.translations, self.estimates, self.sentinels, self.moved, self.texts):
            found.clear()
        self.misses += misses


class Planner:
    """Asks, segment by segment: exact? else translatable? else computed. It changes no store.

    A prompt of which only the beginning is known is drafted as far as that goes, and on when more is known: what has
    been decided stands. `plan` does all of it at once.
    """

    def __init__(
        self,
        anchors: AnchorStore,
        bases: BaseStore,
        policy: PlannerSettings,
        refusal: str | None,
        costs: EngineCosts,
        weights: tuple[float, float] = (0.7, 1.4),
    ) -> None:
        """Create a planner. `weights` are those of errors in inputs, and in what readers before have left."""
        self._anchors, self._bases, self._refusal = anchors, bases, refusal
        self._policy = PlannerConstants(**dict(policy))
        self._costs = costs
        self._of_inputs, self._of_readers = weights

    def plan(self, request: GenerateRequest, exact: tuple[Span, ...]) -> ReusePlan:
        """Plan a request. `exact` spans tile the leading tokens that are on the device (fewer than the whole
        prompt).
        """
        draft = self.draft(request, exact)
        self.grow(draft, request, len(request.segments))
        return self.seal(draft)

    def draft(self, request: GenerateRequest, exact: tuple[Span, ...]) -> Draft:
        """Return a draft in which nothing but the `exact` tokens has been decided."""
        sources = [span.source for span in exact for _ in range(len(span))]
        draft = Draft(request, layout(request), exact, sources)
        if request.prompt_logprobs is not None or not request.wants_translation:
            draft.give_up()
        elif self._refusal:
            draft.give_up(Miss("*", self._refusal))
        return draft

    def grow(
        self, draft: Draft, request: GenerateRequest, segments: int, *, again: bool = False
    ) -> Sequence[Translation]:
        """Draft on, up to the first `segments` of the request, and return the translations that this adds. Segments
        behind may lack their tokens, but for the prefix segments. With `again`, which is for drafts of which nothing
        has been computed yet, template text that other prompts have left since is moved, too.
        """
        before = len(draft.translations)
        if request is not draft.request:
            draft.request, draft.placed = request, layout(request)
        if again:
            texts, draft.texts = draft.texts, []
            for value, text in texts:
                self._move_after(draft, value, text)
        known = draft.placed[:segments]
        draft.extend(known[-1].stop if known else 0)
        if request.wants_translation and request.prompt_logprobs is None and self._refusal is None:
            for here in known[draft.drafted :]:
                self._fill(draft, here)
        draft.drafted = max(draft.drafted, segments)
        return draft.translations[before:]

    def seal(self, draft: Draft) -> ReusePlan:
        """Return the plan of a request that has been drafted to its end."""
        if not draft.dense:
            last = draft.placed[-1]
            self._compute(draft, last.stop - 1)
            share = draft.sources.count(Source.TRANSLATED) / (last.stop - draft.exact_tokens)
            if share < self._policy.min_translated and (draft.translations or not draft.misses):
                draft.give_up(Miss("*", f"only {share:.0%} of the prompt could be translated"))
        found = tuple(draft.translations), tuple(draft.misses), tuple(draft.estimates)
        return ReusePlan(spans_of(draft.sources), *found, draft.teaches, tuple(draft.sentinels), tuple(draft.moved))

    def _fill(self, draft: Draft, here: Placed) -> None:
        """Draft a placeholder. Where computing it would teach something about it, that is done, and where nothing may
        be translated without anchors, all of the prompt is dense then.
        """
        if not here.segment.is_placeholder or here.stop <= draft.exact_tokens:
            return
        request = draft.request
        if request.guard.withholds(here.segment.name):
            reason = UNPROVED if EVERYTHING in request.guard.withheld else WITHHELD
            draft.misses.append(Miss(here.segment.name, reason if self.has_base(request, here) else UNREAD))
            return
        if not self.pays(here):
            if len(here) > self.short:
                draft.misses.append(Miss(here.segment.name, CHEAPER))
            return
        prefixes = self._bases.prefixes(request.namespace, template_key(request))
        if prefixes is None and not self.rotates and later_prefixes(draft.placed):
            if not draft.dense:
                draft.give_up(Miss(here.segment.name, "the agent's template has no base KV yet"))
        elif self._fill_pair(draft, here, prefixes or {}):
            draft.teaches = True
            if not (draft.dense or self.rotates):
                draft.give_up()

    def _fill_pair(self, draft: Draft, here: Placed, prefixes: Mapping[int, KVSegment]) -> bool:
        """Draft a placeholder and the prefix segment after it. Returns whether computing them teaches something."""
        request = draft.request
        sample = self.sample(request, here)
        if sample is None:
            draft.misses.append(Miss(here.segment.name, UNREAD))
            return False
        estimate, teaches = self._estimate(draft, here, sample)
        own = None if estimate.shareable else self._sample_of_producer(request, here)
        if own is not None and own.pool != sample.pool:  # of what that reader leaves nothing may be known yet
            other, _ = self._estimate(draft, here, own)
            sample, estimate = (own, other) if other.shareable else (sample, estimate)
        if not estimate.shareable:
            draft.misses.append(Miss(here.segment.name, estimate.reason))
            return teaches
        if draft.dense:
            return False
        if not self._costs.translation_pays(len(here), len(here) - len(estimate.weak)):
            draft.misses.append(Miss(here.segment.name, CHEAPER))
            return False
        draft.estimates.append(estimate)
        self._translate(draft, here, sample.base, estimate.value, estimate.value_table, estimate.weak)
        self._post_sentinels(draft, here, estimate.weak)
        if (after := here.text) is None:
            return False
        if not self.needs_anchors(request, here):
            self._move_after(draft, here, after)
            return False
        if text := self.sample_of_reader(request, after):
            behind = self._looked_up(request, after, text)
            if behind.shareable:
                draft.estimates.append(behind)
                self._translate(draft, after, text.base, behind.value, behind.value_table, behind.weak)
                return False
        if estimate.prefix is None or after.index not in prefixes:
            draft.misses.append(Miss(after.segment.name, UNLEARNED))
            if teaches:
                draft.moved.append(here.index)
            return teaches
        weak = estimate.weak_prefix
        if self._costs.translation_pays(len(after), len(after) - len(weak)):
            self._translate(draft, after, prefixes[after.index], estimate.prefix, estimate.prefix_table, weak)
        return False

    def _estimate(self, draft: Draft, here: Placed, sample: SampleView) -> tuple[OffsetEstimate, bool]:
        """Return how a value is translated, and whether computing it, or what is behind it, would teach something."""
        request = draft.request
        if not self.needs_anchors(request, here):
            return self._anchors.without_offsets(sample), False
        rung = rung_of(request)
        estimate = self._looked_up(request, here, sample)
        teaches = not estimate.shareable and estimate.learnable
        if (rung and rung.by_anchors) or not can_move(here.segment):
            return estimate, teaches
        if self.rotates and not estimate.shareable:
            return self._anchors.without_offsets(sample), teaches
        if self._moves_always(request):
            return self._anchors.without_offsets(sample, estimate), teaches
        return estimate, teaches

    def _looked_up(self, request: GenerateRequest, placed: Placed, sample: SampleView) -> OffsetEstimate:
        rung = rung_of(request)
        weak_error = rung.weak_error if rung and rung.by_anchors else None
        return self._anchors.estimate(site_of(request, placed), sample, weak_error, leave_out=request.guard.held_out)

    def needs_anchors(self, request: GenerateRequest, here: Placed) -> bool:
        """Return whether a value, or the prefix segment behind it, is translated by anchors once there are any."""
        if self.rotates and reads_in_place(request, here):
            return False
        is_short = here.text is None or len(here.text) <= SHORT_TEMPLATE
        return not (is_short and can_move(here.segment) and self._moves_always(request))

    def _moves_always(self, request: GenerateRequest) -> bool:
        rung = rung_of(request)
        return self._policy.move == "always" if rung is None else self.rotates and not rung.by_anchors

    def _move_after(self, draft: Draft, here: Placed, after: Placed) -> None:
        """Draft the prefix segment after a moved value: moved as well, where another prompt of the run, in which all
        since the first value was the same, has left its KV.
        """
        entry = self.shared_text(draft.request, after)
        if entry is None:
            draft.texts.append((here, after))
        if entry is None or not self._costs.translation_pays(len(after), len(after)):
            return
        sample = SampleView(pool_of(draft.request, here), after.segment.tokens, entry.kv, entry.key)
        blend = self._anchors.without_offsets(sample)
        self._translate(draft, after, entry.kv, blend.value, blend.value_table, ())

    def shared_text(self, request: GenerateRequest, after: Placed) -> KnownBase | None:
        """Return the KV of a value, or of the prefix segment behind one, that an earlier prompt of the run has left."""
        if not (request.run and self.rotates):
            return None
        text = shared_text(request, after)
        return self._bases.shared_text(request.run_key, text, len(after), template_key(request))

    @property
    def short(self) -> int:
        """Segments of at most so many tokens are computed."""
        return self._policy.recompute_short

    @property
    def rotates(self) -> bool:
        """Whether something is translated before there are anchors of it."""
        return self._policy.move != "never"

    def _translate(
        self, draft: Draft, placed: Placed, base: KVSegment, blend: Any, table: Any, weak: Iterable[int]
    ) -> None:
        """Note that a segment is translated as far as it is not exact and has base KV, but for its first tokens and the
        `weak` ones, which are computed all the same.
        """
        skip, stop = max(0, draft.exact_tokens - placed.start), placed.start + base.tokens
        if skip >= base.tokens:
            return
        start = placed.start + skip
        draft.translations.append(Translation(start, base.slice(skip), blend.slice(skip), table))
        draft.sources[start:stop] = [Source.TRANSLATED] * (stop - start)
        first = 0 if rung_of(draft.request) else self._policy.recompute_head
        head = range(start, min(placed.start + first, stop))
        for position in (*head, *(placed.start + at for at in weak)):
            self._compute(draft, position)

    def _post_sentinels(self, draft: Draft, here: Placed, weak: Iterable[int], most: int = 8, sparse: int = 8) -> None:
        """Note tokens of a value whose translated KV is compared with computed KV, other ones in every request: of its
        `weak` ones, which are computed anyway, at most so many, since each is copied, and, where the value is watched,
        translated ones as well, at most one in `sparse`.
        """
        guard = draft.request.guard
        if not guard.sentinels:
            return
        draw = Random(draft.request.request_id)
        written = [here.start + at for at in weak if here.start + at >= draft.exact_tokens]
        for at in draw.sample(written, min(most, len(written))):
            draft.sentinels.append(Sentinel(at, is_weak=True))
        if here.segment.name in guard.watched:
            translated = [at for at in range(here.start, here.stop) if draft.sources[at] is Source.TRANSLATED]
            for at in draw.sample(translated, min(guard.sentinels, len(translated) // sparse)):
                draft.sentinels.append(Sentinel(at, is_weak=False))
                self._compute(draft, at)

    @staticmethod
    def _compute(draft: Draft, position: int) -> None:
        if position >= draft.exact_tokens:
            draft.sources[position] = Source.COMPUTED

    def pays(self, placed: Placed) -> bool:
        """Return whether translating all of a value takes much less time than computing it."""
        return len(placed) > self.short and self._costs.translation_pays(len(placed), len(placed))

    def base_pays(self, placed: Placed, readers: float) -> bool:
        """Return whether to compute base KV of a value that so many requests are going to read."""
        base = len(placed.segment.base_context) + len(placed)
        return self._costs.base_pays(base, len(placed), readers)

    def sample(self, request: GenerateRequest, placed: Placed) -> SampleView | None:
        """Return the base KV of a placeholder's value, where it is known: as another agent of the run has read it, else
        its producer's.
        """
        return self.sample_of_reader(request, placed) or self._sample_of_producer(request, placed)

    def has_base(self, request: GenerateRequest, placed: Placed) -> bool:
        """Return whether `sample` finds something, in a tenth of its time where it does."""
        value, run = placed.segment, request.run_key
        is_known = self._bases.serving(run, value.sample, value.tokens, value.base_context) is not None
        return is_known or self.sample_of_reader(request, placed) is not None

    def _sample_of_producer(self, request: GenerateRequest, placed: Placed) -> SampleView | None:
        segment = placed.segment
        entry = self._bases.find(request.run_key, segment.sample, segment.tokens, segment.base_context)
        if entry is None:
            return None
        weight = 1.0 if segment.is_answer else self._of_inputs
        return SampleView(pool_of(request, placed), entry.tokens, entry.kv, entry.key, weight)

    def sample_of_reader(self, request: GenerateRequest, here: Placed) -> SampleView | None:
        """Return the KV that another agent's prompt has left of a value, or of the template behind one, where all since
        the first value is the same. The two prompts differ only before that value, so its error is a third of that of
        the producer's KV.
        """
        is_value = here.segment.is_placeholder
        first = next(at for at, one in enumerate(request.segments) if one.is_placeholder)
        entry = self.shared_text(request, here) if here.index > first else None
        if entry is None:
            return None
        own = pool_of(request, here if is_value else layout(request)[here.index - 1])
        pool = own._replace(placeholder=f"{own.placeholder}{'' if is_value else '+'}<{entry.reader}")
        return SampleView(pool, here.segment.tokens, entry.kv, entry.key, weight=self._of_readers)

    def pool(self, request: GenerateRequest, placed: Placed) -> PoolKey:
        """Return the pool that serves a value now: that of its producer's KV, or of a reader's."""
        left = self.sample_of_reader(request, placed)
        return left.pool if left else pool_of(request, placed)


def rung_of(request: GenerateRequest) -> Rung | None:
    """Return how a request is to be translated; None: as the settings say."""
    return None if request.guard.rung is None else RUNGS[request.guard.rung]


def pool_of(request: GenerateRequest, placed: Placed) -> PoolKey:
    """Return the name of the anchor pool of a placeholder's values."""
    return PoolKey(request.namespace, request.workflow, placed.segment.name)


def site_of(request: GenerateRequest, placed: Placed) -> PlaceholderSite:
    """Return the name of the place that a segment has in its agent's template."""
    return PlaceholderSite(template_key(request), placed.index)
