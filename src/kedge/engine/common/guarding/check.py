"""A check: a call's prompt answered a second time, with its KV from elsewhere, to be compared with the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kedge.guard import DecisionKind, GuardMode, GuardOrders
from kedge.reuse.guard.comparison import (
    TOP,
    AnswerDecisions,
    DecisionComparison,
    compare_decisions,
    compare_wording,
)
from kedge.reuse.layout import Placed, layout
from kedge.settings import GuardSettings
from kedge.types import (
    AgentId,
    Completion,
    FinishReason,
    GenerateRequest,
    Receipt,
    ReuseMode,
    RunId,
    RunKey,
    Source,
    TurnHints,
    WorkflowId,
    new_request_id,
)

MAX_PICK_TOKENS = 1024
"""Most tokens of an answer that is generated again for its pick"""


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A request that answers a served call's prompt again: densely if that was translated, else translated."""

    of: GenerateRequest
    """The request that was served"""
    served: Completion
    request: GenerateRequest
    tried: str
    """The placeholder that is translated now and was not; "": the served call was translated"""
    decisions: AnswerDecisions
    """Of the served answer"""

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
        sampled = self.of.sampling.temperature > 0
        seen = compare_wording(dense, translated, margin, sampled=sampled)
        is_translated = self.tried in names if self.tried else bool(names)
        if seen is None or not is_translated:
            return None
        changes = {DecisionKind.WORDING: seen.changed}
        if not sampled:  # neither text is, so that what is read from them can be compared
            is_shortened = self.request.sampling.max_tokens < self.of.sampling.max_tokens
            is_whole = again.finish_reason is FinishReason.STOP or not is_shortened
            read = AnswerDecisions.of(again.text, self.of.guard.pick, is_whole=is_whole)
            mine = self.decisions if is_whole else replace(self.decisions, pick=None)
            changes |= compare_decisions(mine, read, None if is_whole else len(again.text))
        return names, DecisionComparison(changes, seen.kl)


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
    return _check(request, served, again, settings)


def trial(request: GenerateRequest, served: Completion, settings: GuardSettings, tried: str) -> Check:
    """Return the check of a call that was served without `tried`, a withheld placeholder: it is translated now."""
    withheld = request.guard.withheld - {tried}
    orders = replace(request.guard, mode=GuardMode.OFF, sentinels=0, withheld=withheld, afresh=tried, held_out=False)
    again = replace(_again(request, served, settings), guard=orders)
    return _check(request, served, again, settings, tried)


def _check(
    request: GenerateRequest, served: Completion, again: GenerateRequest, settings: GuardSettings, tried: str = ""
) -> Check:
    """Return a check that holds no more of an answer than a comparison reads: it may have to wait."""
    decisions = AnswerDecisions.of(served.text, request.guard.pick, is_whole=True)
    kept = replace(served, text="", tokens=(), logprobs=served.logprobs[: settings.tokens], prompt_logprobs=())
    return Check(request, kept, again, tried, decisions)


def _again(request: GenerateRequest, served: Completion, settings: GuardSettings) -> GenerateRequest:
    limit = max(1, min(settings.tokens, len(served.logprobs)))
    if request.guard.pick and not request.sampling.temperature:
        limit = max(limit, min(request.sampling.max_tokens, MAX_PICK_TOKENS))
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
    names = (
        here.segment.name
        for here in _values(request)
        if any(span.start < here.stop and span.stop > here.start for span in spans)
    )
    return tuple(dict.fromkeys(names))


def by_placeholder(request: GenerateRequest, errors: Mapping[int, float]) -> dict[str, list[float]]:
    """Return what is given by position, for each placeholder that holds any of these positions."""
    found: dict[str, list[float]] = {}
    for here in _values(request) if errors else ():
        if inside := [error for at, error in errors.items() if here.start <= at < here.stop]:
            found.setdefault(here.segment.name, []).extend(inside)
    return found


def _values(request: GenerateRequest) -> list[Placed]:
    return [here for here in layout(request) if here.segment.is_placeholder]
