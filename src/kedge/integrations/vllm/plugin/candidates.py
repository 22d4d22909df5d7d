"""Requests that may be translated, or that are learned from, as the scheduler follows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.request import Request

from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.messages import TranslationVerdict
from kedge.reuse.holes import Holes, between, clipped, joined, merged_to
from kedge.types import Miss, RequestId, ReuseMode, Tokens

CacheBlocks = Callable[[Request, int], None]
NEAR = 4
"""Holes with fewer positions than this between them are computed as one: a lane costs more than these positions."""


@dataclass(eq=False, slots=True)
class TranslationCandidate:
    """A request that may be translated, or that is learned from."""

    hinted: HintedRequest
    request: Request
    refusal: str | None
    exact: int = 0
    """Leading tokens that were exact at the last query"""
    queries: int = 0
    is_pending: bool = False
    """Whether a query has not been answered yet"""
    verdict: TranslationVerdict | None = None
    needs: tuple[Tokens, ...] = ()
    """Prompts whose prefill would give missing base KV, by its first verdict"""
    awaits: tuple[Tokens, ...] | None = None
    """Prompts whose prefill it waits for; None: it has not been asked yet whether it should"""
    waits: int = 0
    """Steps in which it has waited for that"""
    declined: tuple[Miss, ...] | None = None
    """The misses of its agent's last request, where the workers are not asked because translating does not pay"""
    holes: Holes = ()
    """Positions to be computed by the verdict, until the request is admitted"""
    lesson_waits: int = 0
    """Steps in which it has waited for lessons of its agent"""
    refusals: int = 0
    """Steps in which it was held back for want of room for its lanes"""
    preemptions: int = 0
    planned: Holes = ()
    """Positions that are computed if it is admitted now; later, those with which it was admitted"""
    written: Holes = ()
    """Positions between them: some of its blocks hold translated KV there, or will"""
    captured: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.hinted.request.request_id

    @property
    def may_learn(self) -> bool:
        return self.hinted.request.reuse is ReuseMode.TRANSLATE and self.refusal is None

    @property
    def has_placeholders(self) -> bool:
        return any(segment.is_placeholder for segment in self.hinted.request.segments)

    @property
    def is_asked_about(self) -> bool:
        """Whether the workers are asked what of it can be translated."""
        return self.may_learn and self.has_placeholders and self.declined is None

    @property
    def lessons(self) -> int:
        """How many prompts of its agent have to be learned from until it can be translated; itself may be one."""
        return self.verdict.lessons if self.verdict and self.verdict.is_lesson else 0

    @property
    def has_waited(self) -> bool:
        """Whether it has waited since it was asked about, for base KV or for lessons."""
        return self.awaits == () or self.lesson_waits > 0

    def is_outdated(self, computed: int) -> bool:
        """Return whether its verdict is of no use now: it was preempted since, or its exact prefix has shrunk."""
        return self.preemptions != self.request.num_preemptions or computed < self.exact

    def take_verdict(self, verdict: TranslationVerdict, max_lanes: int) -> None:
        """Take the workers' verdict; the holes are merged to what `max_lanes` lanes can compute."""
        self.verdict, self.is_pending, self.refusals = verdict, False, 0
        self.needs = self.needs or verdict.needs
        self.holes = merged_to(joined(clipped(verdict.holes, self.exact), NEAR), max_lanes + 1)

    def withdraw(self) -> None:
        """Forget the verdict."""
        self.verdict, self.holes = None, ()

    def ask_again(self) -> None:
        """Forget the verdict, since the workers know more now."""
        self.withdraw()
        self.queries = 0

    def plan(self, holes: Holes, computed: int) -> int:
        """Plan to compute `holes`, and to translate what is between them behind the first `computed` tokens.

        Returns how many tokens then need no computing by the request itself: those before the last hole.
        """
        self.planned = clipped(holes, computed)
        self.written = between(self.planned, computed)
        return self.planned[-1].start - computed if self.written else 0

    def cache_blocks(self, give: CacheBlocks, num_computed_tokens: int) -> None:
        """Let vLLM hash the blocks before the first translated token only: what follows is not exact."""
        exact = self.written[0].start if self.written else num_computed_tokens
        give(self.request, min(num_computed_tokens, exact))
