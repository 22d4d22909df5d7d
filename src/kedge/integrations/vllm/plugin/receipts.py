"""The receipt of a finished request: which of its prompt tokens came from where, as plain data for vLLM's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kedge.discovery import Served
from kedge.integrations.vllm.plugin.tracked_request import TrackedRequest
from kedge.reuse.plan import spans_of
from kedge.types import Miss, Receipt, Source, Tokens


def receipt_of(tracked: TrackedRequest, misses: tuple[Miss, ...], ready: int = 0) -> Receipt:
    """Return the receipt of a request. `misses` give the reasons why tokens were not translated; of the first `ready`
    tokens, what is translated was so before the request arrived.
    """
    total = tracked.request.num_prompt_tokens
    device = min(tracked.device, total)
    sources = [Source.HOST if i in tracked.load.tokens else Source.DEVICE for i in range(device)]
    sources += [Source.COMPUTED] * (total - device)
    for span in tracked.translated:
        sources[span.start : span.stop] = [Source.TRANSLATED] * len(span)
    request = tracked.hinted.request
    preassembled = ready if tracked.translated else 0
    return Receipt(request.request_id, request.reuse, spans_of(sources), misses, preassembled=preassembled)


def receipt_to_dict(receipt: Receipt, needs: Iterable[Tokens], lanes: str | None) -> dict[str, Any]:
    """Return a receipt as JSON data. `needs` are prompts whose prefill would give missing base KV; `lanes` is the
    reason why nothing in the middle of the prompt could be computed, if there is one.
    """
    return {
        "mode": receipt.mode.value,
        "tokens": {source.value: receipt.tokens(source) for source in Source},
        "spans": [[span.start, span.stop, span.source.value] for span in receipt.spans],
        "preassembled": receipt.preassembled,
        "lanes": lanes,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
        "base": [list(tokens) for tokens in needs],
    }


def served_by(receipt: Mapping[str, Any]) -> Served:
    """Return what a receipt says, as discovery counts it."""
    tokens = receipt["tokens"]
    exact = tokens[Source.DEVICE.value] + tokens[Source.HOST.value]
    return Served(exact, tokens[Source.TRANSLATED.value], tuple(miss["reason"] for miss in receipt["misses"]))
