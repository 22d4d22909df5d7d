"""A training in parts is one training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kedge.workloads.miniature import ALL_TASKS, Task
from scripts.train_nano import BOS, RECORD, arguments, sample, train

TINY = [
    "--size", "tiny", "--minutes", "0.05", "--batch", "2", "--precision", "fp32", "--device", "cpu", "--resume",
    "--tokenizer", "src/kedge/models/nano",
]  # fmt: skip


def trained(out: Path, *more: str) -> dict[str, Any]:
    train(arguments().parse_args([*TINY, "--out", str(out), *more]))
    return json.loads((out / RECORD).read_text())


def test_a_part_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = trained(tmp_path, "--stop-after", "1")
    assert 0 < first["trained_minutes"] < first["minutes"]
    second = trained(tmp_path)
    assert second["trained_minutes"] >= second["minutes"]
    assert second["steps"] > first["steps"] and second["tokens"] > first["tokens"]
    assert second["loss_curve"][: len(first["loss_curve"])] == first["loss_curve"]
    assert trained(tmp_path) == second, "nothing is left to be trained"


def test_another_size_is_not_gone_on_with(tmp_path: Path) -> None:
    trained(tmp_path, "--stop-after", "0.1")
    with pytest.raises(SystemExit, match="size tiny, not nano"):
        trained(tmp_path, "--size", "nano")


def samples(task: Task, count: int, role_last: float, seed: int = 0) -> list[list[tuple[str, bool]]]:
    rng = random.Random(seed)
    streams = {task.name: task.questions("train", seed)}
    return [sample(rng, streams, {task.name: 1.0}, 0.3, role_last) for _ in range(count)]


@pytest.mark.parametrize("task", ALL_TASKS.values(), ids=ALL_TASKS)
def test_a_share_of_the_prompts_has_the_role_last(task: Task) -> None:
    roles = [role.system for role in task.roles]
    for share, expected in ((0.0, 0), (0.5, 100), (1.0, 200)):
        prompts = [text for text, _ in map(prompt, samples(task, 200, share))]
        last = [text for text in prompts if text.startswith(f"{BOS}<|user|>Question: ")]
        assert len(last) == pytest.approx(expected, abs=25 * (0 < share < 1))
        assert all(
            text.startswith(f"{BOS}<|system|>You are") or "You make" in text for text in set(prompts) - set(last)
        )
        assert all(sum(text.count(role) for role in roles) == 1 for text in prompts)
        assert all(max(map(text.rfind, roles)) > text.rfind("say:\n") for text in last)


def prompt(segments: list[tuple[str, bool]]) -> tuple[str, str]:
    """The text of a sample's prompt, and its answer."""
    *before, (answer, learned), _ = segments
    assert learned
    return "".join(text for text, _ in before), answer


def test_what_is_learned_follows_from_what_is_read() -> None:
    """Some Searchers are made wrong: the agents that read them learn to react to what they read."""
    odd = 0
    for segments in samples(ALL_TASKS["tools"], 400, 0.5):
        text, answer = prompt(segments)
        if "Now answer as Inspector" not in text or "Searcher:\n" not in text:
            continue
        claim = text.partition("Searcher:\n")[2].partition("\nThe search finds:\n")[0]
        assert answer.startswith("{") != claim.startswith("{")
        odd += (claim, False) in segments
    assert odd > 1
