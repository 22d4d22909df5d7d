"""The stream of one request, from vLLM's outputs to deltas of text, tokens and log-probabilities, and its receipt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import ForwardFailed
from kedge.reuse.plan import ALL_COMPUTED
from kedge.reuse.reasons import with_reasons
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Receipt,
    ReuseMode,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
)

NO_RECEIPT = Miss("*", "the request ended before vLLM reported where its prompt came from")
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
"""vLLM's reasons. It stops at end-of-sequence tokens only, since stop strings are matched here."""


def plugin_receipt(request: GenerateRequest, data: Mapping[str, Any], parts_ms: Mapping[str, float]) -> Receipt:
    """Return the receipt that the plug-in sent for a request as `data`."""
    misses = tuple(Miss(one["segment"], one["reason"]) for one in data["misses"])
    if not misses and request.prompt_logprobs is not None and request.reuse is not ReuseMode.OFF:
        misses = (ALL_COMPUTED,)
    spans = tuple(Span(start, stop, Source(source)) for start, stop, source in data["spans"])
    reasons = with_reasons(request, spans, misses)
    return Receipt(request.request_id, request.reuse, spans, reasons, parts_ms)


def fallback_receipt(request: GenerateRequest, cached: int | None, parts_ms: Mapping[str, float]) -> Receipt:
    """Return the receipt of an aborted request, for which the plug-in sent none.

    vLLM reports only the number of prompt tokens that it did not compute: `cached`, None where it had not begun.
    Whether they are exact is known only where nothing could be translated.
    """
    mode = request.reuse
    if cached is None:
        return Receipt(request.request_id, mode, (), parts_ms=parts_ms)
    if cached and mode is ReuseMode.TRANSLATE:
        return Receipt(request.request_id, mode, (), (NO_RECEIPT,), parts_ms)
    both = Span(0, cached, Source.DEVICE), Span(cached, request.prompt_tokens, Source.COMPUTED)
    spans = tuple(span for span in both if len(span))
    return Receipt(request.request_id, mode, spans, with_reasons(request, spans, ()), parts_ms)


def ranked_logprobs(
    tokens: Iterable[int], positions: Iterable[Mapping[int, Any] | None], top: int
) -> Iterator[TokenLogprob | None]:
    """Yield the log-probability of each token, with those of the `top` most probable ones there. vLLM gives them
    together, as its `Logprob`s with ranks from 1; None for the first token of a prompt, which has no context.
    """
    for token, ranked in zip(tokens, positions, strict=True):
        if ranked is None:
            yield None
            continue
        by_rank = sorted(ranked.items(), key=lambda one: one[1].rank or 0)
        best = [(other, one.logprob) for other, one in by_rank if 1 <= (one.rank or 0) <= top]
        yield TokenLogprob(token, ranked[token].logprob, tuple(best))


class StreamedResponse:
    """The response to one request, which ends with a completion or an error. Owned by the engine's event loop."""

    def __init__(
        self, request: GenerateRequest, tokenizer: HFTokenizer, params: Any, room: int, priority: int = 0
    ) -> None:
        """`params` are vLLM's `SamplingParams`; `room` is the number of tokens that the model can add to the prompt.
        The least `priority` goes first, where vLLM goes by that.
        """
        self.request, self.params, self.priority = request, params, priority
        self.stream = TokenStream(request.request_id)
        self.finish: FinishReason | None = None
        """Set once the response is complete: later tokens are dropped."""
        self._arrived = time.perf_counter()
        self._first_token: float | None = None
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._max_tokens = min(request.sampling.max_tokens, room)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._pending = TokenDelta("", ())
        """What has not been put into the stream yet"""
        self._cached: int | None = None
        self._stats: Any = None

    @property
    def has_begun(self) -> bool:
        """Whether vLLM has computed the prompt."""
        return self._first_token is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was matched, in which case vLLM does not end the request by itself."""
        return self._text.stopped

    def take(self, output: Any) -> None:
        """Take a `RequestOutput` with the tokens since the one before. Raises `ForwardFailed` if vLLM gave up."""
        if self._first_token is None:
            self._first_token, top = time.perf_counter(), self.request.prompt_logprobs
            if top is not None:
                self._prompt_logprobs = tuple(ranked_logprobs(self.request.tokens, output.prompt_logprobs, top))
                self._pending = TokenDelta("", (), prompt_logprobs=self._prompt_logprobs)
        self._cached, self._stats = output.num_cached_tokens, output.metrics
        if self.finish is None:
            self._read(output.outputs[0])
        if not (output.finished or self.stopped) and self._pending != TokenDelta("", ()):
            self.stream.put(self._pending)
            self._pending = TokenDelta("", ())

    def _read(self, output: Any) -> None:
        """Take tokens up to the end of a stop string, with their text and their log-probabilities."""
        reason = output.finish_reason
        if reason is not None and reason not in REASONS:
            raise ForwardFailed("request", self.request.request_id, f"vLLM ended it: {reason}")
        drawn = list(output.token_ids)[: self._max_tokens - len(self._tokens)]
        ends = reason == "stop" and len(drawn) == len(output.token_ids)  # with an end-of-sequence token
        pushed = 0
        for token in drawn[:-1] if ends else drawn:
            pushed += 1
            self._tokens.append(token)
            self._add(TokenDelta(self._text.push(token), (token,)))
            if self.stopped:
                break
        if self.request.logprobs is not None:
            tokens = drawn if ends and not self.stopped else drawn[:pushed]
            found = ranked_logprobs(tokens, list(output.logprobs)[: len(tokens)], self.request.logprobs)
            added = tuple(one for one in found if one is not None)
            self._logprobs += added
            self._add(TokenDelta("", (), logprobs=added))
        if ends or self.stopped:
            self.finish = FinishReason.STOP
        elif len(self._tokens) >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        else:
            self.finish = None if reason is None else REASONS[reason]

    def _add(self, more: TokenDelta) -> None:
        pending = self._pending
        self._pending = TokenDelta(
            pending.text + more.text,
            pending.tokens + more.tokens,
            logprobs=pending.logprobs + more.logprobs,
            prompt_logprobs=pending.prompt_logprobs + more.prompt_logprobs,
        )

    def end(self, receipt: Mapping[str, Any] | None) -> None:
        """End the stream with a completion. `receipt` is the plug-in's, if there is one."""
        done = self.completion(receipt)
        self.stream.put(replace(self._pending, completion=done))

    def completion(self, receipt: Mapping[str, Any] | None) -> Completion:
        """Return the whole of what was taken, with the text that was held back."""
        self._add(TokenDelta(self._text.flush(), ()))
        now = time.perf_counter()
        ttft_ms = 1e3 * ((self._first_token or now) - self._arrived)
        parts = {"queue": ttft_ms}
        if self._stats is not None and self._stats.first_token_ts:  # by the clock of vLLM's process
            queue = 1e3 * (self._stats.scheduled_ts - self._stats.queued_ts)
            compute = 1e3 * (self._stats.first_token_ts - self._stats.scheduled_ts)
            parts = {"queue": queue, "compute": compute, "other": max(0.0, ttft_ms - queue - compute)}
        if receipt:
            whole = plugin_receipt(self.request, receipt, parts)
        else:
            whole = fallback_receipt(self.request, self._cached, parts)
        return Completion(
            request_id=self.request.request_id,
            text=self._text.text,
            tokens=tuple(self._tokens),
            finish_reason=self.finish or FinishReason.CANCELLED,
            receipt=whole,
            ttft_ms=ttft_ms,
            total_ms=1e3 * (now - self._arrived),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )
