"""Learned state in a folder: it comes back whole, belongs to one model, and survives a kill at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kedge.config import AnchorSettings, PlannerSettings
from kedge.engine.local.engine import LocalEngine
from kedge.engine.local.state import MANIFEST, SUFFIX
from kedge.errors import ConfigError, EngineClosed, StateRefused
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import OPEN, request, tokens

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, object] = {
    "anchors": AnchorSettings(**OPEN),
    "planner": PlannerSettings(by_cost=False, recompute_head=0),
}


def engine(family: str = "llama", **settings: object) -> LocalEngine:
    return engine_of(tiny_model(family), **{**SETTINGS, **settings})


def ask(engine: LocalEngine, seed: int) -> tuple[str, int]:
    """An answer to a question, and how many tokens were translated for it; then all is learned that can be."""
    done = engine.submit(request(tokens(seed, 20), tokens(seed + 1, 8))).result(30)
    engine.wait_idle(30)
    return done.text, done.receipt.translated


@pytest.fixture
def teacher() -> Iterator[LocalEngine]:
    """An engine that has learned something."""
    with engine() as built:
        for seed in (50, 60):
            ask(built, seed)
        yield built


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def test_an_engine_goes_on_where_another_ended(teacher: LocalEngine, tmp_path: Path) -> None:
    saved = teacher.save(tmp_path)
    assert (saved.pools, saved.templates) == (2, 1)
    assert saved.nbytes == sum(path.stat().st_size for path in files(tmp_path))
    wanted = [ask(teacher, seed) for seed in (70, 70, 80, 80)]
    assert wanted[1][1] > 0
    teacher.close()
    with engine() as pupil:
        assert pupil.load(tmp_path).pools == 2
        assert [ask(pupil, seed) for seed in (70, 70, 80, 80)] == wanted


def test_an_empty_folder_holds_nothing(teacher: LocalEngine, tmp_path: Path) -> None:
    assert teacher.load(tmp_path / "new").pools == 0
    assert teacher.inspect()["anchors"]["anchors"] == 0


def test_what_has_not_changed_is_not_written_again(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in [*files(tmp_path), tmp_path / MANIFEST]}
    teacher.save(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in [*files(tmp_path), tmp_path / MANIFEST]} == before
    ask(teacher, 90)
    teacher.save(tmp_path)
    assert len(files(tmp_path)) == 3
    assert sum(path in before for path in files(tmp_path)) == 1, "the template is as it was, both pools are new"


@pytest.mark.parametrize(
    "other",
    [
        {"family": "qwen2"},
        {"family": "yarn"},
        {"anchors": AnchorSettings(**OPEN, match_dim=8)},
        {"anchors": AnchorSettings(**OPEN, estimator="interpolate", criterion="entropy")},
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


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def damage(folder: Path, how: str) -> None:
    manifest, record = folder / MANIFEST, files(folder)[0]
    entries = json.loads(manifest.read_text())["entries"]
    match how:
        case "no file":
            record.unlink()
        case "truncated file":
            record.write_bytes(record.read_bytes()[:-1])
        case "empty file":
            record.write_bytes(b"")
        case "flipped bit":
            content = bytearray(record.read_bytes())
            content[len(content) // 2] ^= 1
            record.write_bytes(content)
        case "truncated manifest":
            manifest.write_bytes(manifest.read_bytes()[:-9])
        case "empty manifest":
            manifest.write_bytes(b"")
        case "binary manifest":
            manifest.write_bytes(b"\xff\xfe\x00")
        case "manifest of a list":
            manifest.write_text("[]")
        case "no entries":
            change(manifest, entries=None)
        case "other format":
            change(manifest, format=1)
        case "other tenant":
            entries[-1]["name"][1] = "another"
            change(manifest, entries=entries)
        case "swapped files":
            entries[0]["file"], entries[1]["file"] = entries[1]["file"], entries[0]["file"]
            change(manifest, entries=entries)
        case "a path outside":
            entries[0]["file"] = "../../etc/passwd"
            change(manifest, entries=entries)


@pytest.mark.parametrize(
    "how",
    ["no file", "truncated file", "empty file", "flipped bit", "truncated manifest", "empty manifest",
     "binary manifest", "manifest of a list", "no entries", "other format", "other tenant", "swapped files",
     "a path outside"],
)  # fmt: skip
def test_damaged_state_is_refused_whole(teacher: LocalEngine, tmp_path: Path, how: str) -> None:
    teacher.save(tmp_path)
    before = teacher.inspect()["anchors"]
    damage(tmp_path, how)
    with pytest.raises(StateRefused):
        teacher.load(tmp_path)
    assert teacher.inspect()["anchors"] == before, "nothing has changed"
    with engine() as fresh:
        with pytest.raises(ConfigError, match="another process"):
            fresh.load(tmp_path)
        teacher.close()
        with pytest.raises(StateRefused):
            fresh.load(tmp_path)
        ask(fresh, 50)
        fresh.save(tmp_path)
        assert fresh.load(tmp_path).pools == 2, "a new snapshot is whole again"


def test_a_file_with_the_right_name_and_the_wrong_content(teacher: LocalEngine, tmp_path: Path) -> None:
    """Somebody has put a file of random bytes in, checksum and all."""
    teacher.save(tmp_path)
    content = os.urandom(4096)
    name = hashlib.sha256(content).hexdigest() + SUFFIX
    (tmp_path / name).write_bytes(content)
    entries = json.loads((tmp_path / MANIFEST).read_text())["entries"]
    change(tmp_path / MANIFEST, entries=[{**entries[0], "file": name}, *entries[1:]])
    with pytest.raises(StateRefused, match="makes no sense"):
        teacher.load(tmp_path)


class Crash(Exception):
    pass


def test_wherever_a_snapshot_breaks_off_the_last_complete_one_is_left(
    teacher: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that touches the disk fails once; the folder always holds the old snapshot or the new one."""
    calls, limit = 0, None

    def failing(original):  # noqa: ANN001, ANN202
        def call(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Crash
            return original(*args, **options)

        return call

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    monkeypatch.setattr("kedge.engine.local.state.save_file", failing(save_file))
    seen, learned = set(), 0
    for attempt in range(1, 100):
        ask(teacher, 1000 + 10 * attempt)
        teacher.save(tmp_path)
        old = anchors_in(tmp_path)
        ask(teacher, 1005 + 10 * attempt)
        calls, limit = 0, attempt
        try:
            teacher.save(tmp_path)
            break
        except Crash:
            limit = None
        now = anchors_in(tmp_path)
        seen.add(now - old)
        learned = teacher.inspect()["anchors"]["anchors"]
        assert teacher.load(tmp_path).pools == 2
        assert teacher.inspect()["anchors"]["anchors"] in (learned, learned - 2)
    assert attempt > 8, "there was much to break"
    assert seen == {0, 2}, "some broke before the manifest was renamed and some after"


def anchors_in(folder: Path) -> int:
    """How many anchors the snapshot in a folder holds."""
    total = 0
    for entry in json.loads((folder / MANIFEST).read_text())["entries"]:
        with safe_open(folder / entry["file"], "pt") as file:
            total += len(json.loads(file.metadata()["kedge"])["data"].get("anchors", ()))
    return total


SAVES_FOR_EVER = """
import sys
from pathlib import Path
from tests.engine.local.test_state import ask, engine
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
            survivor._core.learned[0].check_integrity()


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


def test_a_full_disk_is_an_os_error(teacher: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("IoError: No space left on device")

    monkeypatch.setattr("kedge.engine.local.state.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        teacher.save(tmp_path)
    assert teacher.load(tmp_path).pools == 0


def test_a_closed_engine_saves_nothing(tmp_path: Path) -> None:
    closed = engine()
    closed.close()
    with pytest.raises(EngineClosed):
        closed.save(tmp_path)


def test_an_engine_can_change_its_folder(teacher: LocalEngine, tmp_path: Path) -> None:
    teacher.save(tmp_path / "a")
    teacher.save(tmp_path / "b")
    assert teacher.load(tmp_path / "a").pools == 2
