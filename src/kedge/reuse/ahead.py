"""Prompts whose requests have not come: what is known of them, and how far each is drafted.

What was decided for a segment holds: a request that claims a prompt continues its draft, so that the plan equals that
of a single pass. A prompt that turns out otherwise costs the time for it, and changes no answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, TypeVar

from kedge.reuse.costs import MAX_PENDING
from kedge.reuse.layout import known_segments, next_stop, plan_key
from kedge.reuse.planner import Draft
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, GenerateRequest, ReuseMode, RunKey, SampleId, Tokens


class Ended(StrEnum):
    """The ways in which an expected prompt ends."""

    USED = "used"
    """Its request was admitted"""
    WASTED = "wasted"
    """Its agent asked for something else, or the cache has more of it"""
    GIVEN_BACK = "given_back"
    """A request found no room"""
    CANCELLED = "cancelled"
    """Its run has ended, the forecast does not expect it any more, or too many are expected"""
    FAILED = "failed"
    """The model, or its translation, raised"""


@dataclass(eq=False, kw_only=True)
class ExpectedPrompt:
    """The prompt of a request that is expected, as far as its segments are known."""

    request: GenerateRequest
    draft: Draft | None = None

    def learn(self, request: GenerateRequest) -> None:
        """Take over a request with more known segments."""
        self.request = request

    def agrees(self, request: GenerateRequest) -> bool:
        """Return whether `request` is the expected one, as far as this is drafted, and the tokens that were exact."""
        mine, drafted, held = self.request, 0, 0
        if self.draft is not None:
            drafted, held = self.draft.drafted, len(self.draft.sources)
        return (
            request.prompt_logprobs is None  # a prompt with logprobs must run through the model
            and plan_key(mine) == plan_key(request)
            and mine.segments[:drafted] == request.segments[:drafted]
            and mine.tokens[:held] == request.tokens[:held]
        )

    @property
    def drafts_on(self) -> bool:
        """Whether known segments are not drafted yet."""
        return (self.draft.drafted if self.draft else 0) < known_segments(self.request)

    @property
    def next_stop(self) -> int:
        """Number of known segments up to the end of the next placeholder's prefix segment."""
        return next_stop(self.request, self.draft.drafted if self.draft else 0)


P = TypeVar("P", bound=ExpectedPrompt)


class ExpectedPrompts(Generic[P]):
    """All expected prompts of an engine, one of each agent in its run. Subclasses draft them."""

    def __init__(self) -> None:
        self.expected: BoundedDict[AgentKey, P] = BoundedDict(
            MAX_PENDING, lambda _, one: self.drop(one, Ended.CANCELLED), owner=lambda one: one.namespace.tenant
        )
        """The prompts that no request has claimed, oldest hint first."""

    def __len__(self) -> int:
        return len(self.expected)

    def begin(self, request: GenerateRequest) -> P | None:
        """Return the record of a prompt, None for one that is not worth it."""
        raise NotImplementedError

    def drop(self, prompt: P, ended: Ended) -> None:  # noqa: ARG002
        """Forget a prompt, expected or claimed."""
        key = prompt.request.agent_key
        if self.expected.get(key) is prompt:
            del self.expected[key]

    def expect(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected, or more of its segments; one that differs replaces it. Ignored
        without an agent or without reuse.

        A hint may be older than an answer that was reported here: values of known samples stay known.
        """
        if not request.agent or request.reuse is ReuseMode.OFF:
            return
        if old := self.expected.get(request.agent_key):
            request = filled(request, {one.sample: one.tokens for one in old.request.segments})
            if old.agrees(request):
                old.learn(request)
                return
            self.drop(old, Ended.WASTED)
        if new := self.begin(request):
            self.expected[request.agent_key] = new

    def claim(self, request: GenerateRequest) -> P | None:
        """Return the prompt that fits an arrived request, or None; it is expected no longer.

        Another prompt of its agent is dropped as wrong, except by a check of the guard.
        """
        found = None if request.guard.recheck else self.expected.get(request.agent_key)
        if found is None:
            return None
        if found.draft is None or not found.agrees(request):
            self.drop(found, Ended.WASTED)
            return None
        del self.expected[request.agent_key]
        found.learn(request)
        return found

    def of_run(self, run: RunKey) -> list[P]:
        """Return the expected prompts of a run."""
        return [one for one in self.expected.values() if one.request.run_key == run]

    def end_run(self, run: RunKey) -> None:
        """Forget the prompts of a run."""
        for prompt in self.of_run(run):
            self.drop(prompt, Ended.CANCELLED)

    def clear(self) -> None:
        """Forget all prompts that no request has claimed."""
        for prompt in list(self.expected.values()):
            self.drop(prompt, Ended.CANCELLED)


def filled(request: GenerateRequest, values: Mapping[SampleId | None, Tokens]) -> GenerateRequest:
    """Return the request with `values` filled in wherever it waits for them."""
    waiting = (one.is_placeholder and not one.tokens for one in request.segments)
    segments = (
        replace(one, tokens=value) if waits and (value := values.get(one.sample)) else one
        for one, waits in zip(request.segments, waiting, strict=True)
    )
    return replace(request, segments=tuple(segments))
