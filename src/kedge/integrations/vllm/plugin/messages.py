"""What scheduler and workers tell each other, once per step: plain data that pickles."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kedge.cache import Copied, Copy
from kedge.types import GenerateRequest, Miss, RequestId, RunKey, Tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """May this prompt be translated from `exact` tokens on? Answered by a `Verdict`."""

    request: GenerateRequest
    exact: int


@dataclass(frozen=True, slots=True)
class Write:
    """Translate positions [start, stop) of a prompt into these blocks, before the pass of this step."""

    request_id: RequestId
    blocks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Capture:
    """The KV of a prompt, and of a response that follows it, is complete once this step's pass is over."""

    request: GenerateRequest
    blocks: tuple[int, ...]
    response: Tokens = ()
    """Generated tokens whose KV is there"""
    exact: bool = True
    """Whether the prompt was computed as if nothing could be translated"""
    capture_id: int | None = None
    """Set where the blocks are held until the capture is reported."""


@dataclass
class Orders(KVConnectorMetadata):
    """Scheduler to workers."""

    scheduled: int = 0
    """Tokens of this step's pass"""
    copies: tuple[Copy, ...] = ()
    asks: tuple[Ask, ...] = ()
    writes: tuple[Write, ...] = ()
    captures: tuple[Capture, ...] = ()
    dropped: tuple[RequestId, ...] = ()
    """Requests that will not be translated, whatever the verdict was."""
    ended_runs: tuple[RunKey, ...] = ()
    """Runs of which what their agents shared may be forgotten."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many leading tokens of a prompt are there without computing: those that are exact, or translatable."""

    tokens: int
    misses: tuple[Miss, ...] = ()
    needs: tuple[Tokens, ...] = ()
    """Prompts whose prefill would give base KV that is missing"""

    def merged(self, other: Verdict) -> Verdict:
        """What two ranks agree on."""
        less = self if self.tokens <= other.tokens else other
        return Verdict(less.tokens, less.misses, self.needs or other.needs)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a copy on some ranks."""

    ranks: int
    ok: bool
    seconds: float

    @classmethod
    def of(cls, copied: Copied) -> Ended:
        return cls(1, copied.ok, copied.seconds)

    def merged(self, other: Ended) -> Ended:
        return Ended(self.ranks + other.ranks, self.ok and other.ok, max(self.seconds, other.seconds))


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """Workers to scheduler. The ranks' reports of one step are merged into one."""

    copies: dict[int, Ended] = field(default_factory=dict)
    verdicts: dict[RequestId, Verdict] = field(default_factory=dict)
    """All ranks judge in the same step, so merged they are final"""
    captured: dict[int, int] = field(default_factory=dict)
    """Capture -> how many ranks have read the blocks"""
    computed: tuple[int, float] = (0, 0.0)
    """Tokens of a pass that was long enough to tell something, and its seconds"""
    learning: bool = False
    """Whether a prompt is being learned from"""

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not (self.copies or self.verdicts or self.captured or self.computed[0] or self.learning)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        """Takes in another rank's reports."""
        assert isinstance(other, Reports)
        for copy_id, ended in other.copies.items():
            mine = self.copies.get(copy_id)
            self.copies[copy_id] = mine.merged(ended) if mine else ended
        for request_id, verdict in other.verdicts.items():
            self.verdicts[request_id] = self.verdicts.get(request_id, verdict).merged(verdict)
        for capture_id, ranks in other.captured.items():
            self.captured[capture_id] = self.captured.get(capture_id, 0) + ranks
        self.learning = self.learning or other.learning
        self.computed = max(self.computed, other.computed, key=lambda pass_: pass_[1])
        return self
