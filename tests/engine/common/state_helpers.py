"""Folders of saved state without an engine: a snapshot is a number for each pool."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kedge.anchors.saving import Record
from kedge.engine.common.state.files import SUFFIX, Damage, Entry, StateFolder

OURS, THEIRS = "our model", "their model"
Values = Mapping[str, int]


def record(pool: str, value: int) -> Record:
    return Record(("pool", "tenant", "flow", pool), {"value": value}, {"numbers": torch.full((8,), value)})


def save(folder: StateFolder, values: Values) -> list[Entry]:
    entries = [folder.put(record(pool, value)) for pool, value in values.items()]
    folder.commit(entries)
    return entries


def saved(path: Path, *snapshots: Values, identity: str = OURS) -> list[Entry]:
    """Take these snapshots in a folder, one after the other; return the last one's entries."""
    folder = StateFolder(path, identity)
    try:
        return [save(folder, values) for values in snapshots][-1]
    finally:
        folder.close()


def recover(folder: StateFolder) -> tuple[dict[str, int], list[Damage]]:
    values: dict[str, int] = {}

    def accept(found: Record) -> None:
        assert (found.tensors["numbers"] == found.data["value"]).all()
        values[found.name[-1]] = found.data["value"]

    _, damages = folder.recover(accept)
    return values, damages


def loaded(path: Path, identity: str = OURS) -> tuple[dict[str, int], list[Damage]]:
    """What a new process finds in a folder, and what is damaged there."""
    folder = StateFolder(path, identity)
    try:
        return recover(folder)
    finally:
        folder.close()


def record_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix == SUFFIX)


def listed(manifest: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(manifest.read_text())
    return result


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
