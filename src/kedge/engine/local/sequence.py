"""What the scheduler moves: a sequence of tokens with its cache lease, on its way through prefill and decode."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kedge.cache import Namespace
from kedge.engine.local.logprobs import Logprobs
from kedge.engine.local.sampler import Sampler
from kedge.engine.local.text import TextStream
from kedge.kv.storage import SlotTable
from kedge.runtime.interfaces import Cut
from kedge.runtime.plan import ReusePlan
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Receipt,
    RequestId,
    TenantId,
    TokenDelta,
    Tokens,
)


class LocalStream:
    """The reader's end of a request; the engine thread puts deltas, then a completion or an error."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self._items: queue.SimpleQueue[TokenDelta | BaseException] = queue.SimpleQueue()
        self._completion: Completion | None = None

    def put(self, item: TokenDelta | BaseException) -> None:
        self._items.put(item)

    def __iter__(self) -> Iterator[TokenDelta]:
        while self._completion is None:
            yield self._next(None)

    def result(self, timeout: float | None = None) -> Completion:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._completion is None:
            self._next(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._completion

    def _next(self, timeout: float | None) -> TokenDelta:
        try:
            item = self._items.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no token of {self.request_id} in time") from None
        if isinstance(item, BaseException):
            self._items.put(item)  # whoever asks again gets it again
            raise item
        self._completion = item.completion
        return item


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of which some positions are still to be run through the model, in ascending order."""

    key: RequestId
    tenant: TenantId
    tokens: list[int]
    table: SlotTable | None = None
    todo: list[int] = field(default_factory=list)
    """Positions to compute; the last of them answers the next token."""

    @property
    def namespace(self) -> Namespace:
        """One engine has one model, so tenants are all that is kept apart."""
        return self.tenant, ""

    @property
    def exact_limit(self) -> int:
        """How many leading tokens may come from the cache: the last one gives the logits."""
        return len(self.tokens) - 1

    @property
    def admitted(self) -> bool:
        return self.table is not None

    @property
    def needs_all_logits(self) -> bool:
        """Whether the logits after every position are wanted, not only those after the last one of a pass."""
        return False


@dataclass(slots=True, eq=False)
class BaseJob(Sequence):
    """Computes base KV off the critical path: a short prefill whose KV is cut into segments and kept."""

    cuts: tuple[Cut, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class RequestSequence(Sequence):
    """A request being served."""

    request: GenerateRequest
    stream: LocalStream
    sampler: Sampler
    text: TextStream
    max_tokens: int
    arrival: float = field(default_factory=time.monotonic)
    plan: ReusePlan | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part, up to the first token."""
    load_asked: float | None = None
    """When it began to wait for KV from the host, if it did."""
    skips: int = 0
    """Requests that went before it while it waited for that."""
    gave_up: bool = False
    """It waits for that no longer."""
    first_token: float | None = None
    logprobs: Logprobs = field(init=False)
    finish: FinishReason | None = None
    """Set when the response is complete; one more pass may follow, to leave the last token's KV behind."""

    def __post_init__(self) -> None:
        self.logprobs = Logprobs(self.request)

    @property
    def exact_limit(self) -> int:
        return self.request.exact_limit

    @property
    def needs_all_logits(self) -> bool:
        return self.logprobs.of_prompt and self.waits_for_first_token

    @property
    def response(self) -> list[int]:
        return self.tokens[self.request.prompt_tokens :]

    @property
    def waits_for_first_token(self) -> bool:
        return self.first_token is None

    def tell(self, text: str, tokens: Tokens = (), completion: Completion | None = None) -> None:
        """Puts a delta into the stream."""
        self.stream.put(TokenDelta(text, tokens, completion, *self.logprobs.news()))

    def receipt(self) -> Receipt:
        spans, misses = (self.plan.spans, self.plan.misses) if self.plan else ((), ())
        parts = {name: seconds * 1e3 for name, seconds in self.parts.items()}
        return Receipt(self.request.request_id, self.request.reuse, spans, misses, parts)

    def completion(self, reason: FinishReason) -> Completion:
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        return Completion(
            request_id=self.request.request_id,
            text=self.text.text,
            tokens=tuple(self.response),
            finish_reason=reason,
            receipt=self.receipt(),
            ttft_ms=(first - self.arrival) * 1e3,
            total_ms=(now - self.arrival) * 1e3,
            logprobs=tuple(self.logprobs.answer),
            prompt_logprobs=tuple(self.logprobs.prompt),
        )
