"""The receipt of a finished request, as it leaves vLLM; and what the workers say of a step, merged over the ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.cache import Copied
from kedge.integrations.vllm.plugin.hints import read_hints
from kedge.integrations.vllm.plugin.requests import LiveRequest, Orders, Reports, TranslationVerdict, receipt_to_dict
from kedge.reuse.plan import spans_of
from kedge.types import Miss, RequestId, ReuseMode, Source

PROMPT = tuple(range(3, 103))


def live(asked: dict[str, Any] | None = None, **given: Any) -> LiveRequest:
    request: Any = SimpleNamespace(num_prompt_tokens=len(PROMPT))
    return LiveRequest(request, read_hints("r1", PROMPT, None, {"kedge": asked or {}}, ReuseMode.TRANSLATE), **given)


VERDICT = TranslationVerdict((range(90, 100),), (Miss("q", "too far"),), ready=40)


@pytest.mark.parametrize(
    ("state", "misses", "preassembled"),
    [
        ({"verdict": VERDICT, "translated": (range(8, 90),)}, [("q", "too far")], 40),
        ({"verdict": VERDICT}, [("q", "too far")], 0),
        ({"refusal": "no lanes", "verdict": VERDICT}, [("*", "no lanes")], 0),
        ({}, [], 0),
    ],
    ids=["translated", "computed after all", "refused", "not judged"],
)
def test_a_receipt_says_why_tokens_were_computed(
    state: dict[str, Any], misses: list[tuple[str, str]], preassembled: int
) -> None:
    asked = {"segments": [{"name": "q", "length": len(PROMPT), "sample": "q@0"}]}
    data = receipt_to_dict(live(asked, **state).receipt())
    assert data["mode"] == "translate" and data["preassembled"] == preassembled
    assert [(one["segment"], one["reason"]) for one in data["misses"]] == misses
    if "translated" in state:
        assert data["spans"] == [[0, 8, "computed"], [8, 90, "translated"], [90, 100, "computed"]]


@given(
    st.integers(0, 120),
    st.tuples(st.integers(0, 100), st.integers(0, 40)),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=4),
)
def test_spans_are_those_of_one_source_per_token(
    device: int, host: tuple[int, int], translated: list[tuple[int, int]]
) -> None:
    loaded = range(host[0], min(host[0] + host[1], 100))
    holes = tuple(range(start, min(start + length, 100)) for start, length in translated)
    sources = [Source.HOST if at in loaded else Source.DEVICE for at in range(min(device, 100))]
    sources += [Source.COMPUTED] * (100 - len(sources))
    for span in holes:
        sources[span.start : span.stop] = [Source.TRANSLATED] * len(span)
    found = live(device=device, loaded=loaded, translated=holes).receipt()
    assert found.spans == spans_of(sources)
    assert receipt_to_dict(found)["tokens"] == {one.value: sources.count(one) for one in Source}


def test_what_one_rank_has_to_compute_all_ranks_compute() -> None:
    few = TranslationVerdict((range(5, 9), range(99, 100)), (Miss("few", ""),), needs=((1, 2),))
    many = TranslationVerdict((range(7, 20), range(99, 100)), (Miss("many", ""),))
    assert few.merged(many) == TranslationVerdict((range(5, 20), range(99, 100)), (Miss("many", ""),), ((1, 2),))
    dense = TranslationVerdict((range(100),), (Miss("dense", ""),))
    merged = Reports(verdicts={RequestId("r"): few}).aggregate(Reports(verdicts={RequestId("r"): dense}))
    assert merged.verdicts == {"r": TranslationVerdict((range(100),), (Miss("dense", ""),), ((1, 2),))}
    other = TranslationVerdict(many.holes, many.misses, awaits=((3,),), ready=5)
    assert (few.merged(other).awaits, replace(few, ready=9).merged(other).ready) == (((3,),), 5)


def test_blocks_are_free_and_copies_have_ended_once_all_ranks_say_so() -> None:
    mine = Reports([Copied(1, True, 0.1)], captured={7: 1, 8: 1}, computed=(5, 2.0), learning=True)
    both = Reports([Copied(1, False)], captured={7: 1}, computed=(9, 1.0)).aggregate(mine)
    assert both == Reports([Copied(1, False), *mine.copies], {}, {7: 2, 8: 1}, (5, 2.0), learning=True)
    assert Reports().is_empty and not any(one.is_empty for one in (Reports(captured={7: 1}), Reports(learning=True)))
    assert [one.is_quiet for one in (Orders(scheduled=9, rows=1), Orders(forgets=True))] == [True, False]
