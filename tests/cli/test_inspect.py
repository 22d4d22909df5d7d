"""`kedge inspect`: the verdict on models of several kinds, and a workflow's graph."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig, StableLmConfig

from kedge.cli.inspect import conflicts
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.model import replica
from kedge.errors import PromptTooLong
from kedge.types import GenerateRequest, Segment
from kedge.workflow.export import export
from kedge.workflow.graph import Agent, Workflow
from kedge.workflow.spec import build_step_graph
from tests.cli.commands import WIDTH, assert_refused, kedge, shown

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1234,
}  # fmt: skip


def rows(folder: Path, config: PretrainedConfig) -> dict[str, str]:
    """The facts that are shown about a model with this config."""
    config.save_pretrained(folder)
    text = shown("inspect", str(folder))
    cells = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {label.strip(): value.strip() for label, value in cells}


def test_a_model_that_can_be_translated(tmp_path: Path) -> None:
    facts = rows(tmp_path, LlamaConfig(**SMALL))
    assert facts["family"] == "llama"
    assert facts["KV per token"] == "768 bytes in float32, 384 bytes in bfloat16"
    assert facts["runs, exact reuse"] == "yes"
    assert facts["translation"].startswith("yes")


def test_the_longest_prompt_is_what_an_engine_takes() -> None:
    with LocalEngine() as engine, pytest.raises(PromptTooLong) as refused:
        engine.submit(GenerateRequest((Segment((5,) * engine.runner.max_positions, "p0"),)))
    assert f"longest prompt │ {refused.value.most} tokens, " in " ".join(kedge("inspect").output.split())


def test_a_latent_is_shown_with_its_size(tmp_path: Path) -> None:
    """16 heads with keys of 16 + 8 dimensions and values of 16."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = DeepseekV3Config(**{**SMALL, **latent, "num_attention_heads": 16, "num_key_value_heads": 16})
    facts = rows(tmp_path, config)
    assert facts["KV per token"] == "480 bytes in float32, 240 bytes in bfloat16: a latent for all heads"
    assert (facts["runs, exact reuse"], facts["translation"]) == ("yes", "yes")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (StableLmConfig(**SMALL), "Transformers runs it with attention of its own only"),
        (LlamaConfig(**SMALL | {"num_hidden_layers": -1}), ".*`num_hidden_layers`"),
        (LlamaConfig(**SMALL | {"num_hidden_layers": 10**9}), ".*`num_hidden_layers`"),
        (LlamaConfig(**SMALL, hidden_act="[red]x"), r".*'\[red\]x'"),
    ],
)
def test_a_model_that_cannot_be_run(tmp_path: Path, config: PretrainedConfig, why: str) -> None:
    facts = rows(tmp_path, config)
    assert re.match(f"no: {why}", facts["runs"])
    assert "translation" not in facts


def test_a_model_of_which_no_small_copy_can_be_built_is_judged_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "PARAMETERS", 1000)
    facts = rows(tmp_path, LlamaConfig(**SMALL))
    assert facts["runs, exact reuse"].startswith("yes, according to its config")
    assert facts["translation"].startswith("yes, according to its config")


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nothing"}'])
def test_a_folder_that_is_no_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert_refused(f"model='{tmp_path}'", "inspect", str(tmp_path))


TEAM = str(Path(__file__).parents[2] / "examples" / "math_team.yaml")


def shares(*args: str) -> dict[str, int]:
    """The percentages that are shown, by the first words of their rows."""
    text = shown("inspect", TEAM, *args)
    return {way: int(share) for way, share in re.findall(r"^(\S.*?) +(\d+)% ", text, re.MULTILINE)}


def test_a_workflow_says_what_its_prompts_would_save() -> None:
    as_is, role_last, translation = shares().values()
    assert as_is < role_last < translation < 100
    assert "plain prefix caching is exact and better" in " ".join(kedge("inspect", TEAM).output.split())


def test_assumed_lengths_change_the_shares() -> None:
    long, short = shares("--input-tokens", "2000"), shares("--input-tokens", "20", "--answer-tokens", "1")
    way = "prefix caching, shared text first and role last"
    assert long[way] > shares()[way] > short[way]
    assert shares("--length", "user_question=2000") == long
    refused = [kedge("inspect", TEAM, f"--{of}-tokens", "1000001") for of in ("input", "answer", "tool")]
    assert [one.exit_code for one in refused] == [2] * 3, "it would take all memory"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nobody=3", "'nobody': must be one of agent_analyst, agent_inspector, agent_programmer, agent_solver, cond"),
        ("user_question=many", "'user_question=many': must be NAME=N"),
        ("user_question", "'user_question': must be NAME=N"),
        ("user_question=" + "9" * 7, "'user_question=9"),
    ],
)
def test_a_length_that_cannot_be(value: str, why: str) -> None:
    assert_refused(f"--length={why}", "inspect", TEAM, "--length", value)


def test_everything_fits_80_columns_without_a_broken_word() -> None:
    narrow, wide = shown("inspect", TEAM, width=WIDTH), shown("inspect", TEAM)
    assert max(map(len, narrow.splitlines())) <= WIDTH
    assert {*narrow.split()} - {*wide.split()} <= {"─" * n for n in range(200)}


def test_a_broken_workflow_is_one_line(tmp_path: Path) -> None:
    assert_refused("path=", "inspect", str(graph_file(tmp_path, "name: [")))


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


def test_a_step_graph_is_drawn_and_may_be_had_alone_and_only_a_workflow_has_one(tmp_path: Path) -> None:
    file = str(graph_file(tmp_path))
    assert "[planner] → [writer] → [reviewer] → [publisher]" in kedge("inspect", file).output
    assert kedge("inspect", file, "--graph").stdout == export(build_step_graph(yaml.safe_load(GRAPH)))
    assert_refused("--graph='model': only a workflow has a graph; name its file", "inspect", "model", "--graph")


READ = "{user_question}"
BOTH = READ + " {agent_buyer_current}"


@pytest.mark.parametrize(
    ("buyer", "seller", "picks", "warned"),
    [
        ("Buy.", ("Sell.", READ), False, True),
        ("Buy.", ("Buy.", READ), True, False),
        ("Buy.", ("Sell.", BOTH), False, False),
        ("Buy.", ("Sell.", BOTH), True, True),
    ],
)
def test_roles_that_may_conflict_are_warned_of(buyer: str, seller: tuple[str, str], picks: bool, warned: bool) -> None:
    pick = "I take <letter>" if picks else ""
    agents = Agent("buyer", buyer, READ, pick=pick), Agent("seller", *seller, pick=pick)
    lines = list(conflicts(Workflow("market", agents)))
    assert [line.partition(" under roles of their own:")[0] for line in lines] == (
        ["buyer and seller read user_question"] if warned else []
    )
