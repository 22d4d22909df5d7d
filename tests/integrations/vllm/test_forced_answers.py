"""Forced answers: these tokens, with the log-probabilities that the model has for them, and nothing else changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.entry_point import FIRST_LOGPROBS, FORCED
from kedge.integrations.vllm.forced_answers import ForcedAnswers
from tests.integrations.vllm.conftest import VOCABULARY, Driver, driver, prompt
from tests.integrations.vllm.lane_prompts import asynchronously

PROMPTS = [prompt(40, 1), prompt(55, 2), prompt(24, 3)]
FORCED_TO = [prompt(6, 4), prompt(9, 5)]
TOP, CLOSE = 5, 1e-3
"""Likeliest tokens that are compared, and how far their log-probabilities may lie apart"""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def built(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An engine that is given the processor twice, also where it has it from the entry point by itself."""
    twice = [ForcedAnswers, ForcedAnswers]
    with (
        asynchronously(request.param),
        driver(tiny_llama, logits_processors=twice, async_scheduling=request.param) as one,
    ):
        assert one.engine.vllm_config.scheduler_config.async_scheduling is request.param
        yield one


def by_token(positions: Any) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in ranked.items()} for ranked in positions]


def answers(built: Driver) -> list[Any]:
    """The tokens and log-probabilities of a batch: two forced answers, one with penalties, beside a free one."""
    names = [
        built.add(PROMPTS[0], 6, extra={FORCED: FORCED_TO[0]}, logprobs=TOP),
        built.add(PROMPTS[2], 8, logprobs=TOP),
        built.add(PROMPTS[1], 9, extra={FORCED: FORCED_TO[1]}, logprobs=TOP, repetition_penalty=1.5),
    ]
    built.run()
    found = [built.finished[name].outputs[0] for name in names]
    return [(list(one.token_ids), by_token(one.logprobs)) for one in found]


def as_prompts(built: Driver) -> list[Any]:
    """The log-probabilities of the same texts as prompts, which vLLM takes elsewhere."""
    found = []
    for tokens, forced in zip(PROMPTS, FORCED_TO, strict=False):
        done = built.ask(tokens + forced, count=1, prompt_logprobs=TOP)
        found.append(by_token(done.prompt_logprobs[len(tokens) :]))
    return found


def test_answers_are_forced_beside_free_ones(built: Driver) -> None:
    first, other, second = answers(built)
    assert [first[0], second[0]] == FORCED_TO
    assert other[0] == built.answer(PROMPTS[2], count=8), "a free request beside them is answered as by stock vLLM"
    for (tokens, positions), text in zip((first, second), as_prompts(built), strict=True):
        for token, ranked, expected in zip(tokens, positions, text, strict=True):
            both = ranked.keys() & expected.keys()
            assert token in both
            assert [ranked[one] for one in both] == pytest.approx([expected[one] for one in both], abs=CLOSE)


def test_log_probabilities_of_first_tokens_alone_beside_others(built: Driver) -> None:
    """None are computed after that, unless somebody else wants them."""
    whole = built.ask(PROMPTS[0], count=8, logprobs=TOP).outputs[0]
    names = [built.add(PROMPTS[0], 8, extra={FIRST_LOGPROBS: 3}, logprobs=TOP), built.add(PROMPTS[2], 12)]
    built.run()
    first, other = (built.finished[name].outputs[0] for name in names)
    assert [list(first.token_ids), list(other.token_ids)] == [list(whole.token_ids), built.answer(PROMPTS[2], count=12)]
    assert len(first.logprobs) == 3 and other.logprobs is None
    for ranked, expected in zip(by_token(first.logprobs), by_token(whole.logprobs[:3]), strict=True):
        assert ranked == pytest.approx(expected, abs=CLOSE)
    for bound, beside in (({FIRST_LOGPROBS: 3}, 2), ({FIRST_LOGPROBS: "3"}, None), ({FIRST_LOGPROBS: 0}, None)):
        names = [built.add(PROMPTS[0], 8, extra=bound, logprobs=TOP), built.add(PROMPTS[2], 8, logprobs=beside)]
        built.run()
        assert [len(built.finished[name].outputs[0].logprobs or ()) for name in names] == [8, 8 if beside else 0]


HOSTILE = [
    *("1", 7, {"5": 6}, [], [[5]], [5, "6"], [5.0], [True], [None, 5], [-1], [VOCABULARY], [2**62]),
    [5] * 5_000,
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:12])
def test_what_is_no_answer_is_ignored(built: Driver, value: Any) -> None:
    assert built.answer(PROMPTS[0], 6, extra={FORCED: value}) == built.answer(PROMPTS[0], 6)


@pytest.mark.parametrize(
    "more", [{"logprobs_mode": "processed_logprobs"}, {"plugged": False}], ids=["processed", "without the connector"]
)
def test_where_nothing_could_be_compared_nothing_is_forced(tiny_llama: Path, more: dict[str, Any]) -> None:
    with driver(tiny_llama, logits_processors=[ForcedAnswers], **more) as other:
        assert answers(other)[0][0] == other.answer(PROMPTS[0], count=6) != FORCED_TO[0]
