"""One request's answer, from vLLM's outputs to the deltas of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kedge.engine.common.detokenizer import TextStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.sequence import LocalStream
from kedge.errors import ForwardFailed
from kedge.integrations.vllm.engine.receipts import answer_logprobs, own_receipt, prompt_logprobs, told_receipt
from kedge.types import Completion, FinishReason, GenerateRequest, TokenDelta, TokenLogprob

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
"""vLLM's reasons. Here it stops for a token that ends every answer only: stop strings are looked for here."""


class Answer:
    """Takes vLLM's outputs, `end`s with a completion or `fail`s. Belongs to the engine's event loop."""

    def __init__(self, request: GenerateRequest, tokenizer: HFTokenizer, params: Any, room: int) -> None:
        """`params`: vLLM's `SamplingParams`; `room`: how many tokens the model can add to the prompt."""
        self.request, self.params = request, params
        self.stream = LocalStream(request.request_id)
        self.finish: FinishReason | None = None
        """Set once nothing that vLLM draws matters any more."""
        self._arrived = time.perf_counter()
        self._first_token: float | None = None
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._max_tokens = min(request.sampling.max_tokens, room)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._news = TokenDelta("", ())
        self._cached: int | None = None
        self._stats: Any = None

    @property
    def has_begun(self) -> bool:
        """Whether vLLM has computed its prompt."""
        return self._first_token is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met: vLLM knows nothing of it."""
        return self._text.stopped

    def take(self, output: Any) -> None:
        """Takes a `RequestOutput`, which has what came since the one before. Raises `ForwardFailed` where vLLM could
        not go on."""
        if self._first_token is None:
            self._begin(output)
        self._cached, self._stats = output.num_cached_tokens, output.metrics
        if self.finish is None:
            self._read(output.outputs[0])
        if not (output.finished or self.stopped):
            self._tell()

    def _begin(self, output: Any) -> None:
        self._first_token = time.perf_counter()
        top = self.request.prompt_logprobs
        if top is not None:
            self._prompt_logprobs = prompt_logprobs(self.request.tokens, output.prompt_logprobs, top)
            self._news = TokenDelta("", (), prompt_logprobs=self._prompt_logprobs)

    def _read(self, news: Any) -> None:
        reason = news.finish_reason
        if reason is not None and reason not in REASONS:
            raise ForwardFailed("request", self.request.request_id, f"vLLM ended it: {reason}")
        drawn = list(news.token_ids)[: self._max_tokens - len(self._tokens)]
        ends = reason == "stop" and len(drawn) == len(news.token_ids)
        pushed = self._push(drawn[:-1] if ends else drawn)
        self._note_logprobs(drawn if ends and not self.stopped else drawn[:pushed], news.logprobs)
        self.finish = self._finish(ends, reason)

    def _finish(self, ends: bool, reason: str | None) -> FinishReason | None:
        """`ends`: the last token that was drawn ends the answer, and is not in it."""
        if ends or self.stopped:
            return FinishReason.STOP
        if len(self._tokens) >= self._max_tokens:
            return FinishReason.LENGTH
        return None if reason is None else REASONS[reason]

    def _push(self, tokens: Sequence[int]) -> int:
        """Turns tokens into text; how many there are up to the end of a stop string."""
        for number, token in enumerate(tokens, 1):
            self._tokens.append(token)
            self._add(TokenDelta(self._text.push(token), (token,)))
            if self.stopped:
                return number
        return len(tokens)

    def _note_logprobs(self, tokens: Sequence[int], positions: Any) -> None:
        if self.request.logprobs is not None:
            news = answer_logprobs(tokens, list(positions)[: len(tokens)], self.request.logprobs)
            self._logprobs += news
            self._add(TokenDelta("", (), logprobs=news))

    def _add(self, more: TokenDelta) -> None:
        was = self._news
        self._news = TokenDelta(
            was.text + more.text,
            was.tokens + more.tokens,
            logprobs=was.logprobs + more.logprobs,
            prompt_logprobs=was.prompt_logprobs + more.prompt_logprobs,
        )

    def _tell(self) -> None:
        if self._news != TokenDelta("", ()):
            self.stream.put(self._news)
        self._news = TokenDelta("", ())

    def end(self, said: Mapping[str, Any] | None) -> None:
        """The last delta. `said`: the plug-in's receipt, if there is one."""
        now = time.perf_counter()
        self._add(TokenDelta(self._text.flush(), ()))
        ttft_ms = 1e3 * ((self._first_token or now) - self._arrived)
        parts = self._parts_ms(ttft_ms)
        done = Completion(
            request_id=self.request.request_id,
            text=self._text.text,
            tokens=tuple(self._tokens),
            finish_reason=self.finish or FinishReason.CANCELLED,
            receipt=told_receipt(self.request, said, parts) if said else own_receipt(self.request, self._cached, parts),
            ttft_ms=ttft_ms,
            total_ms=1e3 * (now - self._arrived),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )
        last = self._news
        self.stream.put(TokenDelta(last.text, last.tokens, done, last.logprobs, last.prompt_logprobs))

    def _parts_ms(self, ttft_ms: float) -> dict[str, float]:
        """By the clock of vLLM's own process: waiting, then all up to the first token; the rest is the way there."""
        if self._stats is None or not self._stats.first_token_ts:
            return {"queue": ttft_ms}
        queue = 1e3 * (self._stats.scheduled_ts - self._stats.queued_ts)
        compute = 1e3 * (self._stats.first_token_ts - self._stats.scheduled_ts)
        return {"queue": queue, "compute": compute, "other": max(0.0, ttft_ms - queue - compute)}

    def fail(self, error: BaseException) -> None:
        """Whoever reads the stream gets this error."""
        self.stream.put(error)
