"""The peers on the bundled model: the first questions ever, the prompts that are read, and the times that compare."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from benchmarks.lab.comparison import Lab, LabSettings, MethodRuns, run_pairs
from benchmarks.lab.methods import METHODS, cacheblend, relay
from kedge.types import Source
from kedge.workloads.miniature import TASKS, role_last

CODE = TASKS["code"]
CPU = {"device": "cpu", "kv_memory": "400 blocks"}
PEERS = ("dense", "exact", "role-last", "epic", "cacheblend", "relay")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runs() -> dict[str, MethodRuns]:
    settings = LabSettings(agents=3, judged=True, timed=True, engine=CPU)
    return run_pairs(CODE, islice(TASKS["code"].questions("test", 4), 2), PEERS, settings)


def computed(runs: MethodRuns, question: int, agent: str) -> int:
    return next(
        pair.other.completion.receipt.computed
        for pair in runs.answers
        if (pair.question, pair.agent) == (question, agent)
    )


def test_only_relay_translates_the_first_question_ever(runs: dict[str, MethodRuns]) -> None:
    for name in PEERS:
        translated = [
            pair.other.completion.receipt.translated
            for pair in runs[name].answers
            if pair.question == 0 and pair.agent == "final"
        ]
        assert (translated[0] > 0) == (name == "relay"), name
    later = [pair.other.completion.receipt for pair in runs["epic"].answers if pair.question == 1]
    assert later[-1].translated > 0


def test_role_last_shares_exactly_what_its_prompts_have_in_front(runs: dict[str, MethodRuns]) -> None:
    for pair in runs["role-last"].answers:
        assert pair.other.completion.receipt.translated == 0
    for agent in ("designer", "final"):
        assert computed(runs["role-last"], 0, agent) < computed(runs["exact"], 0, agent), "even on the first question"


def test_judged_requests_have_the_methods_own_prompt() -> None:
    with Lab(CODE, {"role-last": METHODS["role-last"]}, LabSettings(agents=3, judged=True, engine=CPU)) as lab:
        bench = lab._benches["role-last"]
        seen, worded = [], bench._worded
        bench._worded = lambda asked: seen.append((asked, worded(asked))) or seen[-1][1]  # type: ignore[method-assign,func-returns-value]
        lab.ask([(0, next(TASKS["code"].questions("test", 5)))])
        decode = lab._dense.engine.tokenizer.decode
    assert seen
    team = role_last(TASKS["code"].workflow(3))
    for before, after in seen:
        values = [one for one in after.segments if one.is_placeholder]
        assert [(one.name, one.tokens, one.sample) for one in values] == [
            (one.name, one.tokens, one.sample) for one in before.segments if one.is_placeholder
        ]
        role = TASKS["code"].workflow().agent(before.agent).system
        assert decode(before.tokens).index(role) < decode(before.tokens).index("Question:")
        assert decode(after.tokens).index(role) > decode(after.tokens).index("Question:")
        assert team.agent(after.agent).system == ""


def test_times_are_of_methods_whose_times_compare(runs: dict[str, MethodRuns]) -> None:
    for name, one in runs.items():
        summary = one.summary()
        assert (summary.ttft_ms is None) == (summary.teams_per_minute is None) == (name in ("cacheblend", "relay"))
        assert summary.computed_tokens + summary.reused_tokens == pytest.approx(1)
        if summary.ttft_ms is not None:
            assert len(one.ttfts) == 2 * 3
            assert 0 < summary.ttft_ms < 60_000 / summary.teams_per_minute
    assert not cacheblend(0.5).is_timed
    assert relay(0.0).is_timed, "nothing is chosen, so nothing runs twice"


def test_a_larger_share_computes_more(runs: dict[str, MethodRuns]) -> None:
    settings = LabSettings(agents=3, engine=CPU)
    shares = {f"{share}": relay(share) for share in (0.0, 0.3, 1.0)}
    some = run_pairs(CODE, islice(TASKS["code"].questions("test", 4), 2), shares, settings)
    none, part, whole = (some[name].summary().computed_tokens for name in shares)
    assert none < part < whole
    assert whole == pytest.approx(runs["exact"].summary().computed_tokens, abs=0.02)
    sources = {s.source for pair in some["0.3"].answers for s in pair.other.completion.receipt.spans}
    assert {Source.TRANSLATED, Source.COMPUTED} <= sources
