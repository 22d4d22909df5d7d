"""A folder keeps its snapshot whole, whenever the process that writes it is killed; damage costs what it hits."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from kedge.anchors.saving import Record
from kedge.engine.common.state import files as state_files
from kedge.engine.common.state.files import MANIFEST, PARTIAL, SUFFIX, Damage, Entry, StateFolder
from kedge.errors import StateRefused

OURS, THEIRS = "our model", "their model"
Values = Mapping[str, int]


def record(pool: str, value: int) -> Record:
    return Record(("pool", "tenant", "flow", pool), {"value": value}, {"numbers": torch.full((8,), value)})


def save(folder: StateFolder, values: Values) -> list[Entry]:
    with folder.writing():
        entries = [folder.put(record(pool, value)) for pool, value in values.items()]
        folder.commit(entries)
    return entries


def saved(path: Path, values: Values, identity: str = OURS) -> list[Entry]:
    """Take a snapshot in a folder; return its entries."""
    with closing(StateFolder(path, identity, "float32")) as folder:
        return save(folder, values)


def loaded(path: Path, identity: str = OURS) -> tuple[dict[str, int], list[Damage]]:
    """What a new process finds in a folder, and what is damaged there."""
    values: dict[str, int] = {}

    def accept(found: Record) -> None:
        assert (found.tensors["numbers"] == found.data["value"]).all()
        values[found.name[-1]] = found.data["value"]

    with closing(StateFolder(path, identity, "float32")) as folder:
        return values, folder.recover(accept)[1]


def record_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix == SUFFIX)


def listed(manifest: Path) -> dict[str, Any]:
    return json.loads(manifest.read_text())


def change(manifest: Path, **fields: object) -> None:
    """Rewrite a manifest with other fields and the checksum of what it says then."""
    body = {**listed(manifest), **fields}
    body.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**body, "sha256": digest}))


DAMAGES = ("missing", "empty", "truncated", "longer", "flipped bit", "random", "a link to nothing")


def damage(file: Path, how: str) -> None:
    """Damage a file in one of the ways in `DAMAGES`."""
    content = bytearray(file.read_bytes())
    file.unlink()
    if how == "a link to nothing":
        file.symlink_to("/nowhere")
    elif how != "missing":
        content[len(content) // 2] ^= how == "flipped bit"
        new = {"empty": b"", "truncated": content[:-1], "longer": content + b"x", "random": b"\xff\xfe\x00"}
        file.write_bytes(new.get(how, content))


OLD, NEW = {"a": 1, "b": 2}, {"a": 11, "b": 2, "more": 13}


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def files_of(path: Path) -> dict[str, Path]:
    return {one["name"][-1]: path / one["file"] for one in listed(path / MANIFEST)["entries"]}


# snapshots ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_os_error_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object, path: Path, *__: object) -> None:
        path.write_bytes(b"half a rec")
        if len(record_files(tmp_path)) > len(OLD):
            raise SafetensorError("IoError: No space left on device")

    saved(tmp_path, OLD)
    before = names(tmp_path)
    monkeypatch.setattr(state_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, NEW)
    assert names(tmp_path) == before
    assert loaded(tmp_path) == (OLD, [])


# another model or format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"identity": THEIRS}, {"format": 1}, {"dtype": "bfloat16"}], ids=str)
def test_state_of_another_model_or_format_is_refused_whole(tmp_path: Path, fields: dict[str, object]) -> None:
    saved(tmp_path, OLD)
    change(tmp_path / MANIFEST, **fields)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(StateRefused, match=next(iter(fields))):
        loaded(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before, "nothing was touched"


def test_state_of_another_model_is_moved_and_never_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, OLD, identity=THEIRS)
    before = names(tmp_path) - {"lock"}
    saved(tmp_path, NEW)
    assert names(tmp_path / "refused-1") == before
    assert "refused-1: manifest.json: identity='their model'" in caplog.text
    assert loaded(tmp_path) == (NEW, [])
    saved(tmp_path, OLD, identity=THEIRS)
    assert loaded(tmp_path / "refused-2") == (NEW, [])
    assert loaded(tmp_path / "refused-1", THEIRS) == (OLD, [])


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_record_is_lost_alone(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, NEW)
    file = files_of(tmp_path)["b"]
    damage(file, how)
    values, damages = loaded(tmp_path)
    assert values == {"a": 11, "more": 13}
    assert [(one.file, one.name[-1]) for one in damages] == [(file.name, "b")]
    assert "'pool tenant flow b' is lost" in caplog.text
    saved(tmp_path, OLD)
    assert loaded(tmp_path) == (OLD, [])


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")])
def test_what_this_process_lacks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    saved(tmp_path, OLD)
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=error.strerror):
        loaded(tmp_path)
    monkeypatch.undo()
    assert loaded(tmp_path) == (OLD, [])


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


OTHER_JSON = (b"[]", b"3", b"null", b'"text"', b"[" * 100_000, b"{}", b'{"entries": []}')
WRONG: dict[str, Callable[[Path], object]] = {
    **{how: partial(damage, how=how) for how in DAMAGES if how != "missing"},
    **{why: partial(change, entries=entries) for why, entries in NONSENSE.items()},
    **{str(content[:20]): partial(Path.write_bytes, data=content) for content in OTHER_JSON},
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_a_damaged_manifest_costs_the_snapshot(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    saved(tmp_path, OLD)
    spoil(tmp_path / MANIFEST)
    values, (found,) = loaded(tmp_path)
    assert (values, found.file) == ({}, MANIFEST)
    saved(tmp_path, NEW)
    assert loaded(tmp_path) == (NEW, [])


def test_entries_that_name_files_of_others_cost_those_alone(tmp_path: Path) -> None:
    saved(tmp_path, {**NEW, "same": 7})
    entries = listed(tmp_path / MANIFEST)["entries"]
    entries[0]["file"], entries[1]["file"] = entries[1]["file"], entries[0]["file"]
    entries[3]["name"][1] = "another tenant"
    content = os.urandom(entries[2]["nbytes"])  # somebody has put random bytes in, checksum and all
    entries[2]["file"] = hashlib.sha256(content).hexdigest() + SUFFIX
    (tmp_path / entries[2]["file"]).write_bytes(content)
    change(tmp_path / MANIFEST, entries=entries)
    values, damages = loaded(tmp_path)
    assert not values and len(damages) == 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    saved(path, NEW)
    return path


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_bytes_of_any_files_may_be_damaged(sound: Path, data: st.DataObject) -> None:
    """Nothing is raised, only what was saved comes back, and what is sound is not lost unless the manifest is."""
    with tempfile.TemporaryDirectory() as name:
        path = shutil.copytree(sound, Path(name) / "copy")
        every, sound_files = [*record_files(path), path / MANIFEST], files_of(path)
        hit = [every[i] for i in data.draw(st.lists(st.integers(0, 3), unique=True))]
        for file in hit:
            content = bytearray(file.read_bytes())
            start = data.draw(st.integers(0, len(content)))
            content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=60))
            file.write_bytes(content)
        values, _ = loaded(path)
    assert values.items() <= NEW.items()
    if path / MANIFEST not in hit:
        assert values.keys() >= {pool for pool, file in sound_files.items() if file not in hit}


# a kill at any moment -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; nothing is cleaned up."""


class Kill:
    """Lets a process die right before its n-th operation on the disk, and every later one with it."""

    OPERATIONS = (
        (os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open"), (Path, "mkdir"),
        (state_files, "save_file"),
    )  # fmt: skip

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before, self.done = 10**6, 0
        for owner, name in self.OPERATIONS:
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), torn=name == "save_file"))

    def _failing(self, original: Callable[..., Any], torn: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.done += 1
            if self.done >= self.before:
                if torn and self.done == self.before:
                    Path.write_bytes(args[1], b"half a rec")
                raise Killed
            return original(*args, **options)

        return call

    def dies(self, before: int, does: Callable[[], object]) -> bool:
        """Whether `does` got no further than `before` operations."""
        self.before, self.done = before, 0
        try:
            does()
        except Killed:
            return True
        finally:
            self.before = 10**6
        return False


def broken_off(folder: Path, monkeypatch: pytest.MonkeyPatch, identity: str) -> Iterator[tuple[Path, list[Entry]]]:
    """Folders with somebody's snapshot, over which ours breaks off before its n-th operation, until one is whole."""
    kill = Kill(monkeypatch)
    for before in range(1, 100):
        path = folder / str(before)
        entries = saved(path, OLD, identity)
        opened = StateFolder(path, OURS)
        died = kill.dies(before, partial(save, opened, NEW))
        opened.close()
        yield path, entries
        if not died:
            return


def test_wherever_a_snapshot_breaks_off_the_old_or_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for path, _ in broken_off(tmp_path, monkeypatch, OURS):
        values, damages = loaded(path)
        assert not damages
        seen.append(values)
        (path / f"left over{PARTIAL}").touch()
        saved(path, NEW)
        assert names(path) == {"lock", MANIFEST, *(file.name for file in files_of(path).values())}, "nothing is left"
    assert seen[0] == OLD and seen[-1] == NEW and len(seen) > 10
    assert all(values in (OLD, NEW) for values in seen)


def test_wherever_a_move_of_anothers_state_breaks_off_nothing_of_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, entries in broken_off(tmp_path, monkeypatch, THEIRS):
        theirs = {entry.file for entry in entries}
        assert {file.name for file in path.rglob(f"*{SUFFIX}")} >= theirs
        saved(path, NEW)
        assert loaded(path) == (NEW, [])
        assert {file.name for file in path.glob(f"refused-*/*{SUFFIX}")} == theirs
    assert int(path.name) > 5
