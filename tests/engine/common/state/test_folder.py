"""A folder keeps the last two snapshots whole, whenever the process that writes it is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from kedge.engine.common.state import files as state_files
from kedge.engine.common.state.files import MANIFEST, PARTIAL, PREVIOUS
from kedge.engine.common.state.folder import StateFolder
from kedge.errors import ConfigError, StateRefused
from tests.engine.common.state_helpers import (
    OURS,
    THEIRS,
    damage,
    listed,
    loaded,
    record_files,
    recover,
    save,
    saved,
)

FIRST, SECOND, THIRD = {"a": 1, "b": 2}, {"a": 11, "b": 2}, {"a": 21, "c": 3}


def named(path: Path, *manifests: str) -> set[str]:
    return {one["file"] for manifest in manifests for one in listed(path / manifest)["entries"]}


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


# the last two ---------------------------------------------------------------------------------------------------------


def test_files_of_the_last_two_snapshots_are_kept_and_no_others(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, OURS)
    entries: list[set[str]] = []
    for number in range(5):
        entries.append({entry.file for entry in save(folder, {"same": 0, "other": number})})
        (tmp_path / f"left over{PARTIAL}").touch()
        assert {file.name for file in record_files(tmp_path)} == set().union(*entries[-2:])
        assert named(tmp_path, MANIFEST) == entries[-1]
        assert named(tmp_path, PREVIOUS) == entries[max(0, number - 1)]
    save(folder, {"same": 0, "other": 4})
    assert named(tmp_path, PREVIOUS) == entries[-2], "a snapshot that changes nothing pushes out none"
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_a_new_process_goes_on_with_the_snapshots_that_are_there(tmp_path: Path) -> None:
    saved(tmp_path, FIRST, SECOND)
    newest = named(tmp_path, MANIFEST)
    saved(tmp_path, THIRD)
    assert named(tmp_path, PREVIOUS) == newest
    assert loaded(tmp_path) == (THIRD, [])


def test_nothing_is_written_where_nothing_has_changed(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, OURS)
    entries = [save(folder, values) for values in (FIRST, SECOND)][-1]
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    folder.commit(entries)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def test_what_was_found_sound_is_the_snapshot_before_of_the_next(tmp_path: Path) -> None:
    """A damaged file is in neither of the two snapshots after the first save."""
    entry = saved(tmp_path, FIRST, SECOND)[0]
    damage(tmp_path / entry.file, "truncated")
    folder = StateFolder(tmp_path, OURS)
    recover(folder)
    save(folder, THIRD)
    folder.close()
    assert entry.file not in named(tmp_path, MANIFEST, PREVIOUS)
    damage(tmp_path / MANIFEST, "missing")
    assert loaded(tmp_path)[0] == FIRST


def test_damaged_manifests_are_written_again(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, OURS)
    entries = [save(folder, values) for values in (FIRST, SECOND)][-1]
    for manifest in (MANIFEST, PREVIOUS):
        damage(tmp_path / manifest, "flipped bit")
    folder.commit(entries)
    folder.close()
    assert loaded(tmp_path) == (SECOND, [])
    damage(tmp_path / MANIFEST, "missing")
    assert loaded(tmp_path)[0] == FIRST


def test_a_save_without_a_load_keeps_what_is_sound(tmp_path: Path) -> None:
    saved(tmp_path, FIRST, SECOND)
    damage(tmp_path / MANIFEST, "truncated")
    saved(tmp_path, THIRD)
    assert loaded(tmp_path) == (THIRD, [])
    damage(tmp_path / MANIFEST, "missing")
    assert loaded(tmp_path)[0] == FIRST


def test_files_that_are_gone_or_of_another_size_are_known(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, OURS)
    one, two = save(folder, FIRST)
    assert folder.has(one)
    damage(tmp_path / one.file, "missing")
    damage(tmp_path / two.file, "truncated")
    assert not folder.has(one)
    assert not folder.has(two)


def test_whatever_lies_in_the_place_of_a_file_is_swept(tmp_path: Path) -> None:
    old = saved(tmp_path, FIRST, SECOND)[0]
    damage(tmp_path / old.file, "a folder")
    (tmp_path / old.file / "inside").touch()
    for kept in named(tmp_path, PREVIOUS) - named(tmp_path, MANIFEST):
        damage(tmp_path / kept, "a link to nothing")
    folder = StateFolder(tmp_path, OURS)
    for values in (THIRD, {"a": 31}, {"a": 41}):
        save(folder, values)
    folder.close()
    assert loaded(tmp_path) == ({"a": 41}, [])
    assert {file.name for file in record_files(tmp_path)} == named(tmp_path, MANIFEST, PREVIOUS)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, OURS)
    with pytest.raises(ConfigError, match="another process"):
        StateFolder(tmp_path, OURS)
    folder.close()
    StateFolder(tmp_path, OURS).close()


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("IoError: No space left on device")

    saved(tmp_path, FIRST)
    monkeypatch.setattr(state_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, SECOND)
    assert loaded(tmp_path) == (FIRST, [])


# another model --------------------------------------------------------------------------------------------------------


def test_state_of_another_model_is_moved_and_never_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, FIRST, SECOND, identity=THEIRS)
    before = names(tmp_path) - {"lock"}
    saved(tmp_path, THIRD)
    assert names(tmp_path / "refused-1") == before
    assert "refused-1: manifest.json: identity='their model'" in caplog.text
    assert loaded(tmp_path) == (THIRD, [])
    assert loaded(tmp_path / "refused-1", THEIRS) == (SECOND, [])
    saved(tmp_path, FIRST, identity=THEIRS)
    assert loaded(tmp_path / "refused-2") == (THIRD, [])
    assert loaded(tmp_path / "refused-1", THEIRS) == (SECOND, [])


def test_a_file_system_without_links_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, FIRST, identity=THEIRS)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    saved(tmp_path, SECOND)
    assert loaded(tmp_path / "refused-1", THEIRS) == (FIRST, [])


def test_state_that_cannot_be_moved_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, FIRST, identity=THEIRS)
    for owner, name in ((os, "link"), (shutil, "copy2")):
        monkeypatch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    folder = StateFolder(tmp_path, OURS)
    with pytest.raises(OSError, match="No space left"):
        save(folder, SECOND)
    folder.close()
    monkeypatch.undo()
    assert loaded(tmp_path, THEIRS) == (FIRST, [])


# a kill at any moment -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; nothing is cleaned up."""


class Kill:
    """Lets a process die right before its n-th operation on the disk, and every later one with it."""

    OPERATIONS = (
        (os, "fsync"), (os, "link"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "open"),
        (Path, "mkdir"), (shutil, "rmtree"), (state_files, "save_file"),
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


def test_wherever_a_snapshot_breaks_off_the_old_or_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, seen = Kill(monkeypatch), []
    for before in range(1, 100):
        path = tmp_path / str(before)
        saved(path, FIRST, SECOND)
        folder = StateFolder(path, OURS)
        recover(folder)
        died = kill.dies(before, partial(save, folder, THIRD))
        folder.close()
        values, damages = loaded(path)
        assert not damages
        assert values in (SECOND, THIRD)
        damage((copy := shutil.copytree(path, tmp_path / f"copy of {before}")) / MANIFEST, "truncated")
        assert loaded(copy)[0] in (FIRST, SECOND, THIRD), "a damaged manifest on top costs one snapshot more at most"
        saved(path, THIRD)
        assert names(path) == {"lock", MANIFEST, PREVIOUS, *named(path, MANIFEST, PREVIOUS)}, "nothing is left over"
        seen.append(values)
        if not died:
            break
    assert seen[0] == SECOND
    assert seen[-1] == THIRD
    assert len(seen) > 15


def test_wherever_the_first_snapshot_breaks_off_a_part_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = Kill(monkeypatch)
    for before in range(1, 100):
        path = tmp_path / str(before)
        folder = StateFolder(path, OURS)
        died = kill.dies(before, partial(save, folder, FIRST))
        folder.close()
        values, _ = loaded(path)
        assert values.items() <= FIRST.items()
        if not died:
            break
    assert values == FIRST


def test_wherever_recovery_breaks_off_it_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Kill(monkeypatch)
    for before in range(1, 100):
        path = tmp_path / str(before)
        entry = saved(path, FIRST, SECOND)[0]
        damage(path / entry.file, "truncated")
        damage(path / PREVIOUS, "longer")
        folder = StateFolder(path, OURS)
        died = kill.dies(before, partial(recover, folder))
        folder.close()
        assert loaded(path)[0] == {"b": 2}
        if not died:
            break
    assert before > 2


def test_wherever_a_move_of_anothers_state_breaks_off_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, seen = Kill(monkeypatch), set()
    for before in range(1, 100):
        path = tmp_path / str(before)
        saved(path, FIRST, SECOND, identity=THEIRS)
        folder = StateFolder(path, OURS)
        died = kill.dies(before, partial(save, folder, THIRD))
        folder.close()
        try:
            theirs = loaded(path, THEIRS)[0]
            seen.add("here")
        except StateRefused:
            theirs = {}
        if theirs != SECOND:
            seen.add("moved")
            theirs = loaded(path / "refused-1", THEIRS)[0]
        assert theirs == SECOND
        saved(path, THIRD)
        assert loaded(path) == (THIRD, [])
        if not died:
            break
    assert seen == {"here", "moved"}
