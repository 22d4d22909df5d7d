"""What an engine and its guard have learned, in a folder: it comes back whole and belongs to one model."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kedge.engine.common.state import saving
from kedge.engine.common.state.files import MANIFEST, SUFFIX, StateFolder
from kedge.engine.common.state.saving import Snapshots
from kedge.engine.common.state.snapshot import EngineState, SavedState
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, EngineClosed, StateRefused
from kedge.guard import DecisionKind
from kedge.reuse.guard import guard as guard_module
from kedge.reuse.guard.comparison import DecisionComparison
from kedge.reuse.guard.guard import QualityGuard
from kedge.settings import AnchorSettings, GuardSettings, PlannerConstants
from kedge.types import GenerateRequest, ReuseMode, SampleId, Segment
from tests.engine.common.state.test_files import damage, listed, record, record_files, saved
from tests.engine.local.conftest import engine_of, served, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

SETTINGS: dict[str, object] = {
    "anchors": AnchorSettings(**OPEN),
    "planner": PlannerConstants(by_cost=False, recompute_head=0),
}


def engine(family: str = "llama", **settings: object) -> LocalEngine:
    return engine_of(tiny_model(family), **{**SETTINGS, **settings})


def ask(engine: LocalEngine, seed: int, hint: int | None = None) -> tuple[str, int]:
    """An answer to a question, and how many tokens were translated for it; then all is learned that can be."""
    done = served(engine, request(tokens(seed, 20), tokens(hint or seed + 1, 8)))
    return done.text, done.receipt.translated


@pytest.fixture
def teacher() -> Iterator[LocalEngine]:
    """An engine that has learned something."""
    with engine() as built:
        for seed in (50, 60):
            ask(built, seed)
        yield built


def test_what_has_not_changed_is_not_written_again(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in [*record_files(tmp_path), tmp_path / MANIFEST]}
    teacher.save(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [*record_files(tmp_path), tmp_path / MANIFEST]} == before
    ask(teacher, 90)
    teacher.save(tmp_path)
    kept = set(record_files(tmp_path)) & before.keys()
    assert (len(record_files(tmp_path)), len(kept)) == (3, 1), "the template is as it was, both pools are new"


def with_other_weights() -> PreTrainedModel:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    return model


STRANGERS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, object]]] = {
    "another family": (partial(tiny_model, "qwen2"), {}),
    "another rotation": (partial(tiny_model, "yarn"), {}),
    "another estimator": (partial(tiny_model, "llama"), {"anchors": AnchorSettings(**OPEN, estimator="interpolate")}),
    "another precision": (lambda: tiny_model("llama").bfloat16(), {}),
    "other weights": (with_other_weights, {}),
}


@pytest.mark.parametrize(("make", "other"), STRANGERS.values(), ids=STRANGERS)
def test_state_of_another_model_is_refused_and_put_aside(
    teacher: LocalEngine, tmp_path: Path, make: Callable[[], PreTrainedModel], other: dict[str, object]
) -> None:
    teacher.save(tmp_path)
    teacher.close()
    written = {path.name for path in tmp_path.iterdir()} - {"lock"}
    with engine_of(make(), **{**SETTINGS, **other}) as stranger:
        with pytest.raises(StateRefused, match="identity|dtype='float32': this engine computes in bfloat16: set dtype"):
            stranger.load(tmp_path)
        assert stranger.inspect()["anchors"]["pools"] == 0
        stranger.save(tmp_path)
        assert {path.name for path in (tmp_path / "refused-1").iterdir()} == written
        assert stranger.load(tmp_path).pools == 0


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


def test_a_part_of_a_template_that_an_earlier_version_saved_is_computed_again(
    teacher: LocalEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (key,) = teacher.query(lambda parts: parts.bases.lasting(values=False))
    whole = teacher.query(lambda parts: parts.bases.stored(key).parts)
    teacher.query(lambda parts: parts.bases.put_prefix(*key, dict([*whole.items()][-1:])))
    teacher.save(tmp_path)
    teacher.close()
    with engine() as pupil:
        pupil.load(tmp_path)
        ask(pupil, 70)
        assert pupil.query(lambda parts: parts.bases.stored(key).parts).keys() == whole.keys()
    assert caplog.text.count("lacks segments") == 1


def test_a_file_that_vanishes_while_the_engine_runs_is_written_again(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    victims = record_files(tmp_path)
    damage(victims[0], "missing")
    damage(victims[1], "truncated")
    damage(tmp_path / MANIFEST, "flipped bit")
    teacher.save(tmp_path)
    assert teacher.load(tmp_path).damaged == ()


def test_a_folder_is_its_engines_from_wherever_it_is_named_until_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    with engine() as first, engine() as second:
        for place in (tmp_path, tmp_path / "other"):
            monkeypatch.chdir(place)
            first.save("state")
        second.load(tmp_path / "state")
        with pytest.raises(ConfigError, match="another process uses"):
            second.load("state")
        first.close()
        for call in (first.save, first.load):
            with pytest.raises(EngineClosed):
                call("state")
        second.load("state")


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


def test_an_engine_can_change_its_folder_and_an_empty_one_holds_nothing(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path / "a")
    assert teacher.load(tmp_path / "new").pools == teacher.inspect()["anchors"]["anchors"] == 0
    assert teacher.load(tmp_path / "a").pools == 2


MODEL = "a model"
CHANGED = DecisionComparison({DecisionKind.FAR: True}, 1.0)


def asked(workflow: str, agent: str = "solver", tenant: str = "default") -> GenerateRequest:
    value = Segment((1, 2), "question", SampleId.parse("input_question@0"))
    return GenerateRequest((value,), reuse=ReuseMode.TRANSLATE, tenant=tenant, workflow=workflow, agent=agent)


def opened(folder: Path, guard: QualityGuard) -> closing[EngineState]:
    return closing(EngineState(folder, MODEL, guard=guard))


def save_guard(folder: Path, *workflows: str) -> QualityGuard:
    """Save the records of a guard that has withheld the solver in these workflows, in the n-th after n + 1 changes."""
    one = QualityGuard(GuardSettings())
    for number, workflow in enumerate(workflows):
        for _ in range(number + 1):
            one.observe(asked(workflow), ("question",), CHANGED)
    with opened(folder, one) as state:
        assert state.save().nbytes > 0
    return one


def test_damage_and_what_is_no_record_of_a_guard_lose_nothing_else(tmp_path: Path) -> None:
    save_guard(tmp_path, "flow-one", "flow-two")
    (damaged,) = [path for path in tmp_path.glob(f"*{SUFFIX}") if b"flow-one" in path.read_bytes()]
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    after = QualityGuard(GuardSettings())
    with opened(tmp_path, after) as state:
        (damage,) = state.load().damaged
    assert damage.name[-1] == "flow-one" and [one["workflow"] for one in after.stats()] == ["flow-two"]
    pools = tmp_path / "pools"
    saved(pools, {"pool": 1}, identity=MODEL)
    with opened(pools, QualityGuard(GuardSettings())) as state:
        assert [damage.name for damage in state.load().damaged] == [record("pool", 1).name]


def test_no_more_is_restored_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "ENTRIES", 1)
    save_guard(tmp_path, "a", "b")
    small = QualityGuard(GuardSettings())
    with opened(tmp_path, small) as state:
        state.load()
    assert [one["workflow"] for one in small.stats()] == ["b"]


def test_unchanged_records_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, put = save_guard(tmp_path, "a"), StateFolder.put
    writes: list[str] = []
    monkeypatch.setattr(StateFolder, "put", lambda folder, what: (writes.append(what.name[-1]), put(folder, what))[1])
    with opened(tmp_path, one) as state:
        for _ in range(3):
            state.save()
        one.observe(asked("b"), ("question",), CHANGED)
        state.save()
    assert writes == ["a", "b"]


def test_an_agent_that_an_engine_withheld_is_withheld_after_a_restart(tmp_path: Path) -> None:
    with engine_of(tiny_model("llama"), guard=GuardSettings()) as one:
        for number, workflow in enumerate("ab"):
            for _ in range(1 + 9 * number):  # the second one has a breach
                one._guard.guard.observe(asked(workflow), ("question",), CHANGED)
        one.save(tmp_path)
        saved = one._guard.guard.saved()
        one._guard.guard.observe(asked("c"), ("question",), CHANGED)
        one.load(tmp_path)
        assert {found["workflow"] for found in one._guard.guard.stats()} == {"a", "b"}, "records are replaced"
    with engine_of(tiny_model("llama"), guard=GuardSettings()) as other:
        assert not other.load(tmp_path).damaged
        found = other._guard.guard
        assert found.saved() == saved
        orders = [found.verdict(asked(workflow)).orders for workflow in "ab"]
        assert [one.withheld for one in orders] == [{"question"}] * 2
        assert orders[0].epoch == 0 and orders[1].epoch >= 1, "its anchors are those of an earlier epoch"
        assert not found.verdict(asked("a", tenant="other")).orders.withheld
        assert not found.verdict(asked("a", agent="critic")).orders.withheld


LONGEST = 60.0
STATE = SavedState(1, 2, 3, 4, 0.5)


def snapshots(load: Callable[[], SavedState], save: Callable[[], SavedState | None]) -> tuple[Snapshots, Counter[str]]:
    """Snapshots of a folder, and the counts of what became of them; `given back` is one."""
    counts = Counter[str]()
    made = partial(Snapshots, Path("folder"), load, save, give_back=lambda: counts.update(["given back"]))
    return made(count=lambda outcome: counts.update([outcome])), counts


def test_failures_are_counted_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SNAPSHOT_SECONDS", 0.001)
    tried, is_full = threading.Semaphore(0), threading.Event()

    def save() -> SavedState:
        tried.release()
        if is_full.is_set():
            raise OSError("full")
        return STATE

    is_full.set()
    made, counts = snapshots(lambda: STATE, save)
    made.start()
    assert all(tried.acquire(timeout=LONGEST) for _ in range(3))
    is_full.clear()
    made.close()
    assert counts["failed"] >= 2 and counts["saved"] >= 1


@pytest.mark.parametrize("kept", [STATE, None])
def test_the_end_is_saved_once_if_it_is_worth_keeping(kept: SavedState | None) -> None:
    made, counts = snapshots(lambda: STATE, lambda: kept)
    made.start()
    made.close()
    made.close()
    assert counts == ({"saved": 1} if kept else {}) | {"given back": 1}


def test_what_a_start_can_find() -> None:
    def load() -> SavedState:
        if found:
            raise found.pop()
        return STATE

    found: list[Exception] = [PermissionError("no"), StateRefused("manifest.json: ranks", [2], "this engine has [1]")]
    made, counts = snapshots(load, lambda: None)
    assert not made.load() and counts == {"refused": 1}
    with pytest.raises(ConfigError, match="cannot be used: no"):
        made.load()
    assert made.load() and counts == {"refused": 1}
