"""Sessions in the embedded engine: found without hints, kept while they pause, and answered the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kedge.engine.local.sessions import chain_of, stop_reason
from kedge.policies.sessions import StopReason
from kedge.types import FinishReason, GenerateRequest, SamplingParams, Segment, Source, Tokens
from tests.engine.local.test_engine import prompt
from tests.engine.local.tiering import AMPLE, engine_with, expected

SYSTEM = prompt(5000, 16)


def plain(tokens: Tokens, count: int = 4) -> GenerateRequest:
    return GenerateRequest((Segment(tokens, "p0"),), SamplingParams(count, ignore_eos=True))


def grown(tokens: Tokens, answer: Tokens, by: int, seed: int) -> Tokens:
    """The next prompt of a session: all before, its answer, and what a tool said."""
    return (*tokens, *answer, *prompt(seed, by))


@pytest.mark.parametrize("policy", ["sessions", "lru"])
def test_sessions_that_come_back_soon_are_kept_while_others_pass(policy: str) -> None:
    """One session returns after every three prompts of others, which fill the device and never come back."""
    with engine_with(policy=policy, num_blocks=28) as engine:
        tokens, hits = (*SYSTEM, *prompt(1, 32)), []
        for turn in range(12):
            done = engine.submit(plain(tokens)).result(60)
            assert done.tokens == expected(tokens, 4)
            hits.append(done.receipt.tokens(Source.DEVICE) >= len(tokens) - 40 if turn else True)
            tokens = grown(tokens, done.tokens, 2, 100 + turn)
            for other in range(3):
                engine.submit(plain(prompt(1000 + 10 * turn + other, 80), 1)).result(60)
    late = sum(hits[-4:])
    assert late == 4 if policy == "sessions" else late == 0


def test_a_whole_history_comes_back_from_the_host() -> None:
    with engine_with(num_blocks=24, host_blocks=AMPLE) as engine:
        tokens = (*SYSTEM, *prompt(1, 48))
        done = engine.submit(plain(tokens)).result(60)
        engine.wait_idle(60)
        for other in range(6):
            engine.submit(plain(prompt(2000 + other, 100), 1)).result(60)
            engine.wait_idle(60)
        after = grown(tokens, done.tokens, 5, 7)
        again = engine.submit(plain(after)).result(60)
        assert again.tokens == expected(after, 4)
        assert again.receipt.tokens(Source.HOST) + again.receipt.tokens(Source.DEVICE) >= len(tokens) // 8 * 8


def test_many_sessions_at_once_with_aborts_keep_the_books() -> None:
    rng = random.Random(0)

    def session(number: int) -> list[tuple[Tokens, Tokens]]:
        answers: list[tuple[Tokens, Tokens]] = []
        tokens = (*SYSTEM, *prompt(number, 8 + number % 20))
        for turn in range(4):
            request = plain(tokens, 3)
            stream = engine.submit(request)
            if rng.random() < 0.2:
                engine.cancel(request.request_id)
                stream.result(60)
                continue
            done = stream.result(60)
            answers.append((tokens, done.tokens))
            tokens = grown(tokens, done.tokens, 3, 1000 * number + turn)
        return answers

    with engine_with(num_blocks=40, host_blocks=60) as engine, ThreadPoolExecutor(32) as clients:
        answers = [answer for each in clients.map(session, range(32)) for answer in each]
    assert all(answer == expected(tokens, 3) for tokens, answer in answers) and len(answers) > 64


@pytest.mark.parametrize(
    ("mark", "text", "finish", "stop"),
    [
        ("<tool_call>", 'I look.<tool_call>{"name": "ls"}</tool_call>', FinishReason.STOP, StopReason.TOOL),
        ("<tool_call>", "Done.", FinishReason.STOP, StopReason.USER),
        ("<tool_call>", "Done.", FinishReason.LENGTH, StopReason.UNKNOWN),
        ("", "Done.", FinishReason.STOP, StopReason.UNKNOWN),
    ],
)
def test_what_an_answer_ends_with_says_what_the_session_waits_for(
    mark: str, text: str, finish: FinishReason, stop: StopReason
) -> None:
    assert stop_reason(mark, text, finish) is stop


def test_a_chain_is_that_of_its_blocks_wherever_it_was_known_before() -> None:
    tokens = prompt(3, 100)
    whole = chain_of(tokens, 8)
    assert len(whole) == 12 and whole[:6] == chain_of(tokens[:50], 8)
    for known in (0, 3, 12):
        assert chain_of(tokens, 8, whole[:known]) == whole
    assert chain_of(tokens[:20], 8, whole) == whole[:2]
    assert chain_of((*tokens[:8], 0, *tokens[9:]), 8)[1:] != whole[1:]
