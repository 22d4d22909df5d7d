"""`kedge bench ttft` runs, counts everything and writes what it says."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ttft import TtftSettings, measure, weight_bytes
from kedge.bench.shapes import SHAPES, random_llama
from tests.cli.commands import kedge, measured

SMALL = TtftSettings("tiny", question=40, prefix=32, output=24, agents=3, samples=3, repeats=2, device="cpu")


@pytest.mark.parametrize("estimator", ["token", "interpolate"])
def test_ttft_translates_all_agents_but_the_first(estimator: str) -> None:
    result = measure(TtftSettings(**{**vars(SMALL), "estimator": estimator}))
    times = result["agents"]
    assert result["memory_ratio"] > 0
    assert [agent["mode"] for agent in times] == ["exact prefix + dense", "translated", "translated"]
    assert [agent["moved_bytes"] is not None for agent in times] == [False, True, True]
    row = times[2]
    moved = row["moved_bytes"]
    token = 3 * 2 * 2 * 16 * 4  # tiny: layers, K and V, heads, dimensions, bytes
    assert moved["context"] == row["prompt_tokens"] * token
    assert moved["base"] == moved["written"] < moved["context"]
    # Offsets of two layers, in 16 bits, and no more rows than are asked for.
    assert 0 < moved["offsets"] <= 4 * moved["base"] / 3
    assert row["floor_ms"] == pytest.approx(sum(moved.values()) / (result["bandwidth_gb_per_s"] * 1e9) * 1e3, abs=1e-3)
    for agent in times:
        assert {len(agent[f"all_{name}_ms"]) for name in ("dense", "translated", "generate")} == {SMALL.repeats}
        for total, parts in zip(agent["all_translated_ms"], agent["all_parts_ms"], strict=True):
            assert sum(parts.values()) == pytest.approx(total, rel=0.02, abs=0.2)


def test_bench_ttft_writes_json_and_an_unknown_size_is_refused(tmp_path: Path) -> None:
    sizes = "--model-size tiny --question 40 --prefix 32 --output 24 --agents 2 --samples 2 --repeats 1"
    agents = measured(tmp_path, "bench", "ttft", *sizes.split())[0]["agents"]
    assert [agent["agent"] for agent in agents] == [0, 1]
    for agent in agents:
        assert {"agent", "prompt_tokens", "dense_ms", "translated_ms", "parts_ms"} <= set(agent)
    assert kedge("bench", "ttft", "--model-size", "7t").exit_code != 0


def test_a_pass_reads_all_weights_but_an_embedding_of_its_own() -> None:
    tied = random_llama("tiny", torch.device("cpu"), torch.float32)
    untied = LlamaForCausalLM(LlamaConfig(**SHAPES["tiny"], tie_word_embeddings=False))
    assert weight_bytes(tied) == weight_bytes(untied) == 4 * sum(weight.numel() for weight in tied.parameters())
