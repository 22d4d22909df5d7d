"""The vocabulary: ids, segments, requests, receipts. Everything above imports this; it imports nothing of Kedge."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, NewType

AgentId = NewType("AgentId", str)
WorkflowId = NewType("WorkflowId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
ClientId = NewType("ClientId", str)
"""Who drives a run, among the clients of one tenant: two of them may use the same run ids."""
Tokens = tuple[int, ...]

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below are greedy."""
MIN_TOP_P: Final = 1e-6
"""Less than the likeliest of a million tokens has."""

_counter = itertools.count()
_SAMPLE = re.compile(r"(input|agent|condition)_(.*)@([0-9]{1,18})(?:#([0-9a-f]+))?", re.DOTALL)


class ValueKind(StrEnum):
    """What fills a placeholder: an input of the run, an agent's answer, or the result of an agent's tool."""

    INPUT = "input"
    AGENT = "agent"
    CONDITION = "condition"


class SampleId(NamedTuple):
    """Identity of one placeholder value inside a run.

    Its text form is `agent_solver@0`: kind, name and turn; with a digest `agent_solver@0#0a1b`.
    """

    kind: ValueKind
    of: str
    """Name of an input, or id of the agent that answered or called the tool."""
    turn: int = 0
    digest: str = ""
    """Hexadecimal digest of the tokens, for a value that a client gave: equal values are one sample."""

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Return the sample with this text form. Text of any other form is the name of an input."""
        found = _SAMPLE.fullmatch(text)
        if found is None:
            return cls(ValueKind.INPUT, text)
        kind, of, turn, digest = found.groups(default="")
        return cls(ValueKind(kind), of, int(turn), digest)

    def __str__(self) -> str:
        return f"{self.kind}_{self.of}@{self.turn}" + (f"#{self.digest}" if self.digest else "")


def tenant_of(namespace: TenantId) -> TenantId:
    """Whose a namespace is: a tenant's name, or that and a `/` and which part of the tenant's own it is."""
    return TenantId(namespace.partition("/")[0])


def is_owned(tenant: TenantId, namespace: TenantId) -> bool:
    """Whether a namespace is the tenant's."""
    return tenant_of(namespace) == tenant


def new_request_id() -> RequestId:
    """A request id that is unique in this process."""
    return RequestId(f"req-{next(_counter)}")


class ReuseMode(StrEnum):
    """How far a request may lean on KV that others computed."""

    OFF = "off"
    EXACT = "exact"
    TRANSLATE = "translate"


class Source(StrEnum):
    """Where the KV of a prompt token came from."""

    DEVICE = "device"
    HOST = "host"
    TRANSLATED = "translated"
    COMPUTED = "computed"


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of token ids of one prompt with its source, tokenized by itself.

    A prefix segment has `sample=None` and is named `p0`, `p1`, …; a placeholder segment is named by its placeholder.
    """

    tokens: Tokens
    name: str
    sample: SampleId | None = None
    lead_in: Tokens = ()
    """Context in which a placeholder's base KV is prefilled when no producer left one (BOS, user header, lead-in)."""
    stand_in: Tokens = ()
    """The placeholder's name as text, which takes its place when the template itself is prefilled."""
    trail: Tokens = ()
    """What the segment after a placeholder begins with wherever the workflow has it, so that base KV of its value with
    these tokens serves all agents."""
    held: Tokens = ()
    """What of that belongs to the value: `tokens` end with it, where they are known."""

    @property
    def is_placeholder(self) -> bool:
        return self.sample is not None

    @property
    def is_answer(self) -> bool:
        """Whether it is an agent's answer."""
        return self.sample is not None and self.sample.kind is ValueKind.AGENT

    @property
    def value(self) -> Tokens:
        """The tokens without what is `held`."""
        return self.tokens[: len(self.tokens) - len(self.held)] if self.tokens else ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy.

    Numbers that single precision cannot compute with are stored as what they come to: a temperature below
    `GREEDY_TEMPERATURE` as 0, a `top_p` below `MIN_TOP_P`, which leaves the likeliest token only, as that.
    """

    max_tokens: int = 256
    """With 0 the prompt is computed, and that is all."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, float) and 0 < self.temperature < GREEDY_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if isinstance(self.top_p, float) and 0 < self.top_p < MIN_TOP_P:
            object.__setattr__(self, "top_p", MIN_TOP_P)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One agent's call: its prompt in segments, how to sample and whose it is."""

    segments: tuple[Segment, ...]
    sampling: SamplingParams = SamplingParams()
    reuse: ReuseMode = ReuseMode.EXACT
    request_id: RequestId = field(default_factory=new_request_id)
    tenant: TenantId = TenantId("default")
    client: ClientId = ClientId("")
    workflow: WorkflowId = WorkflowId("")
    run: RunId = RunId("")
    agent: AgentId = AgentId("")
    produces: SampleId | None = None
    """The sample that this response will be, where other agents are going to read it."""
    trail: Tokens = ()
    """What comes right behind this response wherever it is read."""
    fixed: int | None = None
    """How many leading tokens are the same in every call of this agent; None: Kedge finds out. A hint: a number that
    cannot be is no hint."""
    logprobs: int | None = None
    """With every drawn token its log-probability, and those of so many of the likeliest tokens; None: neither."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The whole prompt is then computed, whatever of it is in the cache."""

    @property
    def tokens(self) -> Tokens:
        return tuple(itertools.chain.from_iterable(segment.tokens for segment in self.segments))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def exact_limit(self) -> int:
        """How many leading tokens may come from the cache; the last one is computed always, for the first logits."""
        computes_all = self.reuse is ReuseMode.OFF or self.prompt_logprobs is not None
        return 0 if computes_all else self.prompt_tokens - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions `[start, stop)` with one source."""

    start: int
    stop: int
    source: Source

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a segment did not come from somewhere better."""

    segment: str
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Per request: which prompt tokens came from where, and why not from somewhere better."""

    request_id: RequestId
    mode: ReuseMode
    spans: tuple[Span, ...]
    misses: tuple[Miss, ...] = ()
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds from arrival to first token by part: queue, load (where it waited for KV from the host), match,
    assemble, compute (or last_token), other."""
    preassembled: int = 0
    """Leading prompt tokens, of any source, whose KV was ready before the request arrived."""

    def tokens(self, *sources: Source) -> int:
        """Prompt tokens that came from any of `sources`."""
        return sum(len(span) for span in self.spans if span.source in sources)

    @property
    def exact(self) -> int:
        return self.tokens(Source.DEVICE, Source.HOST)

    @property
    def translated(self) -> int:
        return self.tokens(Source.TRANSLATED)

    @property
    def computed(self) -> int:
        return self.tokens(Source.COMPUTED)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural) by the model's own distribution: before temperature and top-p."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first: as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished (or cancelled) response."""

    request_id: RequestId
    text: str
    tokens: Tokens
    finish_reason: FinishReason
    receipt: Receipt
    ttft_ms: float
    """Milliseconds from the arrival of the request to its first token, everything included."""
    total_ms: float
    logprobs: tuple[TokenLogprob, ...] = ()
    """Where they were asked for, one for each of `tokens`, and one more where a token was drawn that ended the answer
    and is not in it."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Where they were asked for, one for each token of the prompt; None for the first, which nothing comes before."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One streamed step: the text that became certain, its token ids, and the completion with the last one."""

    text: str
    tokens: Tokens
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the completion's, those that this step brought."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """All of the completion's, with the first step."""
