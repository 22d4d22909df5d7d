"""The measurement under load: what is asked, what is counted and by how much, and what a run that fails changes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from kedge.bench.flows import percentile
from kedge.bench.load import (
    AGENTS,
    OPEN,
    PREFIX,
    LoadRecord,
    LoadSettings,
    LoadTeam,
    TeamRun,
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
from kedge.settings import AnchorSettings, EngineSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment
from tests.completions import completion

LONG = LoadSettings(seconds=600, device="cpu")
"""A window that nobody waits for: clients without questions end it."""
VOCAB = SHAPES["tiny"]["vocab_size"]
TINY = TeamSizes(question=40, answer=6)
TEAM = random_team(VOCAB, TINY, 0)


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    runner, _ = random_runner("tiny", "cpu")
    runner.eos_token_ids = frozenset()
    return runner, word_tokenizer(VOCAB)


@pytest.fixture(scope="module")
def nano() -> Loaded:
    return load_model(None, EngineSettings(device="cpu"))


@pytest.fixture(scope="module")
def readers() -> LoadTeam:
    return replace(reading_team(0), guard={"fidelity": 0.5})


def some(asked: LoadTeam, count: int) -> LoadTeam:
    """The same team with so many questions for each client: then the clients end, whatever the clock says."""
    return replace(asked, questions=lambda client: islice(asked.questions(client), count))


# what is asked --------------------------------------------------------------------------------------------------------


def test_a_random_team_has_prompts_and_answers_of_the_sizes_that_it_is_named_for() -> None:
    (runner, tokenizer), asked = case_of("tiny", LoadSettings(device="cpu", model_size="tiny"))
    prompts = compiled(asked.flow, tokenizer).values()
    assert [len(prompt.prefixes[0]) for prompt in prompts] == [PREFIX] * AGENTS
    assert [len(tokenizer.encode(text)) for text in islice(asked.questions("a"), 3)] == [500] * 3
    assert not runner.eos_token_ids and random_flow(VOCAB, 64) == asked.flow


@pytest.mark.parametrize("make", [reading_team, partial(random_team, VOCAB, TINY)])
def test_a_client_has_the_same_questions_every_time_and_no_other_client_has_them(make: Any) -> None:
    asked = make(0)
    first, again, other = (list(islice(asked.questions(name), 5)) for name in ("a", "a", "b"))
    assert first == again
    assert len({*first, *other}) == 10
    assert list(islice(make(1).questions("a"), 5)) != first


def test_memory_is_of_kv_anchors_and_base_kv_and_otherwise_the_engines() -> None:
    known = AnchorSettings(**OPEN)
    settings = LoadSettings(kv_memory="3GiB", anchor_memory="12GiB").engine(TEAM)
    wanted = known.model_copy(update={"max_bytes": 12 << 30, "max_base_bytes": 12 << 30})
    assert (settings.kv_memory, settings.anchors) == (3 << 30, wanted)
    assert LoadSettings().engine(TEAM).anchors == known
    assert LoadSettings().engine() == EngineSettings()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cases": ("7b",)}, "32m-long"),
        ({"cases": ("32m",), "model_size": "8b"}, "8b-long"),
        ({"cases": ("32m",), "model": Path("nano")}, "cold, warm, cold-long, warm-long"),
        ({"dtype": "int3"}, "dtype"),
        ({"kv_memory": "much"}, "kv_memory"),
        ({"anchor_memory": "much"}, r"anchors\.max_bytes='much'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        next(measure(LoadSettings(**given)))


# what is counted ------------------------------------------------------------------------------------------------------


def call(run: str, began: float, ended: float, translated: int = 0) -> TimedCall:
    """A call of 10 prompt tokens, some of them translated."""
    done = completion(translated=translated, computed=10 - translated)
    return TimedCall(run, began, ended, done)


def test_calls_count_by_the_share_of_their_time_that_lies_within_the_window() -> None:
    record = LoadRecord(began=100.0, seconds=60.0, calls_per_run=2)
    record.calls += [call("a", 100, 110), call("a", 110, 120), call("b", 140, 180), call("c", 150, 160)]
    figures = record.as_json()
    assert (figures["calls"], figures["teams_per_min"]) == (3, 3.5 / 2)
    assert figures["teams_per_min_last_third"] == 1.5 / 2 * 3


def test_the_calls_of_a_run_that_failed_do_not_count_but_its_error_does() -> None:
    record = LoadRecord(began=0.0, seconds=60.0, calls_per_run=1)
    record.calls += [call("a", 0, 10, translated=5), call("b", 10, 20)]
    record.runs += [TeamRun("a", 10, 10), TeamRun("b", 20, 10, "ToolError"), TeamRun("c", 61, 10, "EngineClosed")]
    figures = record.as_json()
    assert (figures["teams_per_min"], figures["runs"], figures["latency_p50_s"]) == (1.0, 1, 10)
    assert (figures["errors"], figures["errors_by_kind"]) == (1, {"ToolError": 1})
    assert (figures["translated_share"], figures["exact_share"], figures["computed_share"]) == (0.5, 0.0, 0.5)


def test_nothing_that_ended_has_no_percentiles() -> None:
    figures = LoadRecord(began=0.0, seconds=1.0, calls_per_run=5).as_json()
    assert figures["teams_per_min"] == 0
    assert {figures[name] for name in ("ttft_p99_ms", "latency_p50_s", "translated_share")} == {None}


def test_percentiles_are_values_of_the_nearest_rank() -> None:
    assert [percentile(list(map(float, range(101))), share, 1) for share in (0.0, 0.5, 0.99)] == [0.0, 50.0, 99.0]


@pytest.mark.parametrize("mode", ReuseMode)
def test_two_clients_run_the_team(tiny: Loaded, mode: ReuseMode) -> None:
    figures = load(tiny, some(TEAM, 2), LONG, 2, mode).as_json()
    assert (figures["runs"], figures["calls"], figures["errors"]) == (4, 4 * 5, 0)
    assert (figures["exact_share"] > 0) == (mode is not ReuseMode.OFF)


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


def test_of_a_window_the_calls_that_end_well_are_kept_and_none_begins_behind_it(tiny: Loaded) -> None:
    calls: list[TimedCall] = []
    request = GenerateRequest((Segment((1, 2, 3), "p0"),), SamplingParams(2), run="r")
    with LocalEngine.from_runner(*tiny, LONG.engine()) as inner:
        watched = WindowEngine(inner, now() + 600, calls)
        stopped = watched.submit(replace(request, sampling=SamplingParams(500), request_id="stopped"))
        watched.cancel(stopped.request_id)
        stopped.result()
        answered = watched.submit(request).result()
        with pytest.raises(EngineClosed, match="window"):
            WindowEngine(inner, now(), calls).submit(request)
    assert [(one.run, one.completion) for one in calls] == [("r", answered)]
    assert all(one.began <= one.ended for one in calls)


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
