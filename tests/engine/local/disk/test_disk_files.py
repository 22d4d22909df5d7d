"""Files of blocks on a real disk: what is read is what was written, whatever happened to the files and the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load, save_file

from kedge.cache.copies import BlockFiles, FileDone, FileRead, FileWrite
from kedge.cache.disk import run_name
from kedge.engine.local.disk_files import DiskFiles
from kedge.errors import ConfigError
from kedge.kv.checksums import Seals
from kedge.kv.copy import HostStorage
from kedge.kv.rotary import Rotary
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage
from kedge.types import Namespace, TenantId
from tests.engine.local.conftest import tiny_model
from tests.processes import linux_only

BLOCKS, SIZE = 8, 4
NS, OTHER = Namespace(TenantId("tenant"), "part"), Namespace(TenantId("tenant/part"))


class Disk:
    """A host tier with random content and checksums, and the files behind it."""

    def __init__(self, folder: Path, identity: str = "model", block_size: int = SIZE) -> None:
        rotary = Rotary(tiny_model("llama").model.rotary_emb, 512, torch.device("cpu"))
        spec = KVSpec(layers=3, kv_heads=2, head_dim=16, rotary_dim=16, dtype=torch.bfloat16)
        device = PagedStorage(spec, BLOCKS, block_size, torch.device("cpu"), rotary)
        self.host = HostStorage(device, BLOCKS)
        for pool in (self.host.keys, self.host.values):
            pool.copy_(torch.randn(pool.shape))
        pools = [self.host.keys, self.host.values]
        self.seals = Seals(pools, block_size, BLOCKS)
        self.seals.note([(0, 0, BLOCKS)])
        self.ended = threading.Semaphore(0)
        self.files = DiskFiles(folder, identity, self.host, block_size, self.seals, self.ended.release)

    def done(self) -> FileDone:
        """Waits for the next end."""
        assert self.ended.acquire(timeout=60)
        [one] = self.files.drain()
        return one

    def write(self, *blocks: int, parent: FileWrite | None = None, namespace: Namespace = NS) -> FileWrite:
        """Writes a file with these blocks, whose tokens are their numbers."""
        key = b"".join(bytes([block, 0, 0, 0] * SIZE) for block in blocks)
        before, used = (parent.name, len(parent.key) // (4 * SIZE)) if parent else ("", 0)
        order = FileWrite(run_name(before, used, namespace, key), before, used, namespace, key, blocks)
        self.files.write(order)
        assert self.done() == FileDone(order, len(blocks))
        return order

    def read(self, *parts: tuple[str, int, int], targets: tuple[int, ...]) -> FileDone:
        self.files.read(FileRead(0, parts, targets))
        return self.done()

    def content(self, *blocks: int) -> list[torch.Tensor]:
        return [
            pool[:, block * SIZE : (block + 1) * SIZE].clone()
            for block in blocks
            for pool in (self.host.keys, self.host.values)
        ]


@contextmanager
def opened(folder: Path, *args: object) -> Iterator[Disk]:
    disk = Disk(folder, *args)
    try:
        yield disk
    finally:
        disk.files.close()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def file_of(folder: Path, order: FileWrite) -> Path:
    return folder / f"{order.name}.kv.safetensors"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_blocks_come_back_byte_for_byte_after_a_restart_with_their_checksums(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        files: BlockFiles = disk.files
        first = disk.write(5, 0, 2)
        second = disk.write(7, parent=first)
        expected, sums = disk.content(0, 2, 7), disk.seals.noted((0, 2, 7)).tolist()
    with opened(tmp_path) as disk:
        assert [(one.name, one.parent, one.used, one.namespace, one.key) for one in disk.files.stored()] == [
            (one.name, one.parent, one.used, one.namespace, one.key) for one in (first, second)
        ]
        done = disk.read((first.name, 1, 3), (second.name, 0, 1), targets=(6, 1, 3))
        assert (done.blocks, done.damaged) == (3, "")
        assert same(disk.content(6, 1, 3), expected)
        assert disk.seals.noted((6, 1, 3)).tolist() == sums
    assert isinstance(files, DiskFiles)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match=r"engine\.tiers\.disk_path=.*another process"):
        Disk(tmp_path)
    with opened(tmp_path):
        pass


def test_a_folder_that_cannot_be_one_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"engine\.tiers\.disk_path=.*cannot be used"):
        Disk(tmp_path / "file" / "folder")


@pytest.mark.parametrize(("identity", "block_size"), [("another model", SIZE), ("model", 2 * SIZE)])
def test_files_of_another_model_or_layout_are_deleted(tmp_path: Path, identity: str, block_size: int) -> None:
    with opened(tmp_path) as disk:
        disk.write(1)
    with opened(tmp_path, identity, block_size) as disk:
        assert disk.files.stored() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("damage", ["cut", "empty", "renamed", "tokens", "other namespace", "half written"])
def test_files_that_make_no_sense_are_deleted_at_the_start_and_others_stay(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as disk:
        good, bad = disk.write(1), disk.write(2)
        foreign = disk.write(2, namespace=OTHER)
    path = file_of(tmp_path, bad)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "renamed":
        path.rename(file_of(tmp_path, good).with_name(f"{'0' * 64}.kv.safetensors"))
    elif damage == "tokens":
        tensors = load(path.read_bytes())
        tensors["tokens"][0] += 1
        head = path.read_bytes()
        save_file(
            tensors, path, {"kedge": head[head.index(b'{"__meta') :].split(b'"kedge":"')[1].split(b'"}')[0].decode()}
        )
    elif damage == "other namespace":
        path.write_bytes(file_of(tmp_path, foreign).read_bytes())
    else:
        path.rename(path.with_name(path.name + ".part"))
    (tmp_path / "notes.txt").write_text("not Kedge's")
    with opened(tmp_path) as disk:
        assert {one.name for one in disk.files.stored()} == {good.name, foreign.name}
    assert {path.name for path in tmp_path.iterdir()} == {
        "lock", "notes.txt", file_of(tmp_path, good).name, file_of(tmp_path, foreign).name
    }  # fmt: skip


def test_a_flipped_bit_is_found_in_its_block_and_those_before_it_arrive(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        order, expected = disk.write(1, 2, 3), disk.content(1)
        content = file_of(tmp_path, order).read_bytes()
        needle = disk.content(2)[1][2].contiguous().view(torch.uint8).numpy().tobytes()
        flip(file_of(tmp_path, order), content.index(needle) + 9)
        done = disk.read((order.name, 0, 3), targets=(4, 5, 6))
        assert (done.blocks, done.damaged, done.is_damage) == (1, order.name, True)
        assert same(disk.content(4), expected)


def test_files_that_are_gone_or_cut_are_misses(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        first, second = disk.write(1), disk.write(2)
        path = file_of(tmp_path, first)
        path.write_bytes(path.read_bytes()[:100])
        done = disk.read((second.name, 0, 1), (first.name, 0, 1), targets=(4, 5))
        assert (done.blocks, done.damaged, done.is_damage) == (1, first.name, True)
        disk.files.delete([second.name])
        disk.write(3)
        done = disk.read((second.name, 0, 1), targets=(4,))
        assert (done.blocks, done.damaged, done.is_damage) == (0, second.name, False)


def test_blocks_that_have_changed_since_the_order_are_not_written(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        disk.seals.restore([1], disk.seals.noted((2,)))
        order = FileWrite(run_name("", 0, NS, b""), "", 0, NS, b"", (1,))
        disk.files.write(order)
        assert disk.done() == FileDone(order, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_full_disk_leaves_nothing_and_the_next_write_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as disk:
        with monkeypatch.context() as patch:
            patch.setattr("kedge.engine.local.disk_files.save_file", full)
            order = FileWrite("a" * 64, "", 0, NS, b"", (1,))
            disk.files.write(order)
            assert disk.done() == FileDone(order, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        disk.write(1)


def full(_: object, path: Path, __: object) -> None:
    path.write_bytes(b"a part of it")
    raise OSError(28, "No space left on device")


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for block in range(8):
        key = bytes([block, 0, 0, 0] * SIZE)
        disk.files.write(FileWrite(run_name("", 0, NS, key), "", 0, NS, key, (block,)))
    disk.files.close()
    disk.files.close()
    with opened(tmp_path) as disk:
        assert len(disk.files.stored()) == 8


WRITER = """
import sys
from pathlib import Path
from tests.engine.local.disk.test_disk_files import Disk, NS, SIZE
from kedge.cache.copies import FileWrite
from kedge.cache.disk import run_name
disk, number = Disk(Path(sys.argv[1])), 0
while True:
    number += 1
    key = number.to_bytes(4, "little") * SIZE * 8
    disk.files.write(FileWrite(run_name("", 0, NS, key), "", 0, NS, key, tuple(range(8))))
    disk.done()
    print(number, flush=True)
"""


@linux_only
@pytest.mark.parametrize("after", [1, 5, 23])
def test_a_killed_writer_leaves_whole_files_only(tmp_path: Path, after: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    for _ in range(after):
        assert writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    with opened(tmp_path) as disk:
        stored = disk.files.stored()
        assert len(stored) >= after and not list(tmp_path.glob("*.part"))
        for one in stored:
            assert disk.read((one.name, 0, 8), targets=tuple(range(8))).blocks == 8
