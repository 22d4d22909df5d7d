from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lab.comparison import consistency, shuffled
from kedge.bench.fidelity import Seen
from kedge.bench.probe import ProbeResult, compare_logits
from kedge.types import GenerateRequest, SampleId, Segment


def logits(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_kl_and_agreement_by_hand() -> None:
    dense = logits([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]])
    other = logits([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])
    kl, top1 = compare_logits(dense, other)
    assert kl == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2)
    assert top1 == 0.5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 30))
def test_kl_is_that_of_torch_and_never_negative(seed: int, scale: float) -> None:
    one, two = scale * torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(seed))
    wanted = torch.nn.functional.kl_div(two.log_softmax(1), one.log_softmax(1), reduction="batchmean", log_target=True)
    assert compare_logits(one, two)[0] == pytest.approx(float(wanted), rel=1e-3, abs=1e-5)
    assert compare_logits(one, two)[0] >= 0
    assert compare_logits(one, one) == (0, 1)


def request(answers: list[tuple[int, ...]]) -> GenerateRequest:
    segments = [Segment((1, 2), "p0"), Segment((3,), "user_question", SampleId.parse("q"))]
    for i, answer in enumerate(answers):
        segments += [Segment((9,), f"p{i + 1}"), Segment(answer, f"agent_{i}_current", SampleId.parse(f"agent_{i}@0"))]
    segments += [Segment((8, 8), "condition_0_current", SampleId.parse("c")), Segment((7,), "p9")]
    return GenerateRequest(tuple(segments))


def sight(rows: int, seed: int) -> ProbeResult:
    drawn = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    return ProbeResult(request([]), None, drawn, None)  # type: ignore[arg-type]


def test_as_many_rows_as_both_have() -> None:
    dense, other = sight(5, 0), sight(3, 1)
    assert Seen.of(0, dense.logits, other.logits).kl == compare_logits(dense.logits[:3], other.logits)[0]


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(10, 99), max_size=4).map(tuple), max_size=5), st.integers(0, 999))
def test_shuffling_moves_answers_and_nothing_else(answers: list[tuple[int, ...]], seed: int) -> None:
    before = request(answers)
    after = shuffled(before, Random(seed))
    assert [s.name for s in after.segments] == [s.name for s in before.segments]
    moved = [(s.tokens, s.sample) for s in after.segments if s.name.startswith("agent_")]
    assert sorted(moved) == sorted((s.tokens, s.sample) for s in before.segments if s.name.startswith("agent_"))
    rest = [s for s in after.segments if not s.name.startswith("agent_")]
    assert rest == [s for s in before.segments if not s.name.startswith("agent_")]


def test_every_order_comes_up() -> None:
    asked = request([(1,), (2,), (3,)])
    orders = {tuple(s.tokens for s in shuffled(asked, Random(i)).segments if "agent" in s.name) for i in range(99)}
    assert len(orders) == 6


def test_consistency() -> None:
    assert consistency([("a", "a"), ("a", "b"), (None, None), ("c", "c")]) == 0.5
    assert consistency([]) == 1
