"""`EchoEngine`: an engine without a model, for tests of everything above an engine.

Its answers are canned or an echo, its cache is a real `CacheManager` with blocks of one token, so receipts show the
same exact reuse that a model's engine would give.
"""

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kedge.cache import CacheManager, Lease
from kedge.engine.base import Engine
from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.validation import require_new_id, require_sensible, sensible_hints
from kedge.errors import EngineClosed, OutOfBlocks, PromptTooLong
from kedge.reuse.reasons import with_reasons
from kedge.types import (
    AgentId,
    AgentKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Receipt,
    RequestId,
    ReuseMode,
    RunKey,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
    Tokens,
)
from kedge.workflow.forecast import Changes

_HALF = math.log(0.5)
Script = Mapping[AgentId, str] | Callable[[GenerateRequest], str]


class ByteTokenizer:
    """A `kedge.engine.base.Tokenizer`: token ids are UTF-8 bytes; 256 is `<|bos|>`, 257 `<|eos|>`, 258 `<|turn|>`."""

    specials: Mapping[str, int] = {"<|bos|>": 256, "<|eos|>": 257, "<|turn|>": 258}
    eos_token_id: int | None = 257
    most: int | None = None
    vocab_size = 259
    _spelled: Mapping[int, bytes] = {token: text.encode() for text, token in specials.items()}
    _special = re.compile(r"(<\|(?:bos|eos|turn)\|>)")

    def encode(self, text: str, *, special: bool = True, inside: bool = False) -> Tokens:  # noqa: ARG002
        if not special:
            return tuple(text.encode())
        parts = self._special.split(text)
        ids = ((self.specials[part],) if part in self.specials else part.encode() for part in parts)
        return tuple(itertools.chain.from_iterable(ids))

    def measure(self, text: str) -> None:
        if self.most is not None and len(text) > 2 * self.most:
            raise PromptTooLong.of("prompt_tokens", len(text), self.most)

    def encode_cut(self, text: str, ends: Sequence[int], mark: str) -> list[Tokens]:
        self.measure(text)
        pieces = (text[begin:end] for begin, end in itertools.pairwise((0, *ends)))
        each = ((self.encode(part) for part in piece.split(mark)) for piece in pieces)
        return [tuple(itertools.chain.from_iterable(parts)) for parts in each]

    def decode(self, tokens: Tokens) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def plain(self, tokens: Tokens) -> Tokens:
        return tuple(token for token in tokens if token < 256)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self._spelled[token]

    def is_certain(self, token: int) -> bool:
        """Return whether a token has text."""
        return token < 256

    def chat(self, system: str | None, user: str) -> str:
        """Return `<|bos|>`, the messages separated by `<|turn|>`, and the beginning of the answer's turn."""
        opening = "" if system is None else f"<|turn|>system\n{system}"
        return f"<|bos|>{opening}<|turn|>user\n{user}<|turn|>assistant\n"


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerateRequest
    stream: TokenStream
    answer: Iterator[int]
    text: TextStream
    arrived: float
    lease: Lease | None = None
    admitted: float = 0.0
    first_token: float = 0.0
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cancelled: bool = False
    told: int = 0
    """Number of the answer's log-probabilities that are in the stream already"""


class EchoEngine(Engine):
    """An engine that answers every request with its script's text or, where there is none, with an echo of the last
    placeholder's bytes (of the whole prompt's, without placeholders), then EOS; with `ignore_eos`, again from the
    start.

    `script` maps agents to texts (agents that are not in it echo) or is a function, called by `submit` in the caller's
    thread. `delay_s` is the length of a step, which gives each running request one token. `requests` are all accepted
    requests, in order; `forecasts` are all hints with their fixed prompts, and `prepared` the expected requests:
    neither changes anything here. `capacity` in tokens bounds the cache; a request waits until its prompt and
    `max_tokens` fit.

    Log-probabilities are made up: the generated token has probability 1/2, the one after it in the vocabulary 1/4, the
    next 1/8 and so on.
    """

    tokenizer: ByteTokenizer
    failure: BaseException | None = None
    """The error of `fail`."""

    def __init__(
        self, script: Script | None = None, *, delay_s: float = 0.0, max_prompt: int = 8192, capacity: int = 65536
    ) -> None:
        self.tokenizer = ByteTokenizer()
        self.tokenizer.most = max_prompt
        self.cache = CacheManager(capacity, block_size=1)
        self.requests: list[GenerateRequest] = []
        self.forecasts: list[tuple[Changes, Mapping[AgentKey, Tokens]]] = []
        self.prepared: list[GenerateRequest] = []
        self._script, self._delay_s, self._max_prompt = script, delay_s, max_prompt
        self._changed = threading.Condition()
        self._jobs: dict[RequestId, _Job] = {}
        self._closed = False
        self._worker = threading.Thread(target=self._serve, name="kedge-echo", daemon=True)
        self._worker.start()

    @property
    def in_flight(self) -> frozenset[RequestId]:
        """The ids of requests that run or wait."""
        with self._changed:
            return frozenset(self._jobs)

    def submit(self, request: GenerateRequest) -> TokenStream:
        """Queue a request. Raises `EmptyPrompt`, `PromptTooLong`, `InvalidToken`, `RequestError` (bad sampling, an
        id in flight) or `EngineClosed`.
        """
        self._check_open()
        require_sensible(request, self.tokenizer.vocab_size, self._max_prompt)
        prompt, more = request.prompt_tokens, request.sampling.max_tokens
        if prompt + more > self.cache.num_blocks:
            raise PromptTooLong.of("prompt_tokens", prompt, self.cache.num_blocks - more)
        answer = itertools.cycle((*self._answer(request), 257))
        text = TextStream(ByteTokenizer(), request.sampling.stop)  # answers are bytes, also with another tokenizer
        job = _Job(request, TokenStream(request.request_id), answer, text, time.perf_counter())
        with self._changed:
            self._check_open()
            require_new_id(request.request_id, self._jobs)
            self.requests.append(request)
            self._jobs[request.request_id] = job
            self._changed.notify()
        return job.stream

    def cancel(self, request_id: RequestId) -> bool:
        with self._changed:
            job = self._jobs.get(request_id)
            if job is not None:
                job.cancelled = True
        return job is not None

    def end_run(self, run: RunKey) -> None:
        """Do nothing: an echo engine shares nothing between the agents of a run."""

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        """Keep the valid entries of the hint in `forecasts`."""
        self.forecasts.append(sensible_hints(changes, prompts))

    def prepare(self, request: GenerateRequest) -> None:
        """Keep the hint in `prepared`."""
        self.prepared.append(request)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._worker.join()

    def fail(self, error: BaseException) -> None:
        """End the engine as if its thread had died of `error`: what runs or waits ends, nothing new is accepted."""
        self.failure = error
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("engine", self.failure or "echo", "was closed, or has failed")

    def _answer(self, request: GenerateRequest) -> Tokens:
        if callable(self._script):
            return self.tokenizer.encode(self._script(request))
        if self._script is not None and request.agent in self._script:
            return self.tokenizer.encode(self._script[request.agent])
        filled = [segment.tokens for segment in request.segments if segment.is_placeholder]
        return tuple(token for token in (filled[-1] if filled else request.tokens) if token < 256)

    # the worker's thread, which owns the cache --------------------------------------------------------------------

    def _serve(self) -> None:
        while jobs := self._next_jobs():
            full = False
            for job in jobs:
                if job.cancelled:
                    self._end(job, FinishReason.CANCELLED)
                elif job.lease is not None or (not full and self._admit(job)):
                    self._advance(job)
                else:
                    full = True
            time.sleep(self._delay_s)

    def _next_jobs(self) -> list[_Job]:
        """Wait for work. Once closed, cancel every job, which ends it with its next step; then return none."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            for job in self._jobs.values():
                job.cancelled = job.cancelled or self._closed
            return list(self._jobs.values())

    def _admit(self, job: _Job) -> bool:
        request = job.request
        limit, total = request.exact_limit, request.prompt_tokens + request.sampling.max_tokens
        try:
            job.lease = self.cache.admit(request.request_id, request.namespace, request.tokens, limit, total)
        except OutOfBlocks:
            return False
        job.admitted = time.perf_counter()
        return True

    def _advance(self, job: _Job) -> None:
        if not job.first_token:
            job.first_token = time.perf_counter()
            if (top := job.request.prompt_logprobs) is not None:
                job.prompt_logprobs = (None, *(_made_up(token, top) for token in job.request.tokens[1:]))
        if not job.request.sampling.max_tokens:
            self._end(job, FinishReason.LENGTH)
            return
        token = next(job.answer)
        if job.request.logprobs is not None:
            job.logprobs.append(_made_up(token, job.request.logprobs))
        if token == self.tokenizer.eos_token_id and not job.request.sampling.ignore_eos:
            self._end(job, FinishReason.STOP)
            return
        job.generated.append(token)
        text = job.text.push(token)
        if job.text.stopped:
            self._end(job, FinishReason.STOP, text, (token,))
        elif len(job.generated) == job.request.sampling.max_tokens:
            self._end(job, FinishReason.LENGTH, text, (token,))
        else:
            job.stream.put(_delta(job, text, (token,)))

    def _end(self, job: _Job, reason: FinishReason, text: str = "", tokens: Tokens = ()) -> None:
        text += job.text.flush()
        if job.lease is not None:
            # Others may reuse all but the last token, which was drawn and never read.
            kept = () if job.request.reuse is ReuseMode.OFF else (*job.request.tokens, *job.generated[:-1])
            self.cache.finish(job.request.request_id, kept)
        with self._changed:
            del self._jobs[job.request.request_id]
            reason = FinishReason.CANCELLED if job.cancelled else reason
        job.stream.put(_delta(job, text, tokens, _completion(job, reason)))


def _made_up(token: int, top: int) -> TokenLogprob:
    size = ByteTokenizer.vocab_size
    others = ((token + at) % size for at in range(min(top, size)))
    return TokenLogprob(token, _HALF, tuple((other, at * _HALF) for at, other in enumerate(others, 1)))


def _delta(job: _Job, text: str, tokens: Tokens, completion: Completion | None = None) -> TokenDelta:
    news, job.told = tuple(job.logprobs[job.told :]), len(job.logprobs)
    is_first = len(job.generated) == len(tokens)
    return TokenDelta(text, tokens, completion, news, job.prompt_logprobs if is_first else ())


def _completion(job: _Job, reason: FinishReason) -> Completion:
    now = time.perf_counter()
    ttft_ms = 1e3 * ((job.first_token or now) - job.arrived)
    return Completion(
        request_id=job.request.request_id,
        text=job.text.text,
        tokens=tuple(job.generated),
        finish_reason=reason,
        receipt=_receipt(job, ttft_ms),
        ttft_ms=ttft_ms,
        total_ms=1e3 * (now - job.arrived),
        logprobs=tuple(job.logprobs),
        prompt_logprobs=job.prompt_logprobs,
    )


def _receipt(job: _Job, ttft_ms: float) -> Receipt:
    """Return a receipt whose spans sum to the prompt; that of a request cancelled in the queue has none."""
    request = job.request
    if job.lease is None:
        return Receipt(request.request_id, request.reuse, (), parts_ms={"queue": ttft_ms})
    exact, stop = job.lease.exact_tokens, request.prompt_tokens
    spans: tuple[Span, ...] = (Span(0, exact, Source.DEVICE), Span(exact, stop, Source.COMPUTED))
    queue_ms = 1e3 * (job.admitted - job.arrived)
    parts = {"queue": queue_ms, "compute": ttft_ms - queue_ms}
    spans = spans if exact else spans[1:]
    return Receipt(request.request_id, request.reuse, spans, with_reasons(request, spans, ()), parts)
