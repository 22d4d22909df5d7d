"""Requests as the scheduler's half of the plug-in follows them, and their receipts: which tokens of a prompt came from
where, as plain data for vLLM's output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kedge.discovery import Served
from kedge.integrations.vllm.plugin.free_queue import Owner
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.reuse.holes import Holes
from kedge.types import Miss, Receipt, Source, Span

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True)
class RequestLoad:
    """What a request has and wants from the host."""

    request: Request
    owner: Owner | None = None
    """The session that the loaded blocks belong to"""
    is_admitted: bool = False
    is_ahead: bool = False
    """Whether a load was ordered before vLLM looked at it"""
    tokens: range = range(0)
    """Tokens of its prompt that it waited for while they were loaded"""
    waiting_since: float | None = None
    """Time from which on it has waited for a load under way, or for room for one as the next to be served"""
    orders: int = 0
    """Loads that were ordered on its demand"""
    computes: bool = False
    """Whether no further load is ordered for it: it computes what it lacks then"""


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request with hints, with the sources of its prompt's tokens."""

    hinted: HintedRequest
    request: Request
    device: int = 0
    """Leading tokens whose KV is on the device"""
    translated: Holes = ()
    """Positions after them whose KV is translated"""
    load: RequestLoad = field(init=False)
    """Some of the device's tokens come from here"""

    def __post_init__(self) -> None:
        self.load = RequestLoad(self.request)


def receipt_of(tracked: TrackedRequest, misses: tuple[Miss, ...], ready: int = 0) -> Receipt:
    """Return the receipt of a request. `misses` give the reasons why tokens were not translated; of the first `ready`
    tokens, what is translated was so before the request arrived.
    """
    request = tracked.hinted.request
    preassembled = ready if tracked.translated else 0
    return Receipt(request.request_id, request.reuse, _spans(tracked), misses, preassembled=preassembled)


def _spans(tracked: TrackedRequest) -> tuple[Span, ...]:
    """Return which of a prompt's tokens came from where, in O(spans)."""
    total, host = tracked.request.num_prompt_tokens, tracked.load.tokens
    device = min(tracked.device, total)
    cuts = {0, device, total, *(edge for run in (host, *tracked.translated) for edge in (run.start, run.stop))}
    edges = sorted(edge for edge in cuts if 0 <= edge <= total)

    def source(at: int) -> Source:
        if any(at in run for run in tracked.translated):
            return Source.TRANSLATED
        return Source.COMPUTED if at >= device else Source.HOST if at in host else Source.DEVICE

    spans: list[Span] = []
    for start, stop in pairwise(edges):
        kind = source(start)
        begun = spans.pop().start if spans and spans[-1].source is kind else start
        spans.append(Span(begun, stop, kind))
    return tuple(spans)


def receipt_to_dict(receipt: Receipt, actions: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Return a receipt as JSON data. `actions` is what became of those that the client asked for, which few do."""
    data: dict[str, Any] = {
        "mode": receipt.mode.value,
        "tokens": {source.value: receipt.tokens(source) for source in Source},
        "spans": [[span.start, span.stop, span.source.value] for span in receipt.spans],
        "preassembled": receipt.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
    }
    return {**data, "actions": list(actions)} if actions else data


def served_by(receipt: Mapping[str, Any]) -> Served:
    """Return what a receipt says, as discovery counts it."""
    tokens = receipt["tokens"]
    exact = tokens[Source.DEVICE.value] + tokens[Source.HOST.value]
    return Served(exact, tokens[Source.TRANSLATED.value], tuple(miss["reason"] for miss in receipt["misses"]))
