"""Further cases of `kedge bench vllm`: workflows and sessions on fake engines, a team's gains, and all on real vLLM."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm import cases as bench
from benchmarks.vllm.cases import FIGURES, SessionClient, SessionLoad, VllmTurn, drive, figures, medians, random_words
from benchmarks.vllm.team import DENSE, TeamSettings, agent_figures
from benchmarks.workflow.measure import QUICK, cases, peer
from kedge.bench.vllm import BLOCK, KEDGE, STOCK, VllmCall, VllmClients, VllmTrial, longest_call
from kedge.types import Tokens
from tests.bench.test_vllm import FakeLane, call
from tests.cli.commands import measured


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@pytest.mark.parametrize("name", FIGURES)
def test_every_call_of_a_case_fits(name: str) -> None:
    work = cases(FIGURES[name], QUICK, 1000, 0, encode)[0]
    longest = longest_call(work)
    for flow in work.flows:
        answer = (3,) * flow.output
        assert all(len(flow.request(turn, answer).tokens) + flow.output <= longest for turn in range(work.calls))


def test_an_agent_reads_the_answer_before_it() -> None:
    work, lane = peer(encode, 0, output=3, rounds=1), FakeLane()
    asyncio.run(VllmClients(lane, replace(work, flows=work.flows[:1], lead=0)).trial())  # type: ignore[arg-type]
    assert [prompt[-3:] for prompt, _, _ in lane.asked[1:]] == [(turn,) * 3 for turn in range(1, len(lane.asked))]


@pytest.mark.slow
def test_small_runs_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    load = SessionLoad(live=(2,), head=4 * BLOCK, added=BLOCK, turns=(2, 4), pause_s=0.05, warm_s=1.0, measured_s=6.0)
    monkeypatch.setattr(bench, "QUICK_LOAD", load)
    small = TeamSettings(question=96, prefix=64, output=32, agents=3, samples=4, repeats=1)
    monkeypatch.setattr("benchmarks.vllm.team.QUICK_TEAM", small)
    said, _ = measured(tmp_path, "bench", "vllm", "--quick", "--case", "sessions", "--case", "team")
    lanes = said["sessions"]["live"]["2"]
    assert all(lanes[name]["turns"] > 0 for name in (bench.STOCK, bench.KEDGE, bench.KEDGE_HOST))
    first, *others = said["team"]["agents"]
    assert first["prompt_tokens"] == 64 + 96 + 16
    assert all(agent["translated_tokens"] > agent["prompt_tokens"] / 2 for agent in others)


def test_gains_of_an_agent_are_over_dense_and_over_stock() -> None:
    def trial(ttft_s: float, translated: int | None = None) -> VllmTrial:
        receipt = None if translated is None else {"tokens": {"translated": translated}}
        one = VllmCall((7,) * 900, (1, 2), 0, ttft_s, receipt)
        return VllmTrial(1.0, (call(100, 0, 9.0), one))

    kedge = [trial(0.1, 850), trial(0.2, 800), trial(0.1, 899)]
    rounds = [
        {DENSE: trial(dense), STOCK: trial(1.0), KEDGE: ours}
        for dense, ours in zip((1.0, 3.0, 2.0), kedge, strict=True)
    ]
    said = agent_figures(1, rounds)
    assert (said["agent"], said["prompt_tokens"], said["translated_tokens"]) == (1, 900, 800)
    assert said["all_dense_ms"] == [1000.0, 3000.0, 2000.0]
    assert (said["dense_ms"], said["stock_ms"], said["kedge_ms"]) == (2000.0, 1000.0, 100.0)
    assert (said["speedup_over_dense"], said["speedup_over_stock"]) == (20.0, 10.0)


# sessions -------------------------------------------------------------------------------------------------------------

LOAD = SessionLoad(head=64, added=32, output=4, turns=(2, 5), warm_s=0.0, measured_s=0.2, pause_s=0.001)


def turn(ended: float, prompt: int = 100, cached: int = 50, ttft_s: float = 0.1) -> VllmTurn:
    return VllmTurn(ended, VllmCall((7,) * prompt, (1, 2), cached, ttft_s))


WORDS = random_words(1000)


def history(client: SessionClient, turns: int) -> Iterator[Tokens]:
    for prompt in itertools.islice(client.prompts(), turns):
        yield prompt
        client.took(prompt[-4:])


def test_figures_are_of_all_turns() -> None:
    found = figures([turn(1.0, ttft_s=0.1), turn(2.0, cached=100, ttft_s=0.3), turn(3.0, cached=0, ttft_s=0.2)], 30.0)
    assert found == {"turns": 3, "turns_per_min": 6.0, "hit": 0.5, "ttft_p50_s": 0.2, "ttft_p99_s": 0.3}
    several = medians([[turn(1.0)], [turn(1.0)] * 2, [turn(1.0)] * 9], 60.0)
    assert (several["turns_per_min"], [one["turns"] for one in several["trials"]]) == (2.0, [1, 2, 9])


def test_a_session_grows_until_another_one_begins() -> None:
    prompts, again, other = (list(history(SessionClient(LOAD, WORDS, number), 40)) for number in (3, 3, 4))
    assert prompts == again != other, "every engine is asked the same"
    begins = [at for at, (one, two) in enumerate(itertools.pairwise(prompts)) if two[: len(one)] != one]
    assert len(begins) > 3
    for one, two in itertools.pairwise(prompts):
        if two[: len(one)] == one:
            assert two[len(one) : -LOAD.added] == one[-4:], "the answer, and then something new"
    assert all(2 <= two - one <= 5 for one, two in itertools.pairwise(begins))
    assert max(map(len, prompts)) + LOAD.output <= LOAD.longest


def test_turns_outside_of_the_measured_time_do_not_count() -> None:
    class FakeLane:
        async def ask(self, prompt: Tokens, max_tokens: int) -> VllmCall:
            await asyncio.sleep(0.001)
            return VllmCall(prompt, (1,) * max_tokens, 0, 0.1)

    load = replace(LOAD, warm_s=0.05)
    lane: Any = FakeLane()
    turns = asyncio.run(drive(lane, load, 3, WORDS))
    assert turns and all(0.05 <= one.ended < 0.25 for one in turns)


def test_the_host_tiers_of_both_have_the_same_room(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "hidden_size": 64}'
    )
    settings = {name: bench.lane_settings(name, LOAD, tmp_path) for name in bench.LANES}
    assert settings[bench.STOCK] == (None, {}) and settings[bench.NATIVE][0] is None
    blocks = LOAD.host * LOAD.kv.blocks
    assert settings[bench.KEDGE_HOST][0]["tiers"]["host_memory"] == f"{blocks} blocks"
    assert settings[bench.NATIVE][1]["kv_offloading_size"] * 2**30 == blocks * 2 * 2 * 2 * 16 * BLOCK * 2
    assert all(settings[name][1] == {"scheduler_cls": bench.SCHEDULER} for name in (bench.KEDGE, bench.KEDGE_HOST))
