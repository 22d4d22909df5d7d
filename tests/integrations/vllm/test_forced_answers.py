"""Forced answers: these tokens, with the log-probabilities that the model has for them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.entry_point import FORCED
from kedge.integrations.vllm.forced_answers import ForcedAnswers
from tests.integrations.vllm.conftest import VOCABULARY, Driver, driver, prompt, save_tiny_llama
from tests.integrations.vllm.model_runner_v2 import call

PROMPTS = [prompt(40, 1), prompt(55, 2), prompt(24, 3)]
FORCED_TO = [prompt(6, 4), prompt(9, 5)]
TOP, CLOSE = 5, 1e-3
"""Likeliest tokens that are compared, and how far their log-probabilities may lie apart"""


@pytest.fixture(scope="module")
def built(tiny_llama: Path) -> Iterator[Driver]:
    """An engine that is given the processor, also where it has it from the entry point by itself."""
    with driver(tiny_llama, logits_processors=[ForcedAnswers]) as one:
        yield one


def answers(built: Driver) -> list[Any]:
    """The tokens and log-probabilities of a batch: two forced answers, one with penalties, beside a free one."""
    names = [
        built.add(PROMPTS[0], 6, extra={FORCED: FORCED_TO[0]}, logprobs=TOP),
        built.add(PROMPTS[2], 8, logprobs=TOP),
        built.add(PROMPTS[1], 9, extra={FORCED: FORCED_TO[1]}, logprobs=TOP, repetition_penalty=1.5),
    ]
    built.run()
    found = [built.finished[name].outputs[0] for name in names]
    return [
        [list(one.token_ids), [{str(t): seen.logprob for t, seen in at.items()} for at in one.logprobs]]
        for one in found
    ]


def as_prompts(built: Driver) -> list[Any]:
    """The log-probabilities of the same texts as prompts, which vLLM takes elsewhere."""
    found = []
    for tokens, forced in zip(PROMPTS, FORCED_TO, strict=False):
        done = built.ask(tokens + forced, count=1, prompt_logprobs=TOP)
        found.append([{str(t): one.logprob for t, one in at.items()} for at in done.prompt_logprobs[len(tokens) :]])
    return found


def require_forced(found: list[Any], texts: list[Any], free: list[int]) -> None:
    first, other, second = found
    assert [first[0], second[0]] == FORCED_TO
    assert other[0] == free, "a free request beside them is answered as by stock vLLM"
    for (tokens, positions), text in zip((first, second), texts, strict=True):
        for token, ranked, expected in zip(tokens, positions, text, strict=True):
            both = ranked.keys() & expected.keys()
            assert str(token) in both
            assert [ranked[one] for one in both] == pytest.approx([expected[one] for one in both], abs=CLOSE)


def test_answers_are_forced_beside_free_ones(built: Driver) -> None:
    require_forced(answers(built), as_prompts(built), built.answer(PROMPTS[2], count=8))


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


def in_process(folder: str, is_async: bool) -> list[Any]:
    with driver(save_tiny_llama(Path(folder)), logits_processors=[ForcedAnswers, ForcedAnswers]) as other:
        assert other.engine.vllm_config.scheduler_config.async_scheduling is is_async
        return [answers(other), as_prompts(other), other.answer(PROMPTS[2], count=8)]


@pytest.mark.parametrize(("v2", "is_async"), [(False, True), (True, False), (True, True)], ids=["v1", "v2", "v2 async"])
def test_on_both_runners_in_both_schedulings(tmp_path: Path, v2: bool, is_async: bool) -> None:
    require_forced(*call(in_process, str(tmp_path), is_async, v2=v2, is_async=is_async))


def test_vllm_finds_the_processor() -> None:
    found = [one for one in entry_points(group="vllm.logits_processors") if one.name == "kedge"]
    assert all(one.load() is ForcedAnswers for one in found)
