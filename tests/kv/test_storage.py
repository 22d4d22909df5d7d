"""Blocks, runs, and writing what was read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import PlanError
from kedge.kv.rotary import Pairing, Rotary
from kedge.kv.segment import KVSegment
from kedge.kv.spec import KVSpec
from kedge.kv.storage import PagedStorage, SlotTable, halves
from tests.engine.local.conftest import tiny_model

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=16, rotary_dim=16, dtype=torch.float32)
ROTARY = Rotary(tiny_model("llama").model.rotary_emb, 512, torch.device("cpu"))


@given(st.permutations(range(8)), st.integers(0, 32), st.integers(0, 32))
def test_runs_cover_the_positions_in_order(blocks: list[int], a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    table = SlotTable.of(blocks, 4)
    covered = [slot for run in table.runs(start, stop) for slot in range(run.start, run.stop)]
    assert covered == [blocks[p // 4] * 4 + p % 4 for p in range(start, stop)]


def test_neighbouring_blocks_are_one_run() -> None:
    assert SlotTable.of([5, 6, 7, 2, 3], 4).runs(2, 19) == (slice(22, 32), slice(8, 15))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
@pytest.mark.parametrize("blocks", [[6, 1, 2, 4], [3, 4, 5, 6]], ids=["scattered", "one run"])
def test_the_sum_is_exact_in_the_dtype_of_the_base_whatever_that_of_the_offsets(
    dtype: torch.dtype | None, blocks: list[int]
) -> None:
    """None: there are no offsets."""
    storage = PagedStorage(SPEC, 8, 4, torch.device("cpu"), ROTARY)
    base = KVSegment(torch.randn(3, 10, 2, 16), torch.randn(3, 10, 2, 16))
    of_rows = torch.randn(10, 2, 2, 2, 16).to(dtype)  # token by token, as a blend has them
    offsets = KVSegment(*of_rows.permute(2, 1, 0, 3, 4))
    table = SlotTable.of(blocks, 4)
    storage.write(table, 3, base, offsets if dtype else None)
    keys, values = base.keys.clone(), base.values.clone()
    if dtype:
        keys[1:] += offsets.keys.float()
        values[1:] += offsets.values.float()
    ROTARY.rotate(keys, slice(3, 13), out=(rotated := torch.empty_like(keys)))
    slots = table.slots[3:13]
    assert torch.equal(storage.keys[:, slots], rotated)
    assert torch.equal(storage.values[:, slots], values)


LATENT = KVSpec(layers=3, kv_heads=1, head_dim=20, rotary_dim=16, dtype=torch.float32, latent=24)
LAST = ROTARY.paired(Pairing(start=4))
"""The rotation of the last 16 of 20 dimensions"""


@pytest.mark.parametrize(("spec", "rotary"), [(SPEC, ROTARY), (LATENT, LAST)], ids=["heads", "latent"])
def test_the_beginning_of_a_block_is_copied_and_nothing_else(spec: KVSpec, rotary: Rotary) -> None:
    storage = PagedStorage(spec, 4, 4, torch.device("cpu"), rotary)
    storage.keys.normal_()
    storage.values.normal_()
    expected = [pool.clone() for pool in (storage.keys, storage.values)]
    for pool in expected:
        pool[:, 12:15] = pool[:, 4:7]
    storage.copy_beginning(1, 3, 3)
    assert all(torch.equal(a, b) for a, b in zip((storage.keys, storage.values), expected, strict=True))


def test_with_a_latent_attention_reads_rows_of_which_values_and_keys_are_the_halves() -> None:
    storage = PagedStorage(LATENT, 8, 4, torch.device("cpu"), LAST)
    rows, slots = torch.randn(5, 1, 24 + 16), torch.tensor([3, 31, 4, 0, 17])
    for layer in range(3):
        storage.store(layer, slots, *halves(rows + layer))
        for pool in storage.pools[layer]:
            assert torch.equal(pool[slots], rows + layer)
    assert torch.equal(storage.values[2, slots], rows[..., :20] + 2)
    assert torch.equal(storage.keys[2, slots], rows[..., 20:] + 2)
    assert LATENT.bytes_per_token == 3 * (24 + 16) * 4 == sum(pool.nbytes // 32 for pool, _ in storage.pools)


@pytest.mark.parametrize("blocks", [[6, 1, 2, 4], [3, 4, 5, 6]], ids=["scattered", "one run"])
def test_rows_are_translated_and_read_as_keys_and_values_are(blocks: list[int]) -> None:
    storages = [PagedStorage(replace(LATENT, latent=n), 16, 4, torch.device("cpu"), LAST) for n in (LATENT.latent, 0)]
    base, offsets = (KVSegment(torch.randn(n, 10, 1, 20), torch.randn(n, 10, 1, 20)) for n in (3, 2))
    table = SlotTable.of(blocks, 4)
    for storage in storages:
        storage.write(table, 3, base, offsets)
    rows, plain = storages
    assert torch.equal(rows.keys[:, table.slots[3:13]], plain.keys[:, table.slots[3:13]])
    assert torch.equal(rows.values[:, table.slots[3:13]], plain.values[:, table.slots[3:13]])
    assert torch.equal(rows.read(table, 3, 13).keys, plain.read(table, 3, 13).keys)
    for name, read in (("keys", rows.read(table, 3, 13).keys), ("values", rows.read(table, 3, 13).values)):
        torch.testing.assert_close(read[1:], getattr(base, name)[1:] + getattr(offsets, name), atol=1e-5, rtol=1e-4)


# segments -------------------------------------------------------------------------------------------------------------


def test_slices_are_views() -> None:
    whole = KVSegment(torch.randn(3, 7, 2, 4), torch.randn(3, 7, 2, 4))
    parts = [whole.slice(0, 2), whole.slice(2, 2), whole.slice(2)]
    assert [p.tokens for p in parts] == [2, 0, 5]
    assert parts[0].keys.data_ptr() == whole.keys.data_ptr() and torch.equal(parts[2].values, whole.values[:, 2:])


@pytest.mark.parametrize("values", [torch.zeros(3, 6, 2, 4), torch.zeros(3, 7, 2, 4).half()])
def test_keys_and_values_must_match(values: torch.Tensor) -> None:
    with pytest.raises(PlanError, match="kv="):
        KVSegment(torch.zeros(3, 7, 2, 4), values)
