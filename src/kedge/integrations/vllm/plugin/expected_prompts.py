"""Prompts of agents that run next, translated as far as they are known before their requests arrive.

A prompt is drafted and translated value by value, in the time for learning: its KV, with keys rotated to their places,
waits outside of vLLM's pages. A request that begins with the same segments has it stored into its blocks, and only what
is new in it is matched and translated then. Where a kernel translates, prompts are only drafted. A prompt that turns
out otherwise costs that time, and changes no answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kedge.anchors.translator import translate_into
from kedge.integrations.vllm.plugin.pages import Pages
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.reuse.layout import known_segments, next_stop, plan_key
from kedge.reuse.plan import Translation
from kedge.reuse.planner import Draft
from kedge.reuse.runtime import Runtime
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentKey, GenerateRequest, RunKey, Source, Span

MAX_EXPECTED = 16
"""Prompts that may be expected; the one whose hint is the oldest goes first"""
_NOWHERE = SlotTable(torch.empty(0, dtype=torch.int64))


class ReadyPart(NamedTuple):
    """Translated KV for the positions from `start` on, keys rotated to them."""

    start: int
    kv: KVSegment


@dataclass(slots=True)
class ExpectedPrompt:
    """A prompt whose request has not arrived, as far as it is known."""

    request: GenerateRequest
    exact: int
    """Leading tokens whose exact KV is at hand: those of its first segment"""
    draft: Draft | None = None
    ready: dict[int, list[ReadyPart]] = field(default_factory=dict)
    """The parts of each translation, by its first position"""
    seconds: float = 0.0
    """Time that was spent on it"""

    @property
    def drafted(self) -> int:
        """Number of segments that are drafted."""
        return self.draft.drafted if self.draft else 0

    @property
    def next_segments(self) -> range:
        """The segments to be drafted next, none where no more are known."""
        if self.drafted == known_segments(self.request):
            return range(self.drafted, self.drafted)
        return range(self.drafted, next_stop(self.request, self.drafted))

    @property
    def nbytes(self) -> int:
        """Bytes of its translated KV."""
        return sum(part.kv.nbytes for parts in self.ready.values() for part in parts)

    def agrees(self, request: GenerateRequest) -> bool:
        """Return whether `request` is the expected one, as far as this is drafted."""
        return (
            plan_key(self.request) == plan_key(request)
            and self.request.segments[: self.drafted] == request.segments[: self.drafted]
        )


class ExpectedPrompts:
    """All expected prompts of one rank."""

    def __init__(
        self,
        runtime: Runtime,
        pages: Pages,
        exact_of: Callable[[GenerateRequest], int],
        max_bytes: int,
        on_wasted: Callable[[GenerateRequest, float], None] = lambda _request, _seconds: None,
    ) -> None:
        """`exact_of` returns how many leading tokens of a prompt have exact KV at hand. Translated KV takes at most
        `max_bytes`. `on_wasted` takes the seconds that were spent on a prompt which is then of no use.
        """
        self._runtime, self._pages, self._exact_of, self._max_bytes = runtime, pages, exact_of, max_bytes
        self._on_wasted = on_wasted
        self._expected: BoundedDict[AgentKey, ExpectedPrompt] = BoundedDict(
            MAX_EXPECTED, lambda _, one: self._waste(one)
        )

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def nbytes(self) -> int:
        """Bytes of all translated KV."""
        return sum(one.nbytes for one in self._expected.values())

    def _waste(self, prompt: ExpectedPrompt) -> None:
        if prompt.seconds:
            self._on_wasted(prompt.request, prompt.seconds)

    def _drop(self, key: AgentKey) -> None:
        if prompt := self._expected.pop(key, None):
            self._waste(prompt)

    def expect(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected, or more of its segments; it replaces one that differs."""
        old = self._expected.get(request.agent_key)
        if old is not None and old.agrees(request):
            old.request = request
            self._expected.move_to_end(request.agent_key)
            return
        self._drop(request.agent_key)
        if exact := self._exact_of(request):
            self._expected[request.agent_key] = ExpectedPrompt(request, exact)

    @property
    def is_due(self) -> bool:
        """Whether there is something to do for `prepare`."""
        return any(map(self._can_advance, self._expected.values()))

    def _can_advance(self, prompt: ExpectedPrompt) -> bool:
        """Return whether more of a prompt is known, and can be decided: what lacks base KV would be computed."""
        segments = prompt.next_segments
        return bool(segments) and self._runtime.has_bases(prompt.request, segments)

    def prepare(self) -> bool:
        """Draft and translate one value of one prompt. Returns False where nothing is left to do."""
        found = next(filter(self._can_advance, self._expected.values()), None)
        if found is None:
            return False
        began = time.monotonic()
        try:
            if found.draft is None:
                found.draft = self._runtime.draft(found.request, (Span(0, found.exact, Source.DEVICE),))
            for one in self._runtime.grow(found.draft, found.request, found.next_segments.stop, again=True):
                found.ready[one.start] = translated(self._pages, one)
        except Exception:
            self._drop(found.request.agent_key)
            raise
        found.seconds += time.monotonic() - began
        if found.draft is None or found.draft.dense:  # what is computed needs no preparation
            self._drop(found.request.agent_key)
        while self.nbytes > self._max_bytes:
            self._drop(next(iter(self._expected)))
        return True

    def claim(self, request: GenerateRequest, exact: int) -> ExpectedPrompt | None:
        """Return the prompt of a request that has arrived, of which `exact` leading tokens have exact KV, if what was
        drafted of it holds. It is expected no longer.
        """
        found = self._expected.pop(request.agent_key, None)
        if found and found.draft and found.exact <= exact and found.agrees(request):
            return found
        if found:
            self._waste(found)
        return None

    def end_run(self, run: RunKey) -> None:
        """Forget the prompts of a run."""
        for key in [key for key, one in self._expected.items() if one.request.run_key == run]:
            self._drop(key)

    def clear(self) -> None:
        """Forget all prompts."""
        self._expected.clear()


def translated(pages: Pages, translation: Translation) -> list[ReadyPart]:
    """Return what a translation writes, outside of the pages; nothing where a kernel translates it as fast as it would
    copy this.
    """
    if pages.kernel_slots is not None:
        return []
    parts = _Parts(pages)
    translate_into(parts)(_NOWHERE, [translation])
    return parts.found


class _Parts:
    """A `Storage` that keeps what is written into it."""

    kernel_slots = None

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.found: list[ReadyPart] = []

    def write(self, table: SlotTable, start: int, base: KVSegment, offsets: KVSegment | None) -> None:  # noqa: ARG002
        self.found.append(ReadyPart(start, self._pages.translated(start, base, offsets)))
