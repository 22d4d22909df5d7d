"""Sequences, the scheduler's units of work: tokens with a cache lease, on their way through prefill and decode; and the
batch that several of them make in one pass.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Self

import torch

from kedge.engine.common.logprobs import Logprobs
from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.local.attention.paged import Batch, SequenceSlice
from kedge.engine.local.sampler import ForcedAnswer, Sampler
from kedge.engine.local.sentinels import SentinelRows
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.policies.sessions import Turn
from kedge.reuse.ahead import ExpectedPrompt
from kedge.reuse.layout import known_segments
from kedge.reuse.plan import ReusePlan
from kedge.reuse.reasons import with_reasons
from kedge.reuse.runtime import ReadKV
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    Receipt,
    RequestId,
    Source,
    TenantId,
    TokenDelta,
    Tokens,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of tokens with positions still to run through the model, in ascending order."""

    key: RequestId
    namespace: Namespace
    tokens: list[int]
    table: SlotTable | None = None
    todo: list[int] = field(default_factory=list)
    """Positions to compute; the last one yields the next token."""
    last_pass: int = 0
    """Number of the last pass that it was part of."""
    sentinels: list[SentinelRows] = field(default_factory=list)
    """Translated KV of tokens that are computed as well, until the two are compared"""

    @classmethod
    def at(cls, tokens: list[int], slot: int) -> Self:
        """Return a sequence without a lease, in the slots from `slot` on: for checks and measurements."""
        table = SlotTable(torch.arange(slot, slot + len(tokens)))
        return cls(RequestId(""), Namespace(TenantId("")), tokens, table)

    @property
    def tenant(self) -> TenantId:
        """The tenant that the work belongs to."""
        return self.namespace.tenant

    @property
    def exact_limit(self) -> int:
        """Most leading tokens that may come from the cache: the last token is computed for its logits."""
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Most tokens that it can come to have."""
        return len(self.tokens)

    @property
    def admitted(self) -> bool:
        """Whether it holds blocks."""
        return self.table is not None

    @property
    def needs_all_logits(self) -> bool:
        """Whether the logits after every position are needed, not only those after the last one of a pass."""
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class BaseJob(Sequence):
    """A base prefill off the critical path: a short prefill whose KV is kept."""

    keep: Callable[[ReadKV], None]
    is_awaited: bool = False
    """Whether a request waits for it; then it counts as that request's own work."""
    wanted_by: RequestId | None = None
    """The request that it is for, which is learned from once this is done."""


@dataclass(slots=True, eq=False, kw_only=True)
class PreparedPrompt(ExpectedPrompt, Sequence):
    """A prompt that is assembled ahead, drafted once it holds blocks. `tokens` are the known ones; `todo` never has the
    last token of a whole prompt, which is left to the request.
    """

    plan: ReusePlan | None = None
    """Set once all of the prompt has been drafted."""
    stalled: bool = False
    """Whether it lacks room or waits for a load."""

    def __post_init__(self) -> None:
        self.learn(self.request)

    def learn(self, request: GenerateRequest) -> None:
        known = request.segments[: known_segments(request)]
        self.request, self.tokens, self.stalled = request, [t for segment in known for t in segment.tokens], False

    @property
    def exact_limit(self) -> int:
        return len(self.tokens) - (known_segments(self.request) == len(self.request.segments))

    @property
    def translates(self) -> bool:
        """Whether a part of it is translated."""
        return self.draft is not None and bool(self.draft.translations)

    @property
    def ready(self) -> int:
        """Number of leading tokens with KV."""
        if self.draft is None:
            return 0
        return self.todo[0] if self.todo else len(self.draft.sources) - (self.plan is not None)

    @property
    def exact(self) -> int:
        """Number of leading tokens whose KV is exact."""
        if self.draft is None:
            return 0
        sources = self.draft.sources
        return min(self.ready, sources.index(Source.TRANSLATED) if Source.TRANSLATED in sources else len(sources))


@dataclass(slots=True, eq=False, kw_only=True)
class RequestSequence(Sequence):
    """A request being served."""

    request: GenerateRequest
    stream: TokenStream
    sampler: Sampler
    text: TextStream
    max_tokens: int
    arrival: float = field(default_factory=time.monotonic)
    plan: ReusePlan | None = None
    preassembled: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the time to first token, in seconds."""
    load_asked: float | None = None
    """Time at which it began to wait for KV from the host, if it did."""
    gave_up: bool = False
    """Whether it has stopped waiting for KV from the host."""
    first_token: float | None = None
    logprobs: Logprobs = field(default_factory=Logprobs)
    preparation: PreparedPrompt | None = None
    """The part of its prompt that was assembled before it arrived."""
    finish: FinishReason | None = None
    """Set when the response is complete; of a forced one, one more pass follows, for its logits."""
    computed: int = 0
    """Leading tokens that have KV, once the response is complete."""
    awaits: tuple[RequestId, ...] | None = None
    """Base prefills that it waits for before its admission; None before the first check."""
    is_over: bool = False
    """Whether its stream has ended, with a completion or an error."""
    turn: Turn | None = None
    """Its place in its session; None where it reuses nothing."""
    is_check: bool = False
    """Whether nobody waits for it but the guard."""

    @property
    def exact_limit(self) -> int:
        if self.plan is not None:  # it was preempted
            return len(self.tokens) - 1 if self.request.exact_limit else 0
        return self.request.exact_limit

    @property
    def forced(self) -> ForcedAnswer | None:
        """The answer that it is forced to."""
        return self.sampler.draw if isinstance(self.sampler.draw, ForcedAnswer) else None

    @property
    def needs_all_logits(self) -> bool:
        if self.waits_for_first_token:
            return self.logprobs.of_prompt
        return self.forced is not None

    @property
    def response(self) -> list[int]:
        """The tokens of the answer so far."""
        return self.tokens[self.request.prompt_tokens :]

    @property
    def room(self) -> int:
        return self.request.prompt_tokens + self.max_tokens

    @property
    def waits_for_first_token(self) -> bool:
        """Whether the answer has not begun."""
        return self.first_token is None

    def tell(self, text: str, tokens: Tokens = (), completion: Completion | None = None) -> None:
        """Put a delta into the stream."""
        self.stream.put(TokenDelta(text, tokens, completion, *self.logprobs.news()))

    def finished(self, text: str, reason: FinishReason) -> None:
        """End the stream with the completion, and flush the text held back."""
        self.is_over = True
        now = time.monotonic()
        completion = Completion(
            request_id=self.request.request_id,
            text=self.text.text,
            tokens=tuple(self.response),
            finish_reason=reason,
            receipt=self.receipt(),
            ttft_ms=((self.first_token or now) - self.arrival) * 1e3,
            total_ms=(now - self.arrival) * 1e3,
            logprobs=tuple(self.logprobs.answer),
            prompt_logprobs=tuple(self.logprobs.prompt),
        )
        self.tell(text, (), completion)

    def failed(self, error: BaseException) -> None:
        """End the stream with an error."""
        self.is_over = True
        self.stream.put(error)

    def receipt(self) -> Receipt:
        """Return the receipt of the request as it stands."""
        spans, misses = (self.plan.spans, self.plan.misses) if self.plan else ((), ())
        parts = {name: seconds * 1e3 for name, seconds in self.parts.items()}
        reasons = with_reasons(self.request, spans, misses)
        return Receipt(self.request.request_id, self.request.reuse, spans, reasons, parts, self.preassembled)


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of the next pass: its positions, ascending."""

    sequence: Sequence
    positions: list[int]

    @property
    def logit_rows(self) -> int:
        """Number of positions, the last ones, that need logits."""
        return len(self.positions) if self.sequence.needs_all_logits else 1


def flatten(work: Many[Work], storage: PagedStorage) -> Batch:
    """Return one batch of all positions, with logits after the last position, or several, of each sequence."""
    device = storage.keys.device
    tables = [item.sequence.table for item in work if item.sequence.table is not None]
    tokens = [item.sequence.tokens[p] for item in work for p in item.positions]
    positions = torch.tensor([p for item in work for p in item.positions], device=device)
    slots = torch.cat([table.slots[torch.tensor(item.positions)] for item, table in zip(work, tables, strict=True)])
    slices: list[SequenceSlice] = []
    logits_rows: list[int] = []
    start = 0
    for item, table in zip(work, tables, strict=True):
        stop, context = start + len(item.positions), item.positions[-1] + 1
        one = SequenceSlice(
            start=start,
            stop=stop,
            runs=table.runs(0, context),
            context=context,
            positions=positions[start:stop],
            contiguous=item.positions[0] == context - len(item.positions),
        )
        slices.append(one)
        logits_rows += range(stop - item.logit_rows, stop)
        start = stop
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=positions,
        slots=slots.to(device),
        sequences=slices,
        logits_rows=torch.tensor(logits_rows, device=device),
        storage=storage,
    )
