"""`kedge bench vllm --case sessions`: the clients on a fake engine, the arithmetic, and a small run on real vLLM."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.vllm import cases as bench
from benchmarks.vllm.cases import (
    SessionClient,
    SessionLoad,
    VllmTurn,
    drive,
    figures,
    medians,
    random_words,
    read_words,
    sessions_figures,
)
from kedge.bench.vllm import BLOCK, VllmCall
from kedge.cli.main import app
from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.types import Tokens
from kedge.workloads import real

LOAD = SessionLoad(head=64, added=32, output=4, turns=(2, 5), warm_s=0.0, measured_s=0.2, pause_s=0.001)


def turn(ended: float, prompt: int = 100, cached: int = 50, ttft_s: float = 0.1) -> VllmTurn:
    return VllmTurn(ended, VllmCall((7,) * prompt, (1, 2), cached, ttft_s, 2 * ttft_s))


WORDS = random_words(1000)


def history(client: SessionClient, turns: int) -> Iterator[Tokens]:
    for prompt in itertools.islice(client.prompts(), turns):
        yield prompt
        client.took(prompt[-4:])


def test_figures_are_of_all_turns() -> None:
    found = figures([turn(1.0, ttft_s=0.1), turn(2.0, cached=100, ttft_s=0.3), turn(3.0, cached=0, ttft_s=0.2)], 30.0)
    assert found == {"turns": 3, "turns_per_min": 6.0, "hit": 0.5, "ttft_p50_s": 0.2, "ttft_p99_s": 0.3}


def test_several_runs_give_medians() -> None:
    found = medians([[turn(1.0)], [turn(1.0)] * 2, [turn(1.0)] * 9], 60.0)
    assert (found["turns_per_min"], [one["turns"] for one in found["trials"]]) == (2.0, [1, 2, 9])


def test_a_session_grows_until_another_one_begins() -> None:
    prompts = list(history(SessionClient(LOAD, WORDS, 3), 40))
    begins = [at for at, (one, two) in enumerate(itertools.pairwise(prompts)) if two[: len(one)] != one]
    assert len(begins) > 3
    for one, two in itertools.pairwise(prompts):
        if two[: len(one)] == one:
            assert two[len(one) : -LOAD.added] == one[-4:], "the answer, and then something new"
    assert all(2 <= two - one <= 5 for one, two in itertools.pairwise(begins))
    assert max(map(len, prompts)) + LOAD.output <= LOAD.longest


def test_clients_ask_every_engine_the_same() -> None:
    one, two, other = (list(history(SessionClient(LOAD, WORDS, number), 20)) for number in (1, 1, 2))
    assert one == two != other


def test_pauses_are_bounded() -> None:
    load = replace(LOAD, pause_s=1.0, longest_pause_s=2.0)
    client = SessionClient(load, WORDS, 0)
    pauses = [client.took(()) for _ in range(200)]
    assert max(pauses) == 2.0 and 0.5 < sorted(pauses)[100] < 2.0


def test_turns_outside_of_the_measured_time_do_not_count() -> None:
    class FakeLane:
        async def ask(self, prompt: Tokens, max_tokens: int) -> VllmCall:
            await asyncio.sleep(0.001)
            return VllmCall(prompt, (1,) * max_tokens, 0, 0.1, 0.2)

    load = replace(LOAD, warm_s=0.05)
    lane: Any = FakeLane()
    turns = asyncio.run(drive(lane, load, 3, WORDS))
    assert turns and all(0.05 <= one.ended < 0.25 for one in turns)


def test_an_engine_that_vllm_cannot_run_has_no_figures() -> None:
    lanes = {bench.STOCK: [[turn(1.0)]], bench.NATIVE: None}
    data = sessions_figures(LOAD, {4: lanes})
    assert data["live"]["4"][bench.NATIVE] is None and data["live"]["4"][bench.STOCK]["turns"] == 1
    assert json.loads(json.dumps(data))["room_tokens"] == LOAD.kv.tokens
    assert len(next(tables.vllm_sessions(data)).renderables[-1].rows) == 2


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


@pytest.mark.slow
def test_a_small_run_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    load = SessionLoad(live=(2,), head=4 * BLOCK, added=BLOCK, turns=(2, 4), pause_s=0.05, warm_s=1.0, measured_s=6.0)
    monkeypatch.setattr("benchmarks.vllm.cases.QUICK_LOAD", load)
    file = tmp_path / "vllm.json"
    done = CliRunner().invoke(app, ["bench", "vllm", "--quick", "--case", "sessions", "--json", str(file)])
    assert done.exit_code == 0, done.output
    lanes = json.loads(file.read_text())["sessions"]["live"]["2"]
    assert all(lanes[name]["turns"] > 0 for name in (bench.STOCK, bench.KEDGE, bench.KEDGE_HOST))


def test_real_words_are_text_from_any_place_and_enough_of_it() -> None:
    words, tokenizer = read_words(model_path(None)), HFTokenizer.load(model_path(None))
    some, other = words(Random(1), 500), words(Random(2), 500)
    assert len(some) == len(other) == 500 and some != other and words(Random(1), 500) == some
    whole = " ".join(one.text for one in real.load("reading")[1])
    assert tokenizer.decode(some[100:140]).strip()[:40] in whole
    assert len(words(Random(3), 100_000)) == 100_000
