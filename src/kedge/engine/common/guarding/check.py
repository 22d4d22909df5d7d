"""A check: a call's prompt answered a second time, with its KV from elsewhere, to be compared with the first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from kedge.decisions import PROSE, first_decision
from kedge.guard import EVERYTHING, DecisionKind, GuardMode, GuardOrders
from kedge.reuse.guard.comparison import (
    COMPARED_TOKENS,
    TOP,
    AnswerDecisions,
    DecisionComparison,
    compare_decisions,
    mean_divergence,
)
from kedge.reuse.guard.fidelity import FAR, RungFinding
from kedge.reuse.layout import Placed, layout
from kedge.types import (
    AgentId,
    Completion,
    FinishReason,
    GenerateRequest,
    Receipt,
    RequestId,
    ReuseMode,
    RunId,
    RunKey,
    Source,
    Tokens,
    TurnHints,
    WorkflowId,
    new_request_id,
)

MAX_PICK_TOKENS = 1024
"""Most tokens of an answer that is generated again for its pick"""


class ComparedWay(NamedTuple):
    """A call translated in one way, beside dense prefill."""

    names: tuple[str, ...]
    """The placeholders that were translated"""
    comparison: DecisionComparison
    finding: RungFinding | None
    """None where it was not translated on a rung"""
    is_served: bool
    """Whether requests are served in this way, or would be: no rung that is only tried"""


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Requests that answer a served call's prompt again: densely if that was translated, and translated on rungs."""

    of: GenerateRequest
    """The request that was served"""
    served: Completion
    requests: tuple[GenerateRequest, ...]
    tried: str
    """What is translated now and was not: a placeholder, or `EVERYTHING`; "": the served call was translated"""
    decisions: AnswerDecisions
    """Of the served answer"""
    is_settled: bool = False
    """Whether it can wait until agents are checked that are new, or whose mean seems to rise"""

    @property
    def run(self) -> RunKey | None:
        """The run whose base KV it needs; None for a check by dense prefill alone, which needs none."""
        return self.of.run_key if any(one.reuse is ReuseMode.TRANSLATE for one in self.requests) else None

    def narrowed(self) -> Self:
        """Return the check on one rung alone, the first: what is worth it while requests are served."""
        first = next((one for one in self.requests if one.reuse is ReuseMode.TRANSLATE), None)
        kept = (one for one in self.requests if one is first or one.reuse is not ReuseMode.TRANSLATE)
        return replace(self, requests=(*kept,))

    def noise(self, answers: Sequence[Completion | None]) -> float | None:
        """Return the divergence of the control from the served answer: rounding alone. None where it has none."""
        pairs = zip(self.requests, answers, strict=True)
        control = next((answer for one, answer in pairs if one.reuse is ReuseMode.EXACT), None)
        noise = None if control is None else mean_divergence(self.served, control)
        return None if noise is None or noise > FAR else noise

    def judge(self, answers: Sequence[Completion | None]) -> list[ComparedWay]:
        """Return what each translated answer says beside the dense one. None stands for a request without an answer."""
        pairs = [(one, answer) for one, answer in zip(self.requests, answers, strict=True) if answer is not None]
        dense = self.served if self.tried else next(answer for one, answer in pairs if one.reuse is ReuseMode.OFF)
        ways = [] if self.tried else [(self.of, self.served)]
        ways += [pair for pair in pairs if pair[0].reuse is ReuseMode.TRANSLATE]
        return [seen for request, answer in ways if (seen := self._seen(dense, request, answer)) is not None]

    def _seen(self, dense: Completion, request: GenerateRequest, answer: Completion) -> ComparedWay | None:
        names = translated_placeholders(self.of, answer.receipt)
        is_single = self.tried not in ("", EVERYTHING)
        is_translated = self.tried in names if is_single else bool(names)
        divergence = mean_divergence(dense, answer)
        if divergence is None or not is_translated:
            return None
        changes = {DecisionKind.FAR: divergence > FAR}
        again = answer if self.tried else dense
        is_free = not (self.of.sampling.temperature > 0 or any(one.forced for one in self.requests))
        if is_free and (self.tried or request is self.of):
            is_shortened = self.requests[0].sampling.max_tokens < self.of.sampling.max_tokens
            is_whole = again.finish_reason is FinishReason.STOP or not is_shortened
            read = AnswerDecisions.of(again.text, self.of.guard.pick, is_whole=is_whole)
            mine = self.decisions if is_whole else replace(self.decisions, pick=None)
            changes |= compare_decisions(mine, read, None if is_whole else len(again.text))
        rung, receipt = request.guard.rung, answer.receipt
        computed = receipt.computed / max(1, self.of.prompt_tokens - receipt.exact)
        finding = None if rung is None or is_single else RungFinding(rung, divergence, computed)
        is_served = request is self.of or rung is None or is_single
        return ComparedWay(names, DecisionComparison(changes, divergence), finding, is_served)


def dense_check(
    request: GenerateRequest, served: Completion, rungs: Sequence[int], *, is_settled: bool = False
) -> Check:
    """Return the check of a translated call. It computes the whole prompt, so that no cached KV is trusted either, and
    belongs to no agent: what is expected of that one is not its concern. `rungs` are tried beside.
    """
    again = _untranslated(_again(request, served), ReuseMode.OFF)
    others = [_tried(request, served, EVERYTHING, rung) for rung in rungs]
    return _check(request, served, [again, *others], is_settled=is_settled)


def _untranslated(again: GenerateRequest, reuse: ReuseMode) -> GenerateRequest:
    guard = GuardOrders(GuardMode.OFF)
    return replace(again, reuse=reuse, guard=guard, workflow=WorkflowId(""), run=RunId(""), agent=AgentId(""))


def trial(
    request: GenerateRequest,
    served: Completion,
    tried: str,
    rungs: Sequence[int | None],
    *,
    control: bool = True,
    is_settled: bool = False,
) -> Check:
    """Return the check of a call that was served without `tried`, a withheld placeholder or all of them: it is
    translated now, on each of the `rungs`. Where all are, a control is forced to the same answer over the KV that it
    was drawn from: in 16 bits already the order of additions changes an answer, by as much as a good translation.
    """
    again = [_tried(request, served, tried, rung) for rung in rungs]
    if control and tried == EVERYTHING and None not in rungs:
        again.append(_untranslated(_again(request, served, is_free=False), ReuseMode.EXACT))
    return _check(request, served, again, tried, is_settled=is_settled)


def _tried(request: GenerateRequest, served: Completion, tried: str, rung: int | None) -> GenerateRequest:
    withheld = frozenset[str]() if tried == EVERYTHING else request.guard.withheld - {tried}
    orders = replace(
        request.guard, mode=GuardMode.OFF, sentinels=0, withheld=withheld, recheck=tried, rung=rung, held_out=True
    )
    return replace(_again(request, served), guard=orders)


def _check(
    request: GenerateRequest,
    served: Completion,
    again: Sequence[GenerateRequest],
    tried: str = "",
    *,
    is_settled: bool,
) -> Check:
    """Return a check that holds no more of an answer than a comparison reads: it may have to wait."""
    decisions = AnswerDecisions.of(served.text, request.guard.pick, is_whole=True)
    kept = replace(served, text="", tokens=(), logprobs=served.logprobs[:COMPARED_TOKENS], prompt_logprobs=())
    return Check(request, kept, tuple(again), tried, decisions, is_settled)


def _again(request: GenerateRequest, served: Completion, *, is_free: bool = True) -> GenerateRequest:
    """Return a request for the answer once more: forced to the tokens that were served, unless it says something about
    decisions, which a free answer shows, and may be free.
    """
    limit = max(1, min(COMPARED_TOKENS, len(served.logprobs)))
    forced: Tokens = served.tokens[:limit]
    decides = request.guard.pick or request.tool_mark or first_decision(served.text) != PROSE
    if is_free and decides and not request.sampling.temperature:
        forced = ()
        if request.guard.pick:
            limit = max(limit, min(request.sampling.max_tokens, MAX_PICK_TOKENS))
    sampling = replace(request.sampling, max_tokens=limit, temperature=0.0, seed=None)
    if forced:
        sampling = replace(sampling, max_tokens=len(forced), grammar="", stop=(), ignore_eos=True)
    return replace(
        request,
        request_id=RequestId(f"check-{new_request_id()}"),  # in a process of its own, ids of requests are another's
        sampling=sampling,
        produces=None,
        turn=TurnHints(),
        is_plain=False,
        tool_mark="",
        logprobs=TOP,
        forced=forced,
    )


def translated_placeholders(request: GenerateRequest, receipt: Receipt) -> tuple[str, ...]:
    """Return the names of the placeholders with translated tokens in a receipt, each once."""
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
