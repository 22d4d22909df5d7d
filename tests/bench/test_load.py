"""The measurement under load: what is asked, what is counted, and what a run that fails changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from kedge.bench.load import (
    AGENTS,
    COLD,
    OPEN,
    PREFIX,
    WARM,
    LoadSettings,
    LoadTeam,
    TeamSizes,
    TimedCall,
    WindowEngine,
    case_of,
    load,
    measure,
    now,
    random_flow,
    random_team,
    reading_team,
    teach,
    word_tokenizer,
)
from kedge.bench.shapes import SHAPES, Loaded, load_model, random_runner
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, EngineClosed
from kedge.runner.prompts import compiled
from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings
from kedge.types import (
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SamplingParams,
    Segment,
)

TINY = TeamSizes(question=40, answer=6)
FIGURES = {
    "teams_per_min", "ttft_p50_ms", "ttft_p99_ms", "latency_p50_s", "latency_p99_s", "translated_share",
}  # fmt: skip


LONG = LoadSettings(seconds=600, device="cpu")
"""A window that nobody waits for: clients without questions end it."""


VOCAB = SHAPES["tiny"]["vocab_size"]
TEAM = random_team(VOCAB, TINY, 0)


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    runner, _ = random_runner("tiny", "cpu")
    runner.eos_token_ids = frozenset()
    return runner, word_tokenizer(VOCAB)


@pytest.fixture(scope="module")
def nano() -> Loaded:
    return load_model(None, EngineSettings(device="cpu"))


def test_a_random_team_has_prompts_and_answers_of_the_sizes_that_it_is_named_for() -> None:
    (runner, tokenizer), asked = case_of("32m", LoadSettings(device="cpu"))
    prompts = compiled(asked.flow, tokenizer).values()
    assert [len(prompt.prefixes[0]) for prompt in prompts] == [PREFIX] * AGENTS
    assert [len(tokenizer.encode(text)) for text in islice(asked.questions("a"), 3)] == [500] * 3
    assert {agent.max_tokens for agent in asked.flow.agents} == {64}
    assert not runner.eos_token_ids
    assert random_flow(16384, 64) == asked.flow


@pytest.mark.parametrize("make", [reading_team, partial(random_team, VOCAB, TINY)])
def test_a_client_has_the_same_questions_every_time_and_no_other_client_has_them(make: Any) -> None:
    asked = make(0)
    first, again, other = (list(islice(asked.questions(name), 5)) for name in ("a", "a", "b"))
    assert first == again
    assert len({*first, *other}) == 10
    assert list(islice(make(1).questions("a"), 5)) != first


def some(asked: LoadTeam, count: int) -> LoadTeam:
    """The same team with so many questions for each client: then the clients end, whatever the clock says."""
    return replace(asked, questions=lambda client: islice(asked.questions(client), count))


@pytest.mark.parametrize("mode", ReuseMode)
def test_two_clients_run_the_team(tiny: Loaded, mode: ReuseMode) -> None:
    figures = load(tiny, some(TEAM, 2), LONG, 2, mode).as_json()
    assert set(figures) >= FIGURES
    assert (figures["runs"], figures["calls"], figures["errors"]) == (4, 4 * 5, 0)
    shares = {name: figures[f"{name}_share"] for name in ("translated", "exact", "computed")}
    assert sum(shares.values()) == pytest.approx(1, abs=2e-4)
    assert (shares["exact"] > 0) == (mode is not ReuseMode.OFF)


def test_random_weights_are_translated_once_enough_has_been_learned(
    tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it costs: what pays on a busy machine changes from run to run."""
    settings = LoadSettings.engine
    always = {"planner": PlannerSettings(by_cost=False)}
    monkeypatch.setattr(LoadSettings, "engine", lambda self, *given: settings(self, *given).model_copy(update=always))
    figures = load(tiny, some(TEAM, 12), LONG, 1, ReuseMode.TRANSLATE).as_json()
    assert figures["translated_share"] > 0


def test_all_modes_are_asked_the_same(tiny: Loaded) -> None:
    heard: list[list[str]] = []
    for mode in ReuseMode:
        questions: list[str] = []
        asked = some(replace(TEAM, questions=partial(heard_questions, TEAM, questions)), 2)
        load(tiny, asked, LONG, 2, mode)
        heard.append(sorted(questions))
    assert heard[0] == heard[1] == heard[2]
    assert len(set(heard[0])) == 4


def heard_questions(asked: LoadTeam, heard: list[str], client: str) -> Iterator[str]:
    for question in asked.questions(client):
        heard.append(question)
        yield question


def test_a_run_that_fails_is_counted_and_its_client_goes_on(tiny: Loaded) -> None:
    def asked(client: str) -> Iterator[str]:
        return chain([" "], islice(TEAM.questions(client), 1), [" "])

    figures = load(tiny, replace(TEAM, questions=asked), LONG, 2, ReuseMode.TRANSLATE).as_json()
    assert figures["errors_by_kind"] == {"MissingInput": 4}
    assert (figures["errors"], figures["runs"], figures["calls"]) == (4, 2, 2 * AGENTS)


def test_a_bug_in_a_client_is_not_hidden(tiny: Loaded) -> None:
    def asked(client: str) -> Iterator[str]:
        yield next(TEAM.questions(client))
        raise ValueError(client)

    with pytest.raises(ValueError, match="client-0"):
        load(tiny, replace(TEAM, questions=asked), LONG, 1, ReuseMode.OFF)


def test_no_call_is_taken_after_the_window(tiny: Loaded) -> None:
    calls: list[TimedCall] = []
    with LocalEngine.from_runner(*tiny, LONG.engine()) as inner:
        watched = WindowEngine(inner, now(), calls)
        with pytest.raises(EngineClosed, match="window"):
            watched.submit(GenerateRequest((Segment((1, 2, 3), "p0"),)))
    assert not calls


def test_of_a_window_the_calls_that_end_well_are_kept(tiny: Loaded) -> None:
    calls: list[TimedCall] = []
    request = GenerateRequest((Segment((1, 2, 3), "p0"),), SamplingParams(2), run=RunId("r"))
    with LocalEngine.from_runner(*tiny, LONG.engine()) as inner:
        watched = WindowEngine(inner, now() + 600, calls)
        stopped = watched.submit(replace(request, sampling=SamplingParams(500), request_id=RequestId("stopped")))
        watched.cancel(stopped.request_id)
        stopped.result()
        answered = watched.submit(request).result()
    assert [(one.run, one.completion) for one in calls] == [("r", answered)]
    assert all(one.began <= one.ended for one in calls)


@pytest.fixture(scope="module")
def readers() -> LoadTeam:
    return replace(reading_team(0), guard={"fidelity": 0.5})


def test_a_warm_team_starts_from_what_a_run_before_has_proved(nano: Loaded, readers: LoadTeam, tmp_path: Path) -> None:
    with LocalEngine.from_runner(*nano, LONG.engine(readers)) as engine:
        teach(engine, readers, 2, tmp_path)
    figures = load(nano, some(readers, 0), LONG, 1, ReuseMode.TRANSLATE, tmp_path).as_json()
    assert figures["proofs"].keys() >= {agent.id for agent in readers.flow.agents[1:]}
    assert not load(nano, some(readers, 0), LONG, 1, ReuseMode.TRANSLATE).as_json()["proofs"]


def test_what_served_says_how_near_it_is_and_what_proving_took(nano: Loaded, readers: LoadTeam) -> None:
    figures = load(nano, some(readers, 3), LONG, 2, ReuseMode.TRANSLATE).as_json()
    assert (figures["calls"], figures["errors"]) == (2 * 3 * 3, 0)
    assert 0 <= figures["kl"] <= 0.5 and figures["proofs"]


def test_all_modes_of_all_cases_are_measured() -> None:
    settings = LoadSettings(("tiny",), (1,), seconds=0.1, model_size="tiny", device="cpu")
    assert settings.case_names == ("tiny", "tiny-long")
    assert LoadSettings(model=Path("nano")).case_names == (COLD, WARM, "cold-long", "warm-long")
    keys = [key for key, _ in measure(settings)]
    assert keys == [("tiny", 1, mode) for mode in ReuseMode]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cases": ("7b",)}, "32m-long"),
        ({"cases": ("32m",), "model_size": "8b"}, "8b-long"),
        ({"clients": (0,)}, "clients"),
        ({"cases": ("32m",), "model": Path("nano")}, "cold, warm"),
        ({"dtype": "int3"}, "dtype"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"anchor_memory": "much"}, r"anchors\.max_bytes='much'"),
        ({"base_memory": "0"}, r"anchors\.max_base_bytes='0'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        next(measure(LoadSettings(**given)))


def test_memory_is_of_kv_anchors_and_base_kv_and_otherwise_the_engines() -> None:
    known = AnchorSettings(**OPEN)
    settings = LoadSettings(kv_memory="3GiB", anchor_memory="12GiB", base_memory="5GiB").engine(TEAM)
    wanted = known.model_copy(update={"max_bytes": 12 << 30, "max_base_bytes": 5 << 30})
    assert (settings.kv_memory, settings.anchors) == (3 << 30, wanted)
    assert LoadSettings().engine(TEAM).anchors == known
    assert LoadSettings().engine() == EngineSettings()
