"""`kedge inspect`: the verdict on models of several kinds, and a workflow's graph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import (
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    RwkvConfig,
    StableLmConfig,
    T5Config,
)
from typer.testing import CliRunner

from kedge.cli.main import app
from kedge.engine.local.attention import latent
from kedge.engine.local.model import replica
from kedge.workflow.export import export
from kedge.workflow.spec import build_step_graph

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1234,
}


def inspect(*args: str):  # noqa: ANN201
    return CliRunner().invoke(app, ["inspect", *args], env={"COLUMNS": "200"})


def rows(folder: Path, config: PretrainedConfig) -> dict[str, str]:
    """The facts that are shown about a model with this config."""
    config.save_pretrained(folder)
    result = inspect(str(folder), "--all")
    assert result.exit_code == 0, result.output
    cells = [line.strip("│").split("│") for line in result.output.splitlines() if line.startswith("│")]
    return {label.strip(): value.strip() for label, value in cells}


def test_a_model_that_can_be_translated(tmp_path: Path) -> None:
    shown = rows(tmp_path, LlamaConfig(**SMALL))
    assert (shown["family"], shown["layers"], shown["heads"], shown["KV heads"]) == ("llama", "3", "4", "2")
    assert shown["vocabulary"] == "1234"
    assert shown["KV per token"] == "768 bytes in float32, 384 bytes in bfloat16"
    assert shown["RoPE"].startswith("default, theta")
    assert shown["runs, exact reuse"] == "yes"
    assert shown["translation"].startswith("yes")


def latent_attention() -> DeepseekV3Config:
    """16 heads with keys of 16 + 8 dimensions and values of 16."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return DeepseekV3Config(**{**SMALL, **latent, "num_attention_heads": 16, "num_key_value_heads": 16})


def test_a_latent_is_shown_with_its_size(tmp_path: Path) -> None:
    shown = rows(tmp_path, latent_attention())
    assert shown["KV per token"] == "480 bytes in float32, 240 bytes in bfloat16: a latent for all heads"
    assert shown["RoPE"].endswith(", 8 of 40 dimensions")
    assert (shown["runs, exact reuse"], shown["translation"]) == ("yes", "yes")


def test_the_kv_of_all_heads_is_shown_where_a_small_model_does_not_keep_the_latent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "PROJECTION", "another_name")
    shown = rows(tmp_path, latent_attention())
    assert shown["KV per token"] == "9,216 bytes in float32, 4,608 bytes in bfloat16"
    assert shown["RoPE"].endswith(", 8 of 24 dimensions")


def test_part_of_the_dimensions_rotated_and_scaled_rope_are_shown(tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.5,
    }
    shown = rows(tmp_path, PhiConfig(**SMALL, rope_parameters=scaled))
    assert shown["RoPE"] == "llama3, theta 500000.0, 8 of 16 dimensions"


def test_layers_that_differ_have_one_rope_each(tmp_path: Path) -> None:
    shown = rows(tmp_path, Gemma3TextConfig(**SMALL, head_dim=16))
    assert (shown["runs, exact reuse"], shown["translation"]) == ("yes", "yes")
    assert shown["RoPE"] == "default, theta 1000000.0; default, theta 10000.0"


def test_keys_that_are_scaled_after_their_rotation_are_run_but_not_translated(tmp_path: Path) -> None:
    shown = rows(tmp_path, HunYuanDenseV1Config(**SMALL, head_dim=16))
    assert shown["runs, exact reuse"] == "yes"
    assert shown["translation"] == "no: the keys of layer 0 are rotated in none of the known ways"


HALF = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
REFUSED = {
    "encoder-decoder": (T5Config, {}, "an encoder-decoder has no single KV cache"),
    "no rope": (BertConfig, {}, "no rotary position embedding in its config"),
    "linear attention": (Qwen3NextConfig, SMALL, "layers of type linear_attention keep one state"),
    "state space": (MambaConfig, {}, "layers of type linear_attention keep one state"),
    "RWKV": (RwkvConfig, {}, "its config has no `num_attention_heads`: layers without attention keep no KV"),
    "ALiBi": (FalconConfig, {"alibi": True}, "ALiBi: positions are a bias of the scores, not a rotation of the keys"),
    "attention of its own": (StableLmConfig, SMALL, "Transformers runs it with attention of its own only"),
    "rope for half of a key": (
        LlamaConfig,
        {**SMALL, "rope_parameters": HALF},
        "its code fails with Kedge's attention",
    ),
}


@pytest.mark.parametrize(("kind", "values", "why"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_run(
    tmp_path: Path, kind: type[PretrainedConfig], values: dict[str, Any], why: str
) -> None:
    shown = rows(tmp_path, kind(**values))
    assert shown["runs"].startswith(f"no: {why}")
    assert "translation" not in shown


def test_a_model_of_which_no_small_copy_can_be_built_is_judged_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "PARAMETERS", 1000)
    shown = rows(tmp_path, LlamaConfig(**SMALL))
    assert shown["runs, exact reuse"].startswith("yes, according to its config")
    assert shown["translation"].startswith("yes, according to its config")


def test_rope_that_changes_with_the_length_holds_for_the_original_one(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 256}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 256}
    shown = rows(tmp_path, Phi3Config(**SMALL, **lengths, pad_token_id=0, eos_token_id=1, rope_parameters=rope))
    assert (shown["longest prompt"], shown["runs, exact reuse"]) == ("256", "yes")
    assert shown["translation"].startswith("no: longrope RoPE changes")


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nothing"}'])
def test_a_folder_that_is_no_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    result = inspect(str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: model='{tmp_path}'")


def test_a_workflow(tmp_path: Path) -> None:
    flow = tmp_path / "flow.yaml"
    flow.write_text(
        "name: pair\nturns: 2\nagents:\n"
        "  - {id: b, user: 'Q: {user_question} {agent_a_current} {agent_b_history_1}', reuse: exact}\n"
        "  - {id: a, user: 'Q: {user_question}'}\n",
        encoding="utf-8",
    )
    result = inspect(str(flow), "--all")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    at = lines.index(["agent", "waits", "for", "reads", "tool", "reuse"])
    assert [line for line in lines[at + 2 :] if line][:4] == [
        ["a", "none", "user_question"],
        ["b", "a", "user_question", "exact"],
        ["agent_a_current"],
        ["agent_b_history_1"],
    ]
    assert "inputs: user_question; turns: 2" in result.output


def test_a_model_is_a_few_facts_without_all(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    result = inspect(str(tmp_path))
    shown = [line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")]
    assert shown == ["family", "longest prompt", "runs, exact reuse", "translation"]


TEAM = str(Path(__file__).parents[2] / "examples" / "math_team.yaml")


def shares(*args: str) -> dict[str, int]:
    """The percentages that are shown, by the first words of their rows."""
    result = inspect(TEAM, *args)
    assert result.exit_code == 0, result.output
    return {way: int(share) for way, share in re.findall(r"^ (\S.*?)  +(\d+)%", result.output, re.MULTILINE)}


def test_a_workflow_says_what_its_prompts_would_save() -> None:
    as_is, role_last, translation = shares().values()
    assert as_is < role_last < translation < 100
    assert "plain prefix caching is exact and better" in " ".join(inspect(TEAM).output.split())


def test_assumed_lengths_change_the_shares() -> None:
    long, short = shares("--input-tokens", "2000"), shares("--input-tokens", "20", "--answer-tokens", "1")
    way = "prefix caching, shared text first and role last"
    assert long[way] > shares()[way] > short[way]
    assert shares("--length", "user_question=2000") == long


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nobody=3", "must be one of agent_analyst, agent_inspector, agent_programmer, agent_solver, cond"),
        ("user_question=many", "must be NAME=N"),
        ("user_question", "must be NAME=N"),
    ],
)
def test_a_length_that_cannot_be(value: str, why: str) -> None:
    result = inspect(TEAM, "--length", value)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --length=") and why in result.stderr


@pytest.mark.parametrize("example", ["math_team", "debate"])
def test_everything_fits_80_columns_without_a_broken_word(example: str) -> None:
    flow = Path(TEAM).with_name(f"{example}.yaml")
    result = CliRunner().invoke(app, ["inspect", str(flow), "--all"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    wide = CliRunner().invoke(app, ["inspect", str(flow), "--all"], env={"COLUMNS": "200"})
    assert {*result.output.split()} - {*wide.output.split()} <= {"─" * n for n in range(200)}


@pytest.mark.parametrize(
    "text", ["- a list", "name: [", "name: x\nagents: [{id: a, user: '{nobody}'}]", "agents: [{temperature: 101}]"]
)
def test_a_broken_workflow_is_one_line(tmp_path: Path, text: str) -> None:
    flow = tmp_path / "flow.yaml"
    flow.write_text(text, encoding="utf-8")
    result = inspect(str(flow))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


GRAPH = """
name: review
graph:
  planner: {loops: [reviewer]}
  writer: {after: [planner]}
  reviewer: {after: [writer], then: {planner: 0.3, publisher: 0.7}}
  publisher: {after: [reviewer]}
"""


def graph_file(folder: Path, text: str = GRAPH) -> Path:
    file = folder / "graph.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_step_graph_is_drawn_with_its_nodes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(graph_file(tmp_path)), "--all"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "[planner] → [writer] → [reviewer] → [publisher]" in lines
    assert "2 reviewer writer planner 30%, publisher 70%" in lines
    assert "0 planner none; again after reviewer" in lines
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_a_graph_alone(tmp_path: Path) -> None:
    result = inspect(str(graph_file(tmp_path)), "--graph")
    assert result.exit_code == 0, result.output
    assert result.stdout == export(build_step_graph(yaml.safe_load(GRAPH)))


def test_the_graph_of_a_workflow_has_a_node_for_every_turn(tmp_path: Path) -> None:
    text = "{name: pair, turns: 2, agents: [{id: a, user: '{user_question} {agent_a_history_1}'}]}"
    result = inspect(str(graph_file(tmp_path, text)), "--graph")
    assert '["a@0"]' in result.stdout and "n0 --> n1" in result.stdout


def test_only_a_workflow_has_a_graph() -> None:
    assert inspect("model", "--graph").stderr == "error: --graph='model': only a workflow has a graph; name its file\n"
