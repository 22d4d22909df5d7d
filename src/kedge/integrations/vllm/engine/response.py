"""The stream of one request, from vLLM's outputs to deltas of text, tokens and log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.engine.common.stream import TokenStream
from kedge.engine.common.tokenizer import HFTokenizer, TextStream
from kedge.errors import ForwardFailed
from kedge.integrations.vllm.engine.receipts import answer_logprobs, fallback_receipt, plugin_receipt, prompt_logprobs
from kedge.types import Completion, FinishReason, GenerateRequest, Receipt, TokenDelta, TokenLogprob

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
"""vLLM's reasons. It stops at end-of-sequence tokens only, since stop strings are matched here."""


class StreamedResponse:
    """The response to one request, which ends with a completion or an error. Owned by the engine's event loop."""

    def __init__(self, request: GenerateRequest, tokenizer: HFTokenizer, params: Any, room: int) -> None:
        """`params` are vLLM's `SamplingParams`; `room` is the number of tokens that the model can add to the prompt."""
        self.request, self.params = request, params
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
            self._begin(output)
        self._cached, self._stats = output.num_cached_tokens, output.metrics
        if self.finish is None:
            self._read(output.outputs[0])
        if not (output.finished or self.stopped):
            self._flush()

    def _begin(self, output: Any) -> None:
        self._first_token = time.perf_counter()
        top = self.request.prompt_logprobs
        if top is not None:
            self._prompt_logprobs = prompt_logprobs(self.request.tokens, output.prompt_logprobs, top)
            self._pending = TokenDelta("", (), prompt_logprobs=self._prompt_logprobs)

    def _read(self, output: Any) -> None:
        reason = output.finish_reason
        if reason is not None and reason not in REASONS:
            raise ForwardFailed("request", self.request.request_id, f"vLLM ended it: {reason}")
        drawn = list(output.token_ids)[: self._max_tokens - len(self._tokens)]
        ends = reason == "stop" and len(drawn) == len(output.token_ids)
        pushed = self._push(drawn[:-1] if ends else drawn)
        self._add_logprobs(drawn if ends and not self.stopped else drawn[:pushed], output.logprobs)
        self.finish = self._finish(ends, reason)

    def _finish(self, ends: bool, reason: str | None) -> FinishReason | None:
        """Return the reason to finish, if there is one. `ends`: the last token drawn was an end-of-sequence token."""
        if ends or self.stopped:
            return FinishReason.STOP
        if len(self._tokens) >= self._max_tokens:
            return FinishReason.LENGTH
        return None if reason is None else REASONS[reason]

    def _push(self, tokens: Sequence[int]) -> int:
        """Append tokens and their text. Returns how many there are up to the end of a stop string."""
        for number, token in enumerate(tokens, 1):
            self._tokens.append(token)
            self._add(TokenDelta(self._text.push(token), (token,)))
            if self.stopped:
                return number
        return len(tokens)

    def _add_logprobs(self, tokens: Sequence[int], positions: Any) -> None:
        if self.request.logprobs is not None:
            added = answer_logprobs(tokens, list(positions)[: len(tokens)], self.request.logprobs)
            self._logprobs += added
            self._add(TokenDelta("", (), logprobs=added))

    def _add(self, more: TokenDelta) -> None:
        pending = self._pending
        self._pending = TokenDelta(
            pending.text + more.text,
            pending.tokens + more.tokens,
            logprobs=pending.logprobs + more.logprobs,
            prompt_logprobs=pending.prompt_logprobs + more.prompt_logprobs,
        )

    def _flush(self) -> None:
        if self._pending != TokenDelta("", ()):
            self.stream.put(self._pending)
        self._pending = TokenDelta("", ())

    def end(self, receipt: Mapping[str, Any] | None) -> None:
        """End the stream with a completion. `receipt` is the plug-in's, if there is one."""
        now = time.perf_counter()
        self._add(TokenDelta(self._text.flush(), ()))
        ttft_ms = 1e3 * ((self._first_token or now) - self._arrived)
        parts = self._parts_ms(ttft_ms)
        done = Completion(
            request_id=self.request.request_id,
            text=self._text.text,
            tokens=tuple(self._tokens),
            finish_reason=self.finish or FinishReason.CANCELLED,
            receipt=self._receipt(receipt, parts),
            ttft_ms=ttft_ms,
            total_ms=1e3 * (now - self._arrived),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )
        last = self._pending
        self.stream.put(TokenDelta(last.text, last.tokens, done, last.logprobs, last.prompt_logprobs))

    def _receipt(self, receipt: Mapping[str, Any] | None, parts: Mapping[str, float]) -> Receipt:
        if receipt:
            return plugin_receipt(self.request, receipt, parts)
        return fallback_receipt(self.request, self._cached, parts)

    def _parts_ms(self, ttft_ms: float) -> dict[str, float]:
        """Return the parts of the TTFT: queue and compute by the clock of vLLM's process, the rest as `other`."""
        if self._stats is None or not self._stats.first_token_ts:
            return {"queue": ttft_ms}
        queue = 1e3 * (self._stats.scheduled_ts - self._stats.queued_ts)
        compute = 1e3 * (self._stats.first_token_ts - self._stats.scheduled_ts)
        return {"queue": queue, "compute": compute, "other": max(0.0, ttft_ms - queue - compute)}

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        self.stream.put(error)
