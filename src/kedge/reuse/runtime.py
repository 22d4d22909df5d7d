"""Reuse around one request: its plan, the base KV that it needs, what it leaves behind, what is learned from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from kedge.anchors.anchor import PoolKey
from kedge.anchors.base_store import BaseStore, ContentKey, LastingKey, PrefixKey
from kedge.reuse.layout import Placed, later_prefixes, layout, reads_in_place, shared_text, template_key, template_of
from kedge.reuse.plan import ReusePlan
from kedge.reuse.planner import Planner, pool_of, site_of
from kedge.settings import PlannerSettings
from kedge.structures.bounded import BoundedDict
from kedge.types import GenerateRequest, Namespace, ReuseMode, RunKey, Span, Tokens

if TYPE_CHECKING:
    from kedge.anchors.store import AnchorStore
    from kedge.kv.segment import KVSegment
    from kedge.reuse.costs import EngineCosts


REFRESH = 8
"""Of the dense prompts of an agent that has seen enough values, one in so many is learned from"""
MAX_VALUES = 256
"""Values of a placeholder whose readers are being counted; beyond that, the oldest one's count is final."""
UNKNOWN = 2.0
"""Readers of a value that are assumed at least, while no count is final."""
ReadKV = Callable[[int, int], "KVSegment"]
"""The real KV of prompt positions [start, stop), keys unrotated"""


@dataclass(frozen=True, slots=True)
class BaseNeed:
    """A base prefill that is worth doing off the critical path."""

    namespace: Namespace
    tokens: Tokens
    keep: Callable[[ReadKV], None]
    """Keeps what is needed of its KV: all of that, or nothing"""


class _Counts:
    """The reads of one placeholder's values: being counted by the hash of a value, and the average of final counts, of
    which each weighs `forget` as much at every later one.
    """

    def __init__(self, forget: float = 0.98) -> None:
        self._forget = forget
        self.open: BoundedDict[int, int] = BoundedDict(MAX_VALUES, self._close)
        self.most, self.is_settled = 0, False
        """The highest count, and whether a new value has come since: else all values are still being read"""
        self.reads = self.values = 0.0

    def read(self, value: int) -> None:
        self.is_settled |= value not in self.open
        self.open[value] = self.open.get(value, 0) + 1
        if self.open[value] > self.most:
            self.most, self.is_settled = self.open[value], False

    def _close(self, _: int, reads: int) -> None:
        self.reads, self.values = self._forget * self.reads + reads, self._forget * self.values + 1


class Readers:
    """Counts how often a placeholder's values are read, which is what base KV of a new one is worth. Bounded."""

    def __init__(self) -> None:
        self._counts: BoundedDict[PoolKey, _Counts] = BoundedDict(owner=attrgetter("namespace.tenant"))

    def read(self, placeholder: PoolKey, value: Tokens) -> None:
        """Count that a request reads this value."""
        self._counts.use(placeholder, _Counts).read(hash(value))

    def reads(self, placeholder: PoolKey, value: Tokens) -> int:
        """Return how often this value has been read, as far as that is still counted."""
        counts = self._counts.get(placeholder)
        return counts.open.get(hash(value), 0) if counts else 0

    def is_last(self, placeholder: PoolKey, value: Tokens) -> bool:
        """Return whether this value has been read as often as others were."""
        counts = self._counts.get(placeholder)
        is_known = counts is not None and (counts.is_settled or counts.values > 0)
        return is_known and self.reads(placeholder, value) >= self.expected(placeholder)

    def expected(self, placeholder: PoolKey) -> float:
        """Return how often a value of this placeholder is read, the first time included: the average of final counts,
        or the highest so far while there are none.
        """
        counts = self._counts.get(placeholder)
        if counts is None or not counts.values:
            return max(UNKNOWN, counts.most if counts else 0)
        return counts.reads / counts.values


class Runtime:
    """The reuse of one engine, called by its owner thread only."""

    def __init__(
        self,
        anchors: AnchorStore,
        bases: BaseStore,
        policy: PlannerSettings,
        refusal: str | None,
        costs: EngineCosts,
    ) -> None:
        """Begin with what the stores hold; `costs` says what is worth it."""
        self._anchors, self._bases, self._refusal = anchors, bases, refusal
        self.planner = Planner(anchors, bases, policy, refusal, costs)
        self._readers = Readers()
        """How many agents read the values of a placeholder"""
        self._saturated = 0

    def plan(self, request: GenerateRequest, exact: tuple[Span, ...]) -> ReusePlan:
        """Plan a request whose leading tokens are `exact` on the device, and count the anchors that the plan uses."""
        plan = self.planner.plan(request, exact)
        self.use(plan)
        return plan

    def use(self, plan: ReusePlan) -> None:
        """Count the anchors that a plan uses. Call this once for a plan that is carried out."""
        for estimate in plan.estimates:
            self._anchors.use(estimate)

    def has_bases(self, request: GenerateRequest, segments: range) -> bool:
        """Return whether base KV is there for all values among these segments that are worth translating."""
        values = [one for one in layout(request) if one.index in segments and one.segment.is_placeholder]
        return all(self.planner.has_base(request, one) for one in values if self.planner.pays(one))

    def pays(self, request: GenerateRequest) -> bool:
        """Return whether a value of a prompt costs much less to translate than to compute."""
        return bool(self._worth_translating(layout(request)))

    def learns(self, request: GenerateRequest) -> bool:
        """Return whether something of this request may be translated, or kept for others."""
        return request.reuse is ReuseMode.TRANSLATE and self._refusal is None

    def needs(self, request: GenerateRequest, *, is_new: bool = False) -> list[BaseNeed]:
        """Return base prefills worth doing for later requests. A request that `is_new` counts as one more reader, and
        takes room for the base KV; any other gets only prefills whose base KV has room already.
        """
        if not self.learns(request):
            return []
        placed = layout(request)
        values = self._worth_translating(placed)
        if not values:
            return []
        for one in values if is_new else ():
            pool, value = pool_of(request, one), one.segment
            self._readers.read(pool, value.tokens)
            is_last = self._readers.is_last(pool, value.tokens)
            self._bases.note_read(request.run_key, value.sample, value.tokens, value.base_context, is_last=is_last)
        others = [one for one in values if not reads_in_place(request, one)]
        missing = [self._placeholder_need(request, one) for one in others if self._lacks_base(request, one, is_new)]
        if not self._worth_learning(request) or self._prefixes(request, placed) is not None:
            return missing
        key, tokens = PrefixKey(request.namespace, template_key(request)), sum(map(len, later_prefixes(placed)))
        if not self._has_room(key, tokens, None, is_new):
            return missing
        keep = partial(self._keep_template, request)
        return [BaseNeed(request.namespace, template_of(request).tokens, keep), *missing]

    def prerequisites(
        self, request: GenerateRequest, exact_tokens: int, *, of_later_readers: bool = False
    ) -> list[BaseNeed]:
        """Return base prefills that pay before a request is planned: of values behind its first `exact_tokens` that
        others are going to read too, and that its own agent can translate then.

        Otherwise the first reader would compute a value in its own context, and its base KV would be computed as well,
        for the others. The first reader translates only once its agent's estimates are known to be good: what it gets
        wrong, all others read. With `of_later_readers`, values count that were read before, once the agent has seen as
        many as a translation needs: base KV computed beside other work would come too late.
        """
        if not self.learns(request) or request.prompt_logprobs is not None:
            return []
        placed = layout(request)
        wanted = (one for one in placed if one.segment.is_placeholder and not request.guard.withholds(one.segment.name))
        values = [one for one in wanted if one.stop > exact_tokens]
        if self._prefixes(request, placed) is None:
            values = [one for one in values if self._moves(one)]
        ready = [one for one in values if self._is_ready(request, one, of_later_readers)]
        paying = [one for one in ready if self.planner.pays(one) and self._lacks_base(request, one, is_new=True)]
        return [self._placeholder_need(request, one) for one in paying]

    def keep_response(self, request: GenerateRequest, tokens: Tokens, kv: KVSegment) -> None:
        """Keep an answer's own KV, perhaps without its last token, as base KV of the placeholder that it fills."""
        if self.learns(request) and request.produces is not None:
            self._bases.put_sample(request.run_key, request.produces, tokens, kv)

    def keep_base(self, request: GenerateRequest, read: ReadKV, plan: ReusePlan | None = None) -> None:
        """Keep what other prompts of the run read from a computed prompt: base KV of values that it reads in their base
        context, and of template text behind values. With a `plan`, only values before all translated tokens count, and
        text that was not translated.
        """
        if not self.learns(request):
            return
        exact = request.prompt_tokens if plan is None else plan.exact_tokens
        for one in self._in_place(request):
            if one.stop <= exact:
                self._keep_value(request, one, one.start, read)
        for one in self._shared_texts(request, plan):
            text, kv = shared_text(request, one), read(one.start, one.stop)
            self._bases.put_shared_text(request.run_key, text, kv, template_key(request))

    def wants_harvest(self, request: GenerateRequest, plan: ReusePlan) -> bool:
        """Return whether to learn from a request: its whole prompt was computed, or a value in it because that teaches
        something, and its offsets are worth measuring.

        Dense prompts of an agent that has seen enough values are, once in `REFRESH` times, so that they follow what
        changes.
        """
        if request.guard.held_out:
            return False
        if plan.translates or not self.learns(request):
            return plan.teaches and self.learns(request)
        values = self._worth_learning(request)
        sites = ((site_of(request, one), self.planner.pool(request, one)) for one in values)
        if not all(self._anchors.history(*site).is_saturated for site in sites):
            return True
        self._saturated += bool(values)
        return bool(values) and (plan.teaches or self._saturated % REFRESH == 0)

    def observe(self, request: GenerateRequest, read: ReadKV, plan: ReusePlan | None = None) -> Iterator[Placed]:
        """Measure the offsets of the values that were computed in a prompt, and feed the anchor pools. With a `plan`,
        values that it translates are left out; one that it moved by rotation alone counts as having none, for the sake
        of the prefix segment after it.

        One placeholder a step, so that decodes beside it are not held up for long; yields what was measured.
        """
        if (prefixes := self._prefixes(request, layout(request))) is None:
            return
        for here in self._learnable(request, plan):
            after = here.text
            base_prefix = prefixes.get(after.index) if after else None
            is_moved = plan is not None and here.index in plan.moved
            if is_moved and base_prefix is None:
                continue
            if (sample := self.planner.sample(request, here)) is not None:
                real = sample.base if is_moved else read(here.start, here.start + sample.base.tokens)
                real_prefix = read(after.start, after.stop) if base_prefix is not None and after else None
                self._anchors.observe(site_of(request, here), sample, real, base_prefix, real_prefix)
                yield here
            if after and (text := self.planner.sample_of_reader(request, after)) is not None:
                self._anchors.observe(site_of(request, after), text, read(after.start, after.stop))
                yield after

    def may_observe(self, request: GenerateRequest, plan: ReusePlan | None = None) -> bool:
        """Return whether `observe` may find something in a prompt, once its base KV is there."""
        return self.learns(request) and next(self._learnable(request, plan), None) is not None

    def end_run(self, run: RunKey) -> None:
        """Forget what a run shared between its agents."""
        self._bases.end_run(run)

    def clear(self) -> None:
        """Forget all anchors and all base KV."""
        self._anchors.clear()
        self._bases.clear()

    # which base KV is worth it ---------------------------------------------------------------------------------

    def _prefixes(self, request: GenerateRequest, placed: tuple[Placed, ...]) -> Mapping[int, KVSegment] | None:
        """Return base KV of the template's later prefix segments; None where it lacks one of them."""
        later = [one.index for one in later_prefixes(placed)]
        return self._bases.prefixes(request.namespace, template_key(request), later) if later else {}

    def _in_place(self, request: GenerateRequest) -> list[Placed]:
        """Return the values whose base KV this prompt's own KV is, where that is not kept yet and others read it."""
        return [
            one
            for one in self._worth_translating(layout(request))
            if reads_in_place(request, one)
            and self._readers.expected(pool_of(request, one)) > 1
            and not self.planner.has_base(request, one)
        ]

    def _shared_texts(self, request: GenerateRequest, plan: ReusePlan | None) -> list[Placed]:
        """Return the segments behind the first value that others are expected to read, and whose KV in this prompt has
        read all before it: it was computed, or offsets were added.
        """
        behind = [*dropwhile(lambda one: not one.segment.is_placeholder, layout(request)[:-1])]
        found = []
        for before, one in pairwise(behind) if request.run and self.planner.rotates else ():
            value = one if one.segment.is_placeholder else before
            if not value.segment.is_placeholder or len(one) <= self.planner.short:
                continue
            is_moved = plan is not None and any(
                one.start <= its.start < one.stop and not its.blend.adds for its in plan.translations
            )
            is_read = self.planner.pays(value) and self._readers.expected(pool_of(request, value)) > 1
            if is_read and not is_moved:
                found.append(one)
        return found

    def _is_ready(self, request: GenerateRequest, placed: Placed, of_later_readers: bool) -> bool:
        """Return whether its agent would translate a value, once base KV of it is there."""
        if self._moves(placed):
            return not reads_in_place(request, placed)
        pool = pool_of(request, placed)
        history = self._anchors.history(site_of(request, placed), pool)
        if history.is_calibrated:
            return True
        was_read = of_later_readers and self._readers.reads(pool, placed.segment.tokens) > 1
        return was_read and not history.missing

    def _moves(self, placed: Placed) -> bool:
        """Return whether a value is moved without anchors and a translated template, once base KV of it is there."""
        return placed.segment.in_context and self.planner.rotates

    def _worth_translating(self, placed: tuple[Placed, ...]) -> list[Placed]:
        """Return the values of a prompt that cost less to translate than to compute."""
        return [one for one in placed if one.segment.is_placeholder and self.planner.pays(one)]

    def _worth_learning(self, request: GenerateRequest) -> list[Placed]:
        """Return the values worth translating for which, or for the prefix segment behind which, anchors are needed."""
        return [one for one in self._worth_translating(layout(request)) if self.planner.needs_anchors(request, one)]

    def _learnable(self, request: GenerateRequest, plan: ReusePlan | None) -> Iterator[Placed]:
        """Yield the values that anchors serve and that a plan does not translate by them."""
        for here in layout(request):
            if not here.segment.is_placeholder or len(here) <= self.planner.short:
                continue
            is_written = plan is not None and plan.writes_in(here.start, here.stop) and here.index not in plan.moved
            if not is_written and self.planner.needs_anchors(request, here):
                yield here

    def _lacks_base(self, request: GenerateRequest, placed: Placed, is_new: bool) -> bool:
        """Return whether a value has no base KV yet, computing it is worth that to its readers, and there is room,
        which a request that `is_new` takes.
        """
        if self.planner.has_base(request, placed):
            return False
        readers = self._readers.expected(pool_of(request, placed))
        if not self.planner.base_pays(placed, readers):
            return False
        segment = placed.segment
        key = ContentKey(request.namespace, segment.tokens, segment.base_context)
        return self._has_room(key, len(placed), request.run_key, is_new)

    def _has_room(self, key: LastingKey, tokens: int, run: RunKey | None, is_new: bool) -> bool:
        return self._bases.hold(key, tokens, run) if is_new else self._bases.is_expected(key)

    def _placeholder_need(self, request: GenerateRequest, placed: Placed) -> BaseNeed:
        tokens = placed.segment.base_context + placed.segment.tokens
        keep = partial(self._keep_value, request, placed, len(placed.segment.base_context))
        return BaseNeed(request.namespace, tokens, keep)

    def _keep_template(self, request: GenerateRequest, read: ReadKV) -> None:
        """Keep the base KV of a template's later prefix segments."""
        later = later_prefixes(layout(template_of(request)))
        parts = {one.index: read(one.start, one.stop) for one in later}
        self._bases.put_prefix(request.namespace, template_key(request), parts)

    def _keep_value(self, request: GenerateRequest, placed: Placed, start: int, read: ReadKV) -> None:
        """Keep base KV that was made off the critical path, and look up now what its next reader would look up."""
        segment, kv = placed.segment, read(start, start + len(placed))
        self._bases.put_content(request.namespace, segment.tokens, segment.base_context, kv, request.run_key)
        if sample := self.planner.sample(request, placed):
            self._anchors.prepare(sample)
