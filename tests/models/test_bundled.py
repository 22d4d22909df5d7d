"""The bundled models go by their names, and each answers what it is there for."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.lab.comparison import LabSettings, run_pairs
from benchmarks.lab.methods import METHODS, fitting_model
from benchmarks.workloads.catalog import load
from kedge.engine.common.model_folder import model_path
from kedge.errors import ModelNotFound
from kedge.models import BUNDLED, NANO, NANO_BOTH, bundled, default_model, find_model
from kedge.workloads.miniature import ALL_TASKS, TASKS, TOOLS


def test_names_are_folders_of_the_package_and_nothing_is_the_default(tmp_path: Path) -> None:
    assert model_path(None) == default_model() == model_path(NANO) == model_path(Path(NANO))
    assert {model_path(name).name for name in BUNDLED} == set(BUNDLED)
    assert all((model_path(name) / "config.json").is_file() for name in BUNDLED)
    for folder in (tmp_path, Path("llama")):
        with pytest.raises(ModelNotFound, match="by name are nano, nano-both and smollm2"):
            model_path(folder)
    (tmp_path / "config.json").touch()
    assert model_path(tmp_path) == tmp_path


def test_a_folder_here_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NANO_BOTH).mkdir()
    (tmp_path / NANO_BOTH / "config.json").touch()
    assert bundled(NANO_BOTH) is None and model_path(NANO_BOTH) == Path(NANO_BOTH)
    (tmp_path / NANO).mkdir()
    assert model_path(None) == default_model() != Path(NANO)


def test_both_orders_and_all_tasks_are_on_record_within_two_points_of_the_default() -> None:
    record, before = (json.loads((model_path(name) / "training.json").read_text()) for name in (NANO_BOTH, NANO))
    for key in ("accuracy", "accuracy_role_last"):
        assert set(record[key]) == set(ALL_TASKS)
        assert min(record[key][TOOLS.name].values()) >= 0.95
        for task in TASKS:
            assert all(record[key][task][agent] >= share - 0.02 for agent, share in before["accuracy"][task].items())
    assert sum(file.stat().st_size for file in model_path(NANO_BOTH).glob("*.safetensors")) <= 16 << 20


def test_the_lab_takes_the_model_that_knows_the_task_and_the_order() -> None:
    both = Path(NANO_BOTH)
    assert fitting_model("tools", [METHODS["token"]]) == fitting_model("math", [METHODS["role-last"]]) == both
    assert fitting_model("math", [METHODS["token"], METHODS["dense"]]) is None


def test_agents_decide_between_calls_and_prose_in_both_orders() -> None:
    workload, questions = load("tools", seed=11)
    runs = run_pairs(workload, islice(questions, 4), ["dense", "role-last", "kedge"], LabSettings())
    for method, done in runs.items():
        summary = done.summary()
        assert (summary.accuracy, summary.flips) == (1, 0), method
        assert set(summary.agents.values()) == {1.0}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
        ("pytorch_model.bin", "name its folder"),
        ("model.safetensors", "name its folder"),
        ("absent.gguf", "no such folder"),
    ],
)
def test_what_is_no_folder_says_what_to_do(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/" not in name and "absent" not in name:
        Path(name).write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=advice):
        find_model(name)
