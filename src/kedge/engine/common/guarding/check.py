"""A check: a call's prompt answered a second time, with its KV from elsewhere, to be compared with the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from kedge.guard import GuardMode, GuardOrders
from kedge.reuse.guard.comparison import TOP, DecisionComparison, compare
from kedge.reuse.layout import Placed, layout
from kedge.settings import GuardSettings
from kedge.types import (
    AgentId,
    Completion,
    GenerateRequest,
    Receipt,
    ReuseMode,
    RunId,
    RunKey,
    Source,
    Span,
    TurnHints,
    WorkflowId,
    new_request_id,
)


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A request that answers a served call's prompt again: densely if that was translated, else translated."""

    of: GenerateRequest
    """The request that was served"""
    served: Completion
    request: GenerateRequest
    tried: str
    """The placeholder that is translated now and was not; "": the served call was translated"""

    @property
    def run(self) -> RunKey | None:
        """The run whose base KV it needs; None for a check by dense prefill, which needs none."""
        return self.of.run_key if self.tried else None

    @property
    def cost(self) -> int:
        """Tokens that it computes, at most."""
        return self.request.prompt_tokens + self.request.sampling.max_tokens

    def judge(self, again: Completion, margin: float) -> tuple[tuple[str, ...], DecisionComparison] | None:
        """Return the translated placeholders and the comparison; None where nothing was translated after all."""
        dense, translated = (self.served, again) if self.tried else (again, self.served)
        names = translated_placeholders(self.of, translated.receipt)
        seen = compare(dense, translated, margin, sampled=self.of.sampling.temperature > 0)
        is_translated = self.tried in names if self.tried else bool(names)
        return (names, seen) if seen is not None and is_translated else None


def dense_check(request: GenerateRequest, served: Completion, settings: GuardSettings) -> Check:
    """Return the check of a translated call. It computes the whole prompt, so that no cached KV is trusted either, and
    belongs to no agent: what is expected of that one is not its concern.
    """
    again = replace(
        _again(request, served, settings),
        reuse=ReuseMode.OFF,
        guard=GuardOrders(GuardMode.OFF),
        workflow=WorkflowId(""),
        run=RunId(""),
        agent=AgentId(""),
    )
    return Check(request, _compared(served, settings), again, "")


def trial(request: GenerateRequest, served: Completion, settings: GuardSettings, tried: str) -> Check:
    """Return the check of a call that was served without `tried`, a withheld placeholder: it is translated now."""
    withheld = request.guard.withheld - {tried}
    orders = replace(request.guard, mode=GuardMode.OFF, sentinels=0, withheld=withheld, afresh=tried, held_out=False)
    again = replace(_again(request, served, settings), guard=orders)
    return Check(request, _compared(served, settings), again, tried)


def _compared(served: Completion, settings: GuardSettings) -> Completion:
    """Return what a comparison reads of an answer: checks that wait hold no more."""
    return replace(served, text="", tokens=(), logprobs=served.logprobs[: settings.tokens], prompt_logprobs=())


def _again(request: GenerateRequest, served: Completion, settings: GuardSettings) -> GenerateRequest:
    limit = max(1, min(settings.tokens, len(served.logprobs)))
    sampling = replace(request.sampling, max_tokens=limit, temperature=0.0, seed=None)
    return replace(
        request,
        request_id=new_request_id(),
        sampling=sampling,
        produces=None,
        trail=(),
        turn=TurnHints(),
        is_plain=False,
        tool_mark="",
        logprobs=TOP,
    )


def translated_placeholders(request: GenerateRequest, receipt: Receipt) -> tuple[str, ...]:
    """Return the names of the placeholders of which a receipt lists translated tokens, each once."""
    spans = [span for span in receipt.spans if span.source is Source.TRANSLATED]
    names = (here.segment.name for here in _values(request) if any(_overlap(here, span) for span in spans))
    return tuple(dict.fromkeys(names))


def by_placeholder(request: GenerateRequest, errors: Mapping[int, float]) -> dict[str, float]:
    """Return the mean of what is given by position for each placeholder that holds any of these positions."""
    found: dict[str, list[float]] = {}
    for here in _values(request):
        if inside := [error for at, error in errors.items() if here.start <= at < here.stop]:
            found.setdefault(here.segment.name, []).extend(inside)
    return {name: fmean(these) for name, these in found.items()}


def _values(request: GenerateRequest) -> list[Placed]:
    return [here for here in layout(request) if here.segment.is_placeholder]


def _overlap(here: Placed, span: Span) -> bool:
    return span.start < here.stop and span.stop > here.start
