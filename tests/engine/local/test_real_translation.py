"""Translated KV of a real team against a twin: base KV, rotations and all that is computed by Transformers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kedge.anchors.offsets import split_rows
from kedge.anchors.translator import Translation
from kedge.bench.fidelity import DENSELY
from kedge.bench.probe import ProbeResult, Recorder, method_named
from kedge.engine.local.build import EngineParts
from kedge.engine.local.engine import LocalEngine
from kedge.guard import GuardOrders
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.reuse.layout import Placed, layout, shared_text, template_of
from kedge.runner.run import run
from kedge.settings import PlannerConstants
from kedge.types import GenerateRequest, RequestId, ReuseMode, SampleId, Source, Tokens
from kedge.workloads import real
from kedge.workloads.base import QUESTION
from tests.real import RealModel
from tests.transformers_over_kv import Reference

ANSWER = 10
"""Tokens of an agent's answer"""
SHORT = PlannerConstants().recompute_short
"""Segments of at most so many tokens are not left for later readers"""
WIDE = "token:min_anchors=2:max_error=9:weak_error=9"
"""Offsets are added from the third question on, whatever they are worth"""


@dataclass(frozen=True)
class Written:
    """What a plan writes from a position on: base KV and, unless it is only moved, the offsets added to it."""

    start: int
    tokens: int
    offsets: KVSegment | None


class Noting:
    """Notes what an engine writes for each request, and the offsets that the anchor store estimates for it."""

    def __init__(self, engine: LocalEngine) -> None:
        self.written: defaultdict[RequestId, list[Written]] = defaultdict(list)
        engine.query(self._watch)

    def _watch(self, parts: EngineParts) -> None:
        write = parts.write

        def noting(request: GenerateRequest, table: SlotTable, items: Sequence[Translation]) -> None:
            self.written[request.request_id] = [
                Written(
                    one.start,
                    one.tokens,
                    split_rows(one.table.blend(one.blend).float(), one.base) if one.blend.adds else None,
                )
                for one in items
            ]
            write(request, table, items)

        parts.write = noting


class TeamTwin:
    """The KV of a team's prompts, one after the other, where Kedge says which positions it has translated."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._answers: dict[SampleId, KVSegment] = {}
        self._texts: dict[Tokens, KVSegment] = {}

    def served(self, request: GenerateRequest, answer: Tokens, written: Sequence[Written], rows: set[int]) -> KVSegment:
        """Return the prompt's KV, those `rows` computed and the others as they are `written`, and remember what others
        read of it and of the answer.
        """
        placed, size, whole = layout(request), request.prompt_tokens, request.tokens + answer
        kv = self._reference.empty(len(whole))
        for one in written:
            segment = next(part for part in placed if part.start <= one.start < part.stop)
            where, base = slice(one.start, one.start + one.tokens), self._base(request, placed, segment)
            base = base.slice(one.start - segment.start, one.start - segment.start + one.tokens)
            kv.keys[:, where], kv.values[:, where] = base.keys, base.values
            if one.offsets:
                kv.keys[1:, where] += one.offsets.keys
                kv.values[1:, where] += one.offsets.values
        holes = *(range(at, at + 1) for at in sorted(rows)), range(size, len(whole))
        kv, _ = self._reference.compute(whole, kv, holes)
        moved = [one.start for one in written if one.offsets is None]
        for segment in placed[2:-1]:  # what was moved alone has not read what is before it here
            if len(segment) > SHORT and not any(segment.start <= at < segment.stop for at in moved):
                self._texts[shared_text(request, segment)] = kv.slice(segment.start, segment.stop)
        if request.produces:
            self._answers[request.produces] = kv.slice(size)
        return kv.slice(0, size)

    def _base(self, request: GenerateRequest, placed: Sequence[Placed], one: Placed) -> KVSegment:
        segment = one.segment
        if one.index > 1 and (left := self._texts.get(shared_text(request, one))):  # as its last reader had it
            return left
        if segment.is_answer:
            return self._answers[segment.sample].slice(0, len(one))
        if segment.is_placeholder:
            return self._reference.dense(segment.base_context + segment.tokens)[0].slice(len(segment.base_context))
        before = (part.segment for part in placed[: one.index])
        start = sum(len(part.placeholder_text if part.is_placeholder else part.tokens) for part in before)
        return self._reference.dense(template_of(request).tokens)[0].slice(start, start + len(one))


class Told(Recorder):
    """A recorder with orders for every request."""

    def __init__(self, engine: LocalEngine, orders: GuardOrders) -> None:
        super().__init__(engine, rows=1, kv=True)
        self._orders = orders

    def submit(self, request: GenerateRequest) -> Any:
        return super().submit(replace(request, guard=self._orders))


@contextmanager
def serving(smollm2: RealModel, method: str) -> Iterator[tuple[Callable[..., list[ProbeResult]], Noting]]:
    """Let a team ask the questions of `reading`, of an engine with a method: the results of one, in speaking order."""
    own = {"dtype": "float32", "device": "cpu", "kv_memory": "128 blocks"}
    team, questions = real.load("reading")
    with method_named(method).open(smollm2.loaded, **own) as engine:

        def ask(number: int, orders: GuardOrders = GuardOrders()) -> list[ProbeResult]:  # noqa: B008 (it is frozen)
            recorder = Told(engine, orders)
            run(
                recorder,
                team.workflow().shortened(ANSWER),
                {QUESTION: questions[number].text},
                reuse=ReuseMode.TRANSLATE,
            )
            engine.wait_idle()
            return [one.result() for one in recorder.pending]

        yield ask, Noting(engine)


@pytest.mark.parametrize(
    ("method", "taught"), [("kedge", 0), pytest.param(WIDE, 3, marks=pytest.mark.slow)], ids=["moved", "by-anchors"]
)
@torch.inference_mode()
def test_translated_kv_is_that_of_a_plain_twin(smollm2: RealModel, method: str, taught: int) -> None:
    with serving(smollm2, method) as (ask, noting):
        for number in range(taught):
            ask(number, DENSELY)
        results = ask(taught)
        requests = [one.request for one in results]
        written = [noting.written.get(one.request_id, []) for one in requests]
    twin = TeamTwin(Reference(smollm2.oracle))
    compared = with_offsets = 0
    for request, result, plan in zip(requests, results, written, strict=True):
        spans = result.completion.receipt.spans
        translated = {at for span in spans if span.source is Source.TRANSLATED for at in range(span.start, span.stop)}
        rows = set(range(request.prompt_tokens)) - translated
        expected = twin.served(request, result.completion.tokens, plan, rows)
        for ours, theirs in ((result.kv.keys, expected.keys), (result.kv.values, expected.values)):
            wrong = (ours - theirs).flatten(2).norm(dim=2) / theirs.flatten(2).norm(dim=2)
            assert float(wrong.max()) < 1e-3, (
                f"{request.agent}: layer, position {divmod(int(wrong.argmax()), wrong.shape[1])}"
            )
        compared += len(translated)
        with_offsets += sum(one.tokens for one in plan if one.offsets)
    assert compared > 250 and (with_offsets > 200) == (taught > 0)
