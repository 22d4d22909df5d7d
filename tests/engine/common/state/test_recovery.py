"""Damage of saved state costs what the damaged file held, and only where no earlier copy is sound."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.engine.common.state.files import MANIFEST, MAX_MANIFEST_BYTES, PREVIOUS, SUFFIX
from kedge.engine.common.state.folder import MARK, MAX_PUT_ASIDE
from kedge.errors import StateRefused
from tests.engine.common.state_helpers import (
    DAMAGES,
    THEIRS,
    change,
    damage,
    listed,
    loaded,
    record_files,
    saved,
    state_files,
)

OLD, NEW = {"a": 1, "b": 2, "same": 7, "gone": 5}, {"a": 11, "b": 12, "same": 7, "more": 13}


def put_aside(path: Path) -> list[str]:
    """Names that damaged files had."""
    return sorted(file.name.partition(MARK)[0] for file in path.iterdir() if MARK in file.name)


def file_of(path: Path, pool: str, manifest: str = MANIFEST) -> Path:
    return path / next(one["file"] for one in listed(path / manifest)["entries"] if one["name"][-1] == pool)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_pool_that_is_damaged_is_taken_from_the_snapshot_before(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, OLD, NEW)
    file = file_of(tmp_path, "a")
    damage(file, how)
    values, damages = loaded(tmp_path)
    assert values == {**NEW, "a": 1}
    assert list(values) == list(NEW), "it keeps its place in the order of use"
    (found,) = damages
    assert (found.file, found.name[-1], found.lost) == (file.name, "a", False)
    assert file.name in caplog.text
    assert "'pool tenant flow a' is taken from the snapshot before" in caplog.text
    assert put_aside(tmp_path) == ([] if how == "missing" else [file.name])
    assert loaded(tmp_path)[0] == values, "and the next process finds the same"


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("pool", ["same", "more"])
def test_a_pool_that_has_no_other_copy_is_lost_alone(
    tmp_path: Path, how: str, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, OLD, NEW)
    damage(file_of(tmp_path, pool), how)
    values, damages = loaded(tmp_path)
    assert values == {key: value for key, value in NEW.items() if key != pool}
    assert [(one.name[-1], one.lost) for one in damages] == [(pool, True)]
    assert f"'pool tenant flow {pool}' is lost" in caplog.text


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("pool", ["a", "gone"])
def test_damage_of_what_is_not_needed_costs_nothing(tmp_path: Path, how: str, pool: str) -> None:
    saved(tmp_path, OLD, NEW)
    damage(file_of(tmp_path, pool, PREVIOUS), how)
    assert loaded(tmp_path) == (NEW, [])


@pytest.mark.parametrize("how", DAMAGES)
def test_the_manifest_before_stands_in_for_a_damaged_one(tmp_path: Path, how: str) -> None:
    saved(tmp_path, OLD, NEW)
    damage(tmp_path / MANIFEST, how)
    values, (found,) = loaded(tmp_path)
    assert values == OLD
    assert (found.file, found.replacement, found.lost) == (MANIFEST, PREVIOUS, False)
    assert loaded(tmp_path)[0] == OLD


@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "missing"])
def test_damage_of_the_manifest_before_costs_nothing(tmp_path: Path, how: str) -> None:
    saved(tmp_path, OLD, NEW)
    damage(tmp_path / PREVIOUS, how)
    values, (found,) = loaded(tmp_path)
    assert (values, found.file, found.lost) == (NEW, PREVIOUS, False)
    assert loaded(tmp_path) == (NEW, [])


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("manifest", [MANIFEST, PREVIOUS])
def test_after_the_first_snapshot_no_manifest_is_the_only_one(tmp_path: Path, how: str, manifest: str) -> None:
    saved(tmp_path, OLD)
    damage(tmp_path / manifest, how)
    assert loaded(tmp_path)[0] == OLD


@pytest.mark.parametrize("how", DAMAGES)
def test_records_say_what_they_are_where_no_manifest_does(tmp_path: Path, how: str) -> None:
    saved(tmp_path, OLD, NEW)
    for age, snapshot in enumerate((NEW, OLD)):
        for pool in snapshot:
            os.utime(file_of(tmp_path, pool, (MANIFEST, PREVIOUS)[age]), ns=(0, 10 - age))
    broken = file_of(tmp_path, "a")
    for file in (tmp_path / MANIFEST, tmp_path / PREVIOUS, broken):
        damage(file, how)
    values, _ = loaded(tmp_path)
    assert values == {**OLD, **NEW, "a": 1}


@pytest.mark.parametrize("how", DAMAGES)
def test_where_everything_is_damaged_nothing_is_known(tmp_path: Path, how: str) -> None:
    saved(tmp_path, OLD, NEW)
    for file in state_files(tmp_path):
        damage(file, how)
    assert loaded(tmp_path)[0] == {}
    saved(tmp_path, NEW)
    assert loaded(tmp_path) == (NEW, [])


def test_a_damaged_file_that_cannot_be_renamed_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, OLD, NEW)
    damage(file_of(tmp_path, "a"), "truncated")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert loaded(tmp_path)[0] == {**NEW, "a": 1}
    assert "Read-only" in caplog.text


def test_damaged_files_that_were_put_aside_are_bounded(tmp_path: Path) -> None:
    for number in range(MAX_PUT_ASIDE + 3):
        saved(tmp_path, {"a": number, "b": number})
        damage(file_of(tmp_path, "a"), "truncated")
        newest = file_of(tmp_path, "a").name
        assert "a" not in loaded(tmp_path)[0] or number
    aside = put_aside(tmp_path)
    assert len(aside) == MAX_PUT_ASIDE
    assert newest in aside


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")])
def test_what_this_process_lacks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    saved(tmp_path, OLD, NEW)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=error.strerror):
        loaded(tmp_path)
    monkeypatch.undo()
    assert loaded(tmp_path) == (NEW, [])


# what manifests and records say --------------------------------------------------------------------------------------


def entry(**fields: object) -> dict[str, object]:
    return {"name": ["pool", "t", "w", "p"], "file": "0" * 64 + SUFFIX, "nbytes": 8, **fields}


NONSENSE: dict[str, Any] = {
    "no list": None,
    "no entries": [3],
    "an entry without a file": [{"name": ["pool"], "nbytes": 8}],
    "a path outside": [entry(file="../../etc/passwd")],
    "a path that is absolute": [entry(file="/etc/passwd")],
    "a name of numbers": [entry(name=[1, 2])],
    "a name of letters": [entry(name="pool")],
    "a size that is text": [entry(nbytes="8")],
    "a size that is true": [entry(nbytes=True)],
    "more than is known": [entry(more=1)],
}


@pytest.mark.parametrize("entries", NONSENSE.values(), ids=NONSENSE)
def test_a_manifest_that_makes_no_sense_is_damaged(tmp_path: Path, entries: Any) -> None:
    saved(tmp_path, OLD, NEW)
    change(tmp_path / MANIFEST, entries=entries)
    values, (found,) = loaded(tmp_path)
    assert (values, found.file) == (OLD, MANIFEST)


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"text"', b"[" * 100_000, b"{}", b'{"entries": []}'])
def test_a_manifest_of_other_json_is_damaged(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, OLD, NEW)
    (tmp_path / MANIFEST).write_bytes(content)
    assert loaded(tmp_path)[0] == OLD


def test_a_manifest_without_an_end_is_not_read(tmp_path: Path) -> None:
    saved(tmp_path, OLD, NEW)
    os.truncate(tmp_path / MANIFEST, MAX_MANIFEST_BYTES + 1)
    values, (found,) = loaded(tmp_path)
    assert values == OLD
    assert "is larger than" in found.reason


def test_entries_that_name_files_of_others_cost_those_alone(tmp_path: Path) -> None:
    saved(tmp_path, OLD, NEW)
    entries = listed(tmp_path / MANIFEST)["entries"]
    entries[0]["file"], entries[1]["file"] = entries[1]["file"], entries[0]["file"]
    entries[3]["name"][1] = "another tenant"
    change(tmp_path / MANIFEST, entries=entries)
    values, damages = loaded(tmp_path)
    assert values == {"a": 1, "b": 2, "same": 7}
    assert [one.lost for one in damages] == [False, False, True]


def test_bytes_with_the_right_name_that_are_no_record_are_damage(tmp_path: Path) -> None:
    """Somebody has put a file of random bytes in, checksum and all."""
    saved(tmp_path, OLD, NEW)
    content = os.urandom(4096)
    file = hashlib.sha256(content).hexdigest() + SUFFIX
    (tmp_path / file).write_bytes(content)
    entries = listed(tmp_path / MANIFEST)["entries"]
    entries[0] |= {"file": file, "nbytes": len(content)}
    change(tmp_path / MANIFEST, entries=entries)
    values, (found,) = loaded(tmp_path)
    assert values == {**NEW, "a": 1}
    assert "makes no sense" in found.reason
    assert put_aside(tmp_path) == [file]


def test_a_manifest_of_version_0_1_has_no_checksum(tmp_path: Path) -> None:
    saved(tmp_path, OLD)
    (tmp_path / PREVIOUS).unlink()
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text[: text.index(',\n "sha256"')] + "}")
    assert loaded(tmp_path) == (OLD, [])


# another model or format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"identity": THEIRS}, {"format": 1}], ids=str)
def test_state_of_another_model_or_format_is_refused_whole(tmp_path: Path, fields: dict[str, object]) -> None:
    saved(tmp_path, OLD, NEW)
    for manifest in (MANIFEST, PREVIOUS):
        change(tmp_path / manifest, **fields)
    for how in ("", "truncated", "missing"):
        if how:
            damage(tmp_path / MANIFEST, how)
        before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
        with pytest.raises(StateRefused, match=next(iter(fields))):
            loaded(tmp_path)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, "nothing was touched"


def test_records_of_another_model_are_refused_without_a_manifest(tmp_path: Path) -> None:
    saved(tmp_path, OLD, identity=THEIRS)
    for manifest in (MANIFEST, PREVIOUS):
        damage(tmp_path / manifest, "missing")
    with pytest.raises(StateRefused, match="identity"):
        loaded(tmp_path)
    assert len(record_files(tmp_path)) == len(OLD)


def test_an_old_manifest_of_another_model_costs_nothing(tmp_path: Path) -> None:
    saved(tmp_path, OLD, NEW)
    change(tmp_path / PREVIOUS, identity=THEIRS)
    values, (found,) = loaded(tmp_path)
    assert (values, found.file) == (NEW, PREVIOUS)


# any damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    saved(path, OLD, NEW)
    return path


def test_a_damaged_owner_in_a_record_is_damage_where_no_manifest_is_left(sound: Path, tmp_path: Path) -> None:
    path = shutil.copytree(sound, tmp_path / "copy")
    for name in (MANIFEST, PREVIOUS):
        (path / name).write_bytes(b"")
    record = path / file_of(sound, "a").name
    record.write_bytes(record.read_bytes().replace(b"our model", b" ur model"))
    values, damages = loaded(path)
    assert "a" not in values or values["a"] == OLD["a"]
    assert record.name in {damage.file for damage in damages}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_bytes_of_any_files_may_be_damaged(sound: Path, data: st.DataObject) -> None:
    """Nothing is raised, only what was saved comes back, and what has a sound copy and both manifests is not lost."""
    with tempfile.TemporaryDirectory() as name:
        path = shutil.copytree(sound, Path(name) / "copy")
        copies = {pool: {file_of(path, pool)} for pool in NEW}
        for pool in OLD.keys() & NEW.keys():
            copies[pool].add(file_of(path, pool, PREVIOUS))
        files = [state_files(path)[i] for i in data.draw(st.lists(st.integers(0, 8), unique=True))]
        for file in files:
            content = bytearray(file.read_bytes())
            start = data.draw(st.integers(0, len(content)))
            content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=60))
            file.write_bytes(content)
        values, _ = loaded(path)
    assert all(value in (NEW.get(pool), OLD.get(pool)) for pool, value in values.items())
    if not {path / MANIFEST, path / PREVIOUS}.intersection(files):
        assert values.keys() >= {pool for pool, of_pool in copies.items() if of_pool.difference(files)}
