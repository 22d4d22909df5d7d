"""The vocabulary: ids, segments, requests, receipts. Everything else imports this; of Kedge the guard's words only."""

import hashlib
import itertools
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, NamedTuple, NewType, Self

from kedge.guard import EVERYTHING, FidelityNote, GuardNote, GuardOrders

AgentId = NewType("AgentId", str)
WorkflowId = NewType("WorkflowId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
ClientId = NewType("ClientId", str)
"""A client of a tenant; two clients may use the same run ids."""
Tokens = tuple[int, ...]

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below are greedy."""
MIN_TOP_P: Final = 1e-6
"""Less than the probability of the likeliest of a million tokens."""

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
    def parse(cls, text: str) -> Self:
        """Return the sample with this text form. Text of any other form is the name of an input."""
        found = _SAMPLE.fullmatch(text)
        if found is None:
            return cls(ValueKind.INPUT, text)
        kind, of, turn, digest = found.groups(default="")
        return cls(ValueKind(kind), of, int(turn), digest)

    def __str__(self) -> str:
        return f"{self.kind}_{self.of}@{self.turn}" + (f"#{self.digest}" if self.digest else "")


class Namespace(NamedTuple):
    """What KV, anchors and forecasts are kept apart by: `tenant`, or `tenant/partition`. A tenant's name has no `/`."""

    tenant: TenantId
    partition: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the namespace with this text form."""
        tenant, _, partition = text.partition("/")
        return cls(TenantId(tenant), partition)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.partition}" if self.partition else self.tenant


class RunKey(NamedTuple):
    """One run of one client."""

    namespace: Namespace
    client_id: str
    run_id: RunId

    @property
    def name(self) -> str:
        """The run's name among those of its namespace, for people to read: `run`, or `client/run`."""
        return f"{self.client_id}/{self.run_id}" if self.client_id else self.run_id


class WorkflowAgent(NamedTuple):
    """One agent in all runs of its workflow."""

    namespace: Namespace
    workflow: WorkflowId
    agent: AgentId


class AgentKey(NamedTuple):
    """One agent in one run of one client: the key of a label in the cache."""

    namespace: Namespace
    client_id: str
    run_id: RunId
    agent: AgentId

    @property
    def run(self) -> RunKey:
        """The run that the agent is in."""
        return RunKey(*self[:3])


def is_owned(tenant: TenantId, namespace: Namespace) -> bool:
    """Return whether a namespace is the tenant's."""
    return namespace.tenant == tenant


def new_request_id() -> RequestId:
    """Return a request id that is unique in this process."""
    return RequestId(f"req-{next(_counter)}")


def take_value(of: object, name: str, kind: type[StrEnum]) -> None:
    """Let a field of a frozen dataclass be given as a member of `kind` or its value; anything else is left as it is."""
    if type(value := getattr(of, name)) is not kind:
        object.__setattr__(of, name, next((member for member in kind if member == value), value))


class ReuseMode(StrEnum):
    """How far a request may reuse KV of others: not, exact prefixes, or translated segments too."""

    OFF = "off"
    EXACT = "exact"
    TRANSLATE = "translate"


class Source(StrEnum):
    """Origin of a prompt token's KV."""

    DEVICE = "device"
    HOST = "host"
    TRANSLATED = "translated"
    COMPUTED = "computed"


class FinishReason(StrEnum):
    """Reason why a response ended."""

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
    base_context: Tokens = ()
    """Context in which a placeholder's base KV is prefilled when no producer left one."""
    placeholder_text: Tokens = ()
    """The placeholder's name as text: takes its place when the template itself is prefilled."""
    in_context: bool = False
    """Whether `base_context` is how the prompt of a reader begins, up to the value; else: BOS, user header, lead-in."""

    @property
    def is_placeholder(self) -> bool:
        """Whether it is the value of a placeholder."""
        return self.sample is not None

    @property
    def is_answer(self) -> bool:
        """Whether it is an agent's answer."""
        return self.sample is not None and self.sample.kind is ValueKind.AGENT


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; `temperature=0` is greedy.

    Numbers too small for single precision are stored by their effect: a temperature below `GREEDY_TEMPERATURE` as 0, a
    `top_p` below `MIN_TOP_P`, which leaves the likeliest token only, as `MIN_TOP_P`.
    """

    max_tokens: int = 256
    """With 0 only the prompt is computed."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    """What the answer conforms to: a grammar in llguidance's variant of Lark, as `start: %json {"type": "object"}`."""
    top_k: int = 0
    """How many of the likeliest tokens are drawn from; 0: all."""
    min_p: float = 0.0
    """How likely a token must be that is drawn, as a share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """What logits of tokens in the prompt and the answer are divided by, or multiplied with where they are negative."""
    presence_penalty: float = 0.0
    """What is taken off logits of tokens in the answer."""
    frequency_penalty: float = 0.0
    """The same for each time that they are in it."""

    def __post_init__(self) -> None:
        if isinstance(self.temperature, float) and 0 < self.temperature < GREEDY_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if isinstance(self.top_p, float) and 0 < self.top_p < MIN_TOP_P:
            object.__setattr__(self, "top_p", MIN_TOP_P)

    @staticmethod
    def of_model(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a model's generation config sets."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: config[name] for name in names if config.get(name) is not None}
        return {**found, "top_k": max(0, found["top_k"])} if "top_k" in found else found


@dataclass(frozen=True, slots=True)
class TurnHints:
    """What a client says of the session whose turn a request is. Advisory, and all optional."""

    session: str = ""
    """Id of the session, the same for all its requests; "": it is found by what its prompts begin with."""
    parent: str = ""
    """Session that started this one, as an agent does a sub-agent."""
    returns_in: float | None = None
    """Seconds from the answer to the session's next request."""
    is_last: bool = False
    """Whether the session ends with this request."""
    keep_for: float | None = None
    """Seconds from the answer for which the session's KV is to be kept; 0: it may go first."""
    expects: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Other sessions of the same namespace -> seconds until they are needed; infinite: not any more."""


@dataclass(frozen=True)
class GenerateRequest:
    """One agent's call: its prompt in segments, how to sample, and the tenant, run and agent that it belongs to."""

    segments: tuple[Segment, ...]
    sampling: SamplingParams = SamplingParams()
    reuse: ReuseMode = ReuseMode.EXACT
    request_id: RequestId = field(default_factory=new_request_id)
    tenant: TenantId = TenantId("default")
    partition: str = ""
    """Which part of the tenant's data it shares, see `Namespace`."""
    client: ClientId = ClientId("")
    workflow: WorkflowId = WorkflowId("")
    run: RunId = RunId("")
    agent: AgentId = AgentId("")
    produces: SampleId | None = None
    """The sample of this response, where other agents are going to read it."""
    fixed: int | None = None
    """How many leading tokens are the same in every call of this agent; None: Kedge finds out. Advisory."""
    turn: TurnHints = TurnHints()
    is_plain: bool = False
    """Whether its client left open what its prompt is made of and how far KV is reused, so that Kedge may find out."""
    tool_mark: str = ""
    """Text that an answer with a tool call has in it, where that is known: it says what the session waits for next."""
    guard: GuardOrders = GuardOrders()
    logprobs: int | None = None
    """Return every drawn token's log-probability, and this many of the likeliest tokens'; None: neither."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The whole prompt is then computed, whatever is in the cache."""
    forced: Tokens = ()
    """The answer that it gives whatever the model says, in one pass, for its log-probabilities (teacher forcing). vLLM
    draws an answer all the same."""

    def __post_init__(self) -> None:
        take_value(self, "reuse", ReuseMode)

    @property
    def namespace(self) -> Namespace:
        """Where its KV, its anchors and its forecasts are kept."""
        return Namespace(self.tenant, self.partition)

    @property
    def run_key(self) -> RunKey:
        """The run that it belongs to."""
        return RunKey(self.namespace, self.client, self.run)

    @property
    def agent_key(self) -> AgentKey:
        """The agent that asks, in its run."""
        return AgentKey(*self.run_key, self.agent)

    @property
    def workflow_agent(self) -> WorkflowAgent:
        """The agent that asks, in whichever run."""
        return WorkflowAgent(self.namespace, self.workflow, self.agent)

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens of the prompt."""
        return tuple(itertools.chain.from_iterable(segment.tokens for segment in self.segments))

    @cached_property
    def template_digest(self) -> str:
        """Digest of the template's wording and of its values' base contexts."""
        digest = hashlib.blake2b(digest_size=8)
        for segment in self.segments:
            digest.update(segment.name.encode())
            fixed = segment.base_context if segment.is_placeholder else segment.tokens
            for at in range(0, len(fixed), 255):  # from 2,047 bytes on hashlib lets other threads go first, for 5 ms
                digest.update(array("q", fixed[at : at + 255]))
        return digest.hexdigest()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def fixed_length(self) -> int | None:
        """Number of leading tokens stated to be fixed: `fixed`, else a first prefix segment before others."""
        if self.fixed is not None and 0 <= self.fixed <= self.prompt_tokens:
            return self.fixed
        first, *others = self.segments
        return len(first.tokens) if others and not first.is_placeholder else None

    @property
    def wants_translation(self) -> bool:
        """Whether its client lets values in it be translated. One that does not concerns neither guard nor planner."""
        return self.reuse is ReuseMode.TRANSLATE and any(one.is_placeholder for one in self.segments)

    @property
    def exact_limit(self) -> int:
        """How many leading tokens may come from the cache: never the last one, which gives the first logits."""
        if self.reuse is ReuseMode.OFF or self.prompt_logprobs is not None:
            return 0
        before = itertools.takewhile(
            lambda one: not (one.is_placeholder and self.guard.recheck in (one.name, EVERYTHING)), self.segments
        )
        return min(self.prompt_tokens - 1, sum(len(one.tokens) for one in before))


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
    """A segment that did not come from a better source, and the reason."""

    segment: str
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """Per request: the source of every prompt token, and the reasons why it was not a better one."""

    request_id: RequestId
    mode: ReuseMode
    spans: tuple[Span, ...]
    misses: tuple[Miss, ...] = ()
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds to the first token by part: queue, load (from host), match, assemble, compute/last_token, other."""
    preassembled: int = 0
    """Leading prompt tokens, of any source, whose KV was ready before the request arrived."""
    guard: tuple[GuardNote, ...] = ()
    fidelity: FidelityNote | None = None

    def tokens(self, *sources: Source) -> int:
        """Return the number of prompt tokens that came from any of `sources`."""
        return sum(len(span) for span in self.spans if span.source in sources)

    @property
    def exact(self) -> int:
        """Prompt tokens from the cache."""
        return self.tokens(Source.DEVICE, Source.HOST)

    @property
    def translated(self) -> int:
        """Prompt tokens whose KV was translated."""
        return self.tokens(Source.TRANSLATED)

    @property
    def computed(self) -> int:
        """Prompt tokens that ran through the model."""
        return self.tokens(Source.COMPUTED)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural) by the model's own distribution: before temperature and top-p."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, likeliest first: as many as were requested."""


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
    """If requested, one for each of `tokens`, and one more for a drawn token that ended the answer and is not in it."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """If requested, one for each token of the prompt; None for the first, which nothing precedes."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One streamed step: the text that became certain, its token ids, and the completion with the last one."""

    text: str
    tokens: Tokens
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the completion's that belong to this step."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """All of the completion's, with the first step."""
