"""A request as all parts of the scheduler's half follow it, from its arrival to its receipt: one record for each.

And the messages between the scheduler and the workers, one each way per step: plain data that pickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kedge.cache import Copied, Copy
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.policies.sessions import SessionKey, Turn
from kedge.reuse.holes import Holes, between, clipped, joined, merged_to
from kedge.types import GenerateRequest, Miss, Receipt, RequestId, RunKey, Source, Span, Tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kedge.integrations.vllm.plugin.host_tier import BlockTransfer

MAX_LANES = 32
"""Lanes of one request, each of which takes a row of the batch; of more holes the nearest are joined."""
NEAR = 4
"""Holes with fewer positions than this between them are computed as one: a lane costs more than these positions."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request that waits or runs."""

    request: Request
    hinted: HintedRequest | None = None
    """With what its hints say, or what was found out about it"""
    turn: Turn | None = None
    """As the turn of a session"""
    device: int = 0
    """Leading tokens whose KV was on the device when vLLM last looked"""
    is_admitted: bool = False

    # loads from the host
    may_load: bool = False
    is_ahead: bool = False
    """Whether a load was ordered before vLLM looked at it"""
    loaded: range = range(0)
    """Tokens of its prompt that it waited for while they were loaded"""
    awaited: BlockTransfer | None = None
    """The last load under way that it has waited for"""
    waiting_since: float | None = None
    """Time from which on it has waited for a load under way, or for room for one as the next to be served"""
    computes: bool = False
    """Whether no further load is ordered for it: it computes what it lacks then"""

    # translation
    refusal: str | None = None
    """Why it is not translated"""
    exact: int = 0
    """Leading tokens that were exact at the last query"""
    is_pending: bool = False
    """Whether a query has not been answered yet"""
    verdict: TranslationVerdict | None = None
    awaits: tuple[Tokens, ...] | None = None
    """Prompts whose prefill it waits for; None: it has not been asked yet whether it should"""
    holes: Holes = ()
    """Positions to be computed by the verdict, until the request is admitted"""
    refusals: int = 0
    """Steps in which it was held back for want of room for its lanes"""
    preemptions: int = 0
    planned: Holes = ()
    """Positions that are computed if it is admitted now; later, those with which it was admitted"""
    written: Holes = ()
    """Positions between them: some of its blocks hold translated KV there, or will"""
    translated: Holes = ()
    """Positions whose KV was translated when it was admitted"""
    captured: bool = False

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.request.request_id)

    @property
    def asked(self) -> GenerateRequest:
        """What is asked for, of a request with hints."""
        assert self.hinted is not None
        return self.hinted.request

    @property
    def session(self) -> SessionKey | None:
        """The session whose turn it is, to which loaded blocks belong."""
        return self.turn.session if self.turn else None

    @property
    def is_asked_about(self) -> bool:
        """Whether the workers are asked what of it can be translated."""
        return self.hinted is not None and self.asked.wants_translation and self.refusal is None

    def take_verdict(self, verdict: TranslationVerdict) -> None:
        """Take the workers' verdict; the holes are merged to what `MAX_LANES` lanes can compute."""
        self.verdict, self.is_pending, self.refusals = verdict, False, 0
        self.holes = merged_to(joined(clipped(verdict.holes, self.exact), NEAR), MAX_LANES + 1)

    def lose(self, computed: int) -> None:
        """Compute what was exact behind the first `computed` tokens: it was evicted since."""
        self.holes = merged_to(joined((range(computed, self.exact), *self.holes), NEAR), MAX_LANES + 1)
        self.exact = computed

    def withdraw(self) -> None:
        """Forget the verdict."""
        self.verdict, self.holes = None, ()

    def plan(self, holes: Holes, computed: int) -> int:
        """Plan to compute `holes`, and to translate what is between them behind the first `computed` tokens.

        Returns how many tokens then need no computing by the request itself: those before the last hole.
        """
        self.planned = clipped(holes, computed)
        self.written = between(self.planned, computed)
        return self.planned[-1].start - computed if self.written else 0

    def receipt(self) -> Receipt:
        """Return the receipt of a request with hints."""
        asked, misses, ready = self.asked, tuple[Miss, ...](), 0
        if asked.wants_translation and self.refusal:
            misses = (Miss("*", self.refusal),)
        elif asked.wants_translation and self.verdict:
            misses, ready = self.verdict.misses, self.verdict.ready if self.translated else 0
        return Receipt(asked.request_id, asked.reuse, self._spans(), misses, preassembled=ready)

    def _spans(self) -> tuple[Span, ...]:
        """Return which of the prompt's tokens came from where, in O(spans)."""
        total, host = self.request.num_prompt_tokens, self.loaded
        device = min(self.device, total)
        cuts = {0, device, total, *(edge for run in (host, *self.translated) for edge in (run.start, run.stop))}

        def source(at: int) -> Source:
            if any(at in run for run in self.translated):
                return Source.TRANSLATED
            return Source.COMPUTED if at >= device else Source.HOST if at in host else Source.DEVICE

        spans: list[Span] = []
        for start, stop in pairwise(sorted(edge for edge in cuts if 0 <= edge <= total)):
            kind = source(start)
            begun = spans.pop().start if spans and spans[-1].source is kind else start
            spans.append(Span(begun, stop, kind))
        return tuple(spans)


def receipt_to_dict(receipt: Receipt, actions: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """Return a receipt as JSON data. `actions` is what became of those that the client asked for, which few do."""
    data: dict[str, Any] = {
        "mode": receipt.mode.value,
        "tokens": {source.value: receipt.tokens(source) for source in Source},
        "spans": [[span.start, span.stop, span.source.value] for span in receipt.spans],
        "preassembled": receipt.preassembled,
        "misses": [{"segment": miss.segment, "reason": miss.reason} for miss in receipt.misses],
    }
    return {**data, "actions": list(actions)} if actions else data


# messages between the scheduler and the workers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TranslationQuery:
    """A question to the workers, answered by a `TranslationVerdict`: may this prompt be translated from `exact` on?"""

    request: GenerateRequest
    exact: int
    may_wait: bool = False
    """Whether the request may wait for base KV"""
    has_waited: bool = False
    """Whether it was asked about before, and has waited for base KV since"""
    delays: bool = True
    """Whether the request begins a step later for it"""


@dataclass(frozen=True, slots=True)
class TranslationWrite:
    """An order to write the translated KV of some positions of a prompt into its blocks, before this step's pass."""

    request_id: RequestId
    blocks: tuple[int, ...]
    spans: Holes
    """The positions: those between the holes that the pass computes"""


@dataclass(frozen=True, slots=True)
class Capture:
    """An order to read the KV of a prompt, or of a response that follows it, after the pass of this step."""

    request: GenerateRequest
    blocks: tuple[int, ...]
    capture_id: int
    """By which the ranks report that they have read the blocks, which the scheduler holds until then"""
    response: Tokens = ()
    """Generated tokens"""
    known: int = 0
    """Leading ones of them whose KV is there: those that were run, so the last one is seldom among them"""
    reasoning: int = 0
    """How many tokens of reasoning were generated before them"""
    is_translated: bool = False
    """Whether some of its blocks hold, or should hold, translated KV: without its plan nothing is learned from them"""


@dataclass
class Orders(KVConnectorMetadata):
    """The scheduler's message to the workers."""

    scheduled: int = 0
    """Number of tokens in this step's pass"""
    rows: int = 0
    """Number of requests and lanes in it"""
    prefills: bool = False
    """Whether a part of a request's prompt is computed in it"""
    copies: tuple[Copy, ...] = ()
    queries: tuple[TranslationQuery, ...] = ()
    writes: tuple[TranslationWrite, ...] = ()
    captures: tuple[Capture, ...] = ()
    expected: tuple[GenerateRequest, ...] = ()
    """Prompts of agents that run next, as far as they are known"""
    dropped: tuple[RequestId, ...] = ()
    """Requests whose verdicts will not be used"""
    ended_runs: tuple[RunKey, ...] = ()
    """Runs whose agents' shared KV may be evicted"""
    forgets: bool = False
    """Whether all that was learned and planned is to be forgotten, before the rest"""

    @property
    def is_quiet(self) -> bool:
        """Whether they are about nothing but the pass: so they are in most steps."""
        found = self.copies or self.queries or self.writes or self.captures
        return not (found or self.expected or self.dropped or self.ended_runs or self.forgets)


@dataclass(frozen=True, slots=True)
class TranslationVerdict:
    """What of a prompt has to be computed; everything else is exact or can be translated."""

    holes: Holes
    """Positions to be computed. The last hole ends with the prompt; a single one from 0 on is a dense prefill."""
    misses: tuple[Miss, ...] = ()
    needs: tuple[Tokens, ...] = ()
    """Prompts whose prefill would give missing base KV"""
    awaits: tuple[Tokens, ...] = ()
    """Prompts whose prefill gives base KV that pays before the request itself; then it is asked about again"""
    ready: int = 0
    """Leading tokens that were looked up before the request arrived"""

    @property
    def tokens(self) -> int:
        """Number of tokens to be computed."""
        return sum(map(len, self.holes))

    def merged(self, other: TranslationVerdict) -> TranslationVerdict:
        """Return what holds on both ranks: what either of them has to compute is computed."""
        misses = max(self, other, key=lambda one: one.tokens).misses
        holes = joined((*self.holes, *other.holes))
        ready = min(self.ready, other.ready)
        return TranslationVerdict(holes, misses, self.needs or other.needs, self.awaits or other.awaits, ready)


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler. The reports of all ranks for one step are merged into one."""

    copies: list[Copied] = field(default_factory=list)
    """Their ends, on each rank"""
    verdicts: dict[RequestId, TranslationVerdict] = field(default_factory=dict)
    """All ranks answer a query in the same step, so the merged verdict is final"""
    captured: dict[int, int] = field(default_factory=dict)
    """Capture id -> number of ranks that have read the blocks"""
    computed: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of a pass that was long enough for a measurement"""
    learning: bool = False
    """Whether a captured prompt is still being learned from"""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        found = self.copies or self.verdicts or self.captured or self.computed[0]
        return not (found or self.learning)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Reports:
        """Merge another rank's reports into these."""
        assert isinstance(other, Reports)
        self.copies += other.copies
        for request_id, verdict in other.verdicts.items():
            self.verdicts[request_id] = self.verdicts.get(request_id, verdict).merged(verdict)
        for capture_id, ranks in other.captured.items():
            self.captured[capture_id] = self.captured.get(capture_id, 0) + ranks
        self.learning = self.learning or other.learning
        self.computed = max(self.computed, other.computed, key=lambda pass_: pass_[1])
        return self
