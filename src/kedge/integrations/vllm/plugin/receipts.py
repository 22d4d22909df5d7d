"""Receipts: which tokens of a prompt came from where, as plain data for vLLM's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kedge.discovery import Served
from kedge.integrations.vllm.plugin.requests import LiveRequest
from kedge.types import Miss, Receipt, Source, Span


def receipt_of(live: LiveRequest, misses: tuple[Miss, ...], ready: int = 0) -> Receipt:
    """Return the receipt of a request with hints. `misses` say why tokens were not translated; of the first `ready`
    tokens, what is translated was so before the request arrived.
    """
    asked, preassembled = live.asked, ready if live.translated else 0
    return Receipt(asked.request_id, asked.reuse, _spans(live), misses, preassembled=preassembled)


def _spans(live: LiveRequest) -> tuple[Span, ...]:
    """Return which of a prompt's tokens came from where, in O(spans)."""
    total, host = live.request.num_prompt_tokens, live.loaded
    device = min(live.device, total)
    cuts = {0, device, total, *(edge for run in (host, *live.translated) for edge in (run.start, run.stop))}
    edges = sorted(edge for edge in cuts if 0 <= edge <= total)

    def source(at: int) -> Source:
        if any(at in run for run in live.translated):
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
