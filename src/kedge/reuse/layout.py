"""Where the segments of a prompt lie, and the name under which an agent's template is known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import takewhile

from kedge.types import GenerateRequest, ReuseMode, Segment, Tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """A segment at prompt positions [start, stop). `index` counts the segments of the prompt from 0."""

    segment: Segment
    index: int
    start: int
    text: Placed | None = None
    """The prefix segment behind a value; None where another value, or nothing, follows"""

    @property
    def stop(self) -> int:
        return self.start + len(self.segment.tokens)

    def __len__(self) -> int:
        return len(self.segment.tokens)


def layout(request: GenerateRequest) -> tuple[Placed, ...]:
    """Return the request's segments with their positions."""
    placed, start, text = deque[Placed](), request.prompt_tokens, None
    for index, segment in reversed([*enumerate(request.segments)]):
        start -= len(segment.tokens)
        placed.appendleft(Placed(segment, index, start, text if segment.is_placeholder else None))
        text = None if segment.is_placeholder or not segment.tokens else placed[0]
    return tuple(placed)


def can_move(segment: Segment) -> bool:
    """Return whether rotation alone can move a value to another agent's prompt. Its base KV must have been computed
    behind an agent's text: an answer, or a value in an agent's prompt.
    """
    return segment.is_answer or segment.in_context


def reads_in_place(request: GenerateRequest, placed: Placed) -> bool:
    """Return whether a prompt begins with a value's base context, and the value follows: its KV there is base KV."""
    before = [segment.tokens for segment in request.segments[: placed.index]] or [()]
    return placed.segment.in_context and before == [placed.segment.base_context]


def shared_text(request: GenerateRequest, last: Placed) -> Tokens:
    """Return the tokens of a prompt from its first value to the end of the segment `last`. Another agent's prompt with
    the same text differs only before it, in the agent's own first segment.
    """
    own = takewhile(lambda one: not one.is_placeholder, request.segments)
    return request.tokens[sum(len(one.tokens) for one in own) : last.stop]


def known_segments(request: GenerateRequest) -> int:
    """Return how many leading segments have their tokens: all, or those before a placeholder without a value yet."""
    waits = (at for at, segment in enumerate(request.segments) if segment.is_placeholder and not segment.tokens)
    return next(waits, len(request.segments))


def next_stop(request: GenerateRequest, drafted: int) -> int:
    """Return the number of known leading segments up to the next placeholder behind the first `drafted` ones, with the
    prefix segment after it.
    """
    segments, known = request.segments, known_segments(request)
    places = (at for at in range(drafted, known) if segments[at].is_placeholder)
    stop = next(places, known) + 1
    return min(stop + (stop < known and not segments[stop].is_placeholder), known)


def template_key(request: GenerateRequest) -> str:
    """Return workflow, agent and a digest of the template and of its values' base contexts. So nothing is used that was
    observed under another wording, against other base KV, or before the guard discarded the agent's anchors.
    """
    return f"{request.workflow}/{request.agent}/{request.template_digest}{request.guard.epoch or ''}"


def plan_key(request: GenerateRequest) -> tuple[ReuseMode, frozenset[str], int | None, str]:
    """Return what a prompt's plan depends on besides its values: two requests with different ones share no plan."""
    return request.reuse, request.guard.withheld, request.guard.rung, template_key(request)


def template_of(request: GenerateRequest) -> GenerateRequest:
    """Return the template itself as a prompt: every placeholder is replaced by its name as text."""
    segments = (replace(s, tokens=s.placeholder_text) if s.is_placeholder else s for s in request.segments)
    return replace(request, segments=tuple(segments))


def later_prefixes(placed: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """Return the prefix segments after the first segment, which need base KV to be translated."""
    return tuple(p for p in placed if not p.segment.is_placeholder and p.index > 0 and len(p))
