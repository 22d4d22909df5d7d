"""Learned state in a folder: it comes back whole, belongs to one model, and survives a kill at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.engine.common.state.files import MANIFEST
from kedge.engine.local.engine import LocalEngine
from kedge.errors import EngineClosed, StateRefused
from kedge.settings import AnchorSettings, PlannerConstants
from tests.engine.common.state_helpers import damage, listed, record_files
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

ROOT = Path(__file__).parents[4]
SETTINGS: dict[str, object] = {
    "anchors": AnchorSettings(**OPEN),
    "planner": PlannerConstants(by_cost=False, recompute_head=0),
}


def engine(family: str = "llama", **settings: object) -> LocalEngine:
    return engine_of(tiny_model(family), **{**SETTINGS, **settings})


def ask(engine: LocalEngine, seed: int, hint: int | None = None) -> tuple[str, int]:
    """An answer to a question, and how many tokens were translated for it; then all is learned that can be."""
    done = engine.submit(request(tokens(seed, 20), tokens(hint or seed + 1, 8))).result(60)
    engine.wait_idle(60)
    return done.text, done.receipt.translated


@pytest.fixture
def teacher() -> Iterator[LocalEngine]:
    """An engine that has learned something."""
    with engine() as built:
        for seed in (50, 60):
            ask(built, seed)
        yield built


def test_an_engine_goes_on_where_another_ended(teacher: LocalEngine, tmp_path: Path) -> None:
    saved = teacher.save(tmp_path)
    assert (saved.pools, saved.templates) == (2, 1)
    assert saved.nbytes == sum(path.stat().st_size for path in record_files(tmp_path))
    asked = ((70, None), (80, None), (70, 81))
    wanted = [ask(teacher, *one) for one in asked]
    assert wanted[2][1] > 0
    teacher.close()
    with engine() as pupil:
        assert pupil.load(tmp_path).pools == 2
        assert [ask(pupil, *one) for one in asked] == wanted


def test_an_empty_folder_holds_nothing(teacher: LocalEngine, tmp_path: Path) -> None:
    assert teacher.load(tmp_path / "new").pools == 0
    assert teacher.inspect()["anchors"]["anchors"] == 0


def test_what_has_not_changed_is_not_written_again(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in [*record_files(tmp_path), tmp_path / MANIFEST]}
    teacher.save(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [*record_files(tmp_path), tmp_path / MANIFEST]} == before
    ask(teacher, 90)
    teacher.save(tmp_path)
    kept = set(record_files(tmp_path)) & before.keys()
    assert (len(record_files(tmp_path)), len(kept)) == (3, 1), "the template is as it was, both pools are new"


@pytest.mark.parametrize(
    "other",
    [
        {"family": "qwen2"},
        {"family": "yarn"},
        {"anchors": AnchorSettings(**OPEN, estimator="interpolate")},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_state_of_another_model_is_refused_and_put_aside(
    teacher: LocalEngine, tmp_path: Path, other: dict[str, object]
) -> None:
    teacher.save(tmp_path)
    teacher.close()
    written = {path.name for path in tmp_path.iterdir()} - {"lock"}
    model = tiny_model(str(other.get("family", "llama")))
    if other.pop("dtype", None):
        model = model.bfloat16()
    other.pop("family", None)
    with engine_of(model, **{**SETTINGS, **other}) as stranger:
        with pytest.raises(StateRefused, match="identity"):
            stranger.load(tmp_path)
        assert stranger.inspect()["anchors"]["pools"] == 0
        stranger.save(tmp_path)
        assert {path.name for path in (tmp_path / "refused-1").iterdir()} == written
        assert stranger.load(tmp_path).pools == 0


def test_other_weights_are_another_model(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    teacher.close()
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    with engine_of(model, **SETTINGS) as stranger, pytest.raises(StateRefused, match="identity"):
        stranger.load(tmp_path)


def files_of(folder: Path, kind: str) -> list[Path]:
    """Files of the last snapshot that hold pools, or templates."""
    return [folder / one["file"] for one in listed(folder / MANIFEST)["entries"] if one["name"][0] == kind]


@pytest.mark.parametrize("kind", ["pool", "template"])
def test_what_is_lost_is_lost_alone_and_learned_again(teacher: LocalEngine, tmp_path: Path, kind: str) -> None:
    saved = teacher.save(tmp_path)
    damage(files_of(tmp_path, kind)[0], "flipped bit")
    teacher.close()
    with engine() as pupil:
        found = pupil.load(tmp_path)
        assert [one.name[0] for one in found.damaged] == [kind]
        assert found.pools + found.templates == saved.pools + saved.templates - 1
        ask(pupil, 70)
        assert pupil.save(tmp_path).pools == 2
        assert pupil.load(tmp_path).damaged == ()


def test_a_file_that_vanishes_while_the_engine_runs_is_written_again(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    victims = record_files(tmp_path)
    damage(victims[0], "missing")
    damage(victims[1], "truncated")
    teacher.save(tmp_path)
    assert teacher.load(tmp_path).damaged == ()


SAVES_FOR_EVER = """
import sys
from pathlib import Path
from tests.engine.common.state.test_snapshot import ask, engine
with engine() as built:
    for seed in range(10**6):
        ask(built, 10 * seed)
        built.save(sys.argv[1])
        print(seed, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_its_last_snapshot(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path)]
    for at in (1, 4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout
            for line in process.stdout:
                if int(line) == at:
                    break
            time.sleep(0.003 * at)  # into the middle of what comes next
            process.kill()
        with engine() as survivor:
            found = survivor.load(tmp_path)
            assert (found.pools, found.templates) == (2, 1)
            assert survivor.inspect()["anchors"]["anchors"] >= 2 * min(at + 1, 20)
            survivor.query(lambda parts: parts.learned[0].check_integrity())


def test_saving_while_the_engine_learns(teacher: LocalEngine, tmp_path: Path) -> None:
    streams = [teacher.submit(request(tokens(seed, 20), tokens(seed + 1, 8))) for seed in range(200, 240)]
    saved = [teacher.save(tmp_path) for _ in range(5)]
    assert all(stream.result(60).tokens for stream in streams)
    assert all(one.pools <= 2 for one in saved)
    teacher.wait_idle(60)
    teacher.save(tmp_path)
    before = teacher.inspect()["anchors"]["anchors"]
    teacher.load(tmp_path)
    assert teacher.inspect()["anchors"]["anchors"] == before


def test_a_closed_engine_saves_nothing(tmp_path: Path) -> None:
    closed = engine()
    closed.close()
    with pytest.raises(EngineClosed):
        closed.save(tmp_path)


def test_an_engine_can_change_its_folder(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path / "a")
    teacher.save(tmp_path / "b")
    assert teacher.load(tmp_path / "a").pools == 2
