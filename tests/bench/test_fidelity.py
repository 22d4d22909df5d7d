"""Fidelity to dense prefill: yardsticks, intervals, and that questions which count teach nothing."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.bench.fidelity import (
    YARDSTICKS,
    DenseTeam,
    FidelitySettings,
    MethodServer,
    Seen,
    measure,
    over_rounded,
    summary,
)
from kedge.bench.probe import SERVED, method_named
from kedge.bench.shapes import Loaded, load_model
from kedge.errors import ConfigError
from kedge.settings import EngineSettings
from kedge.workloads import real
from kedge.workloads.base import QUESTION
from kedge.workloads.miniature import MATH, questions
from tests.cli.commands import assert_refused, measured
from tests.real import RealModel

FLOW, EXAMPLES = MATH.workflow(), Path(__file__).parents[2] / "examples"
SMALL: Mapping[str, Any] = {"kv_memory": "256 blocks", "device": "cpu"}
SIZES = FidelitySettings(questions=3, taught=5, tokens=8, timed=1, at_once=2, engine=SMALL)


def asked(count: int) -> list[Mapping[str, str]]:
    return [{QUESTION: one.text} for one in islice(questions(5), count)]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(None, EngineSettings(**SMALL))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    methods = {name: SERVED[name] for name in ("dense", "exact", "kedge", "token")}
    return measure(FLOW, asked(8), methods, SIZES)


def test_dense_and_exact_are_the_floor(found: dict[str, Any]) -> None:
    for name in ("dense", "exact"):
        figures = found["methods"][name]
        assert figures["kl"] < 1e-8 and figures["top1"] == figures["same"] == 1
        assert figures["translated"] == 0 and figures["questions"] == 3
    assert found["methods"]["dense"]["computed"] == 1
    for name in ("kedge", "token"):
        assert found["methods"][name]["translated"] > 0.1
        assert found["methods"][name]["kl"] > 1e-8
    assert found["dense"]["ttft_ms"] > 0
    for figures in found["methods"].values():
        low, high = figures["ci95"]["kl"]
        assert figures["ttft_ms"] and low <= figures["kl"] <= high


def test_yardsticks_are_as_coarse_as_their_bits(found: dict[str, Any]) -> None:
    kl = {name: figures["kl"] for name, figures in found["yardsticks"].items()}
    assert 0 < kl["bf16"] < kl["int8"] < kl["int4"] and kl["bf16"] < kl["fp8 e4m3"] < kl["fp8 e5m2"]


def test_kv_that_is_not_rounded_gives_dense_logits(loaded: Loaded) -> None:
    """So that a yardstick measures its rounding and nothing of the way there."""
    team = DenseTeam(FLOW, loaded, SIZES)
    with team.engine:
        one = team.answer((0, asked(1)[0]))
    for agent, result in enumerate(one.results):
        (logits,) = over_rounded(loaded[0], result, one.answer(agent), {"none": lambda kv: kv}).values()
        rows = len(one.answer(agent))
        assert torch.allclose(logits, result.logits[:rows], atol=1e-4)


def test_roundings_by_hand() -> None:
    kv = torch.tensor([[7.0, -3.4, 0.5, 0.0]])
    assert YARDSTICKS["int4"](kv).tolist() == [[7.0, -3.0, 0.0, 0.0]]
    assert YARDSTICKS["fp8 e4m3"](torch.tensor([1.06, 1.07, 1e6, -1e6])).tolist() == [1.0, 1.125, 448.0, -448.0]
    assert YARDSTICKS["fp8 e5m2"](torch.tensor([1.12, 1.13])).tolist() == [1.0, 1.25]
    assert YARDSTICKS["int8"](torch.zeros(2, 4)).tolist() == [[0.0] * 4] * 2


def test_questions_that_count_teach_nothing(loaded: Loaded) -> None:
    team, served = DenseTeam(FLOW, loaded, SIZES), MethodServer(SERVED["token"], loaded, SIZES)
    with team.engine, served.engine:
        answers = [team.answer((number, one)) for number, one in enumerate(asked(8), -5)]
        served.teach(answers[:5])
        store = served.engine._core.parts.anchors
        learned = {key: len(pool.anchors) for key, pool in store.pools.items()}
        observed = served.engine._core.parts.learning.stats()["observed"]
        served.ask(answers[5:], timed=False)
        assert learned and {key: len(pool.anchors) for key, pool in store.pools.items()} == learned
        assert served.engine._core.parts.learning.stats()["observed"] == observed > 0
    assert {one.question for one in served.seen} == {0, 1, 2}


def test_too_few_questions_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"takes 8, and there are 7"):
        measure(FLOW, asked(7), {}, FidelitySettings(questions=3, taught=5, model=Path("nowhere")))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 4))
def test_intervals_hold_the_mean_and_count_questions_not_answers(kls: list[float], answers: int) -> None:
    once = summary([Seen(number, kl, 1.0) for number, kl in enumerate(kls)])
    often = summary([Seen(number, kl, 1.0) for number, kl in enumerate(kls) for _ in range(answers)])
    low, high = once["ci95"]["kl"]
    assert low - 1e-9 <= once["kl"] <= high + 1e-9
    assert often["ci95"]["kl"] == pytest.approx(once["ci95"]["kl"]) and often["questions"] == len(kls)


def test_an_interval_is_that_of_the_mean() -> None:
    """Of a hundred questions, half of which have KL 1 and half 0: 0.5 ± 1.96 times 0.05."""
    low, high = summary([Seen(number, float(number % 2), 1.0) for number in range(100)])["ci95"]["kl"]
    assert low == pytest.approx(0.402, abs=0.02) and high == pytest.approx(0.598, abs=0.02)


def test_methods_take_settings_of_their_own() -> None:
    one = method_named("token:weak_error=0.4:recompute_head=4")
    config = one.config()
    assert (config.anchors.weak_error, config.planner.recompute_head, config.planner.move) == (0.4, 4, "unlearned")
    for wrong in ("tokens", "token:weak=1", "token:weak_error", "token:weak_error=much"):
        with pytest.raises(ConfigError):
            method_named(wrong)


TEAM = ("--task", str(EXAMPLES / "math_team.yaml"), "--dataset", str(EXAMPLES / "questions.jsonl"))


@pytest.mark.parametrize("task", [("--task", "reading"), TEAM], ids=["task", "own"])
def test_the_command_writes_what_it_prints(tmp_path: Path, task: tuple[str, ...]) -> None:
    sizes = ["--questions", "1", "--taught", "1", "--methods", "kedge"]
    saved, shown = measured(tmp_path, "bench", "fidelity", "--model", "nano", *task, *sizes)
    assert "fp8 e4m3" in shown and "kedge" in shown
    assert saved["methods"]["kedge"]["questions"] == 1


def test_a_workflow_needs_questions_and_one_call_of_each_agent() -> None:
    assert_refused("--dataset=None", "bench", "fidelity", "--task", TEAM[1])
    assert_refused("--dataset='nowhere'", "bench", "fidelity", *TEAM[:3], "nowhere")
    debate = "--task", str(EXAMPLES / "debate.yaml"), *TEAM[2:]
    assert_refused("turns=3", "bench", "fidelity", "--model", "nano", *debate)


# a real model --------------------------------------------------------------------------------------------------------

BANDS = {
    "dense": (0.0, 1e-6),
    "exact": (0.0, 1e-6),
    "bf16": (0.0, 1e-4),
    "fp8 e4m3": (0.0003, 0.006),
    "int4": (0.01, 0.15),
    "kedge": (0.005, 0.08),
    "token": (0.0003, 0.02),
}
"""Least and most KL to dense prefill, in nats a token. Anchors after five samples are nearer than moved values."""


def real_kl(smollm2: RealModel, methods: tuple[str, ...], **sizes: int) -> dict[str, float]:
    """Return the KL of `methods` and of the yardsticks on `reading`."""
    engine: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "kv_memory": "256 blocks"}
    settings = FidelitySettings(smollm2.path, timed=0, at_once=4, engine=engine, **sizes)
    team, questions = real.load("reading")
    inputs = [{QUESTION: one.text} for one in questions]
    found = measure(team.workflow(), inputs, {name: SERVED[name] for name in methods}, settings)
    return {name: one["kl"] for name, one in (found["yardsticks"] | found["methods"]).items()}


def outside(kl: dict[str, float]) -> dict[str, float]:
    """Return what is not in its band."""
    return {name: kl[name] for name, (low, high) in BANDS.items() if name in kl and not low <= kl[name] <= high}


@pytest.mark.slow
def test_methods_and_yardsticks_are_in_their_bands(smollm2: RealModel) -> None:
    kl = real_kl(smollm2, ("dense", "exact", "kedge", "token"), questions=4, taught=5, tokens=16)
    assert outside(kl) == {} and kl["token"] < kl["kedge"]


def test_one_question_is_in_the_bands(smollm2: RealModel) -> None:
    assert outside(real_kl(smollm2, ("exact", "kedge"), questions=1, taught=0, tokens=8)) == {}
