"""Offsets in 8 bits: how far they are from what was stored, and that all else is as with 16."""

from __future__ import annotations

import pytest
import torch

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import Blend, EightBitTable, OffsetTable
from kedge.anchors.store import AnchorStore
from kedge.errors import ConfigError, PlanError, TranslationRefused
from kedge.settings import AnchorSettings
from tests.anchors.helpers import BOTH, SLOT, filled, relative_error, sample, translated

GROUP, GROUPS = 8, 6
WIDTH, CPU = GROUP * GROUPS, torch.device("cpu")


def table(*lengths: int, dtype: torch.dtype = torch.float32) -> tuple[EightBitTable, torch.Tensor]:
    """A table of anchors of these lengths, and their rows: heads of very different sizes."""
    torch.manual_seed(0)
    rows = torch.randn(sum(lengths), GROUPS, GROUP) * torch.logspace(-4, 3, GROUPS)[:, None]
    made = EightBitTable(WIDTH, GROUP, dtype, CPU)
    for number, part in enumerate(rows.flatten(1).split(lengths)):
        made.put(AnchorId(number), part)
    return made, rows.flatten(1)


def test_every_head_is_as_exact_as_its_own_size_allows() -> None:
    stored, rows = table(5, 3)
    got = stored.decode(stored.arena[stored.rows_of_anchors([AnchorId(0), AnchorId(1)])])
    error = (got - rows).unflatten(1, (GROUPS, GROUP)).abs().amax(2)
    largest = rows.unflatten(1, (GROUPS, GROUP)).abs().amax(2)
    # Half a step, of a scale that may be off by 2^-9.
    assert (error <= largest / 127 * 0.5 * (1 + 2**-9) + 1e-12).all()


def test_a_row_weighs_one_byte_a_number_and_two_a_head() -> None:
    stored, _ = table(5, 3)
    assert stored.nbytes == stored.capacity * stored.row_bytes
    assert stored.row_bytes == WIDTH + 2 * GROUPS


def test_what_was_decoded_is_encoded_as_it_was() -> None:
    stored, _ = table(7)
    assert torch.equal(stored.encode(stored.decode(stored.arena)), stored.arena)


def test_blends_are_sums_of_what_is_stored() -> None:
    stored, _ = table(5, 4, 2)
    rows = torch.randint(0, 11, (9, 3))
    weights = torch.rand(9, 3)
    got = stored.blend(Blend(rows, weights, stored.version))
    wanted = (stored.decode(stored.arena)[rows] * weights[..., None]).sum(1)
    torch.testing.assert_close(got, wanted)
    stored.drop(AnchorId(1))
    with pytest.raises(PlanError, match="version"):
        stored.blend(Blend(rows, weights, 0))


def test_no_offsets_are_zeros() -> None:
    stored, _ = table(5)
    none = Blend(torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0), stored.version)
    assert torch.equal(stored.blend(none), torch.zeros(3, WIDTH))


def test_rows_of_zeros() -> None:
    stored = EightBitTable(WIDTH, GROUP, torch.float16, CPU)
    stored.put(AnchorId(0), torch.zeros(2, WIDTH))
    assert torch.equal(stored.decode(stored.arena), torch.zeros(2, WIDTH, dtype=torch.float16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_does_not_fit_is_refused(bad: float) -> None:
    stored, _ = table(5, dtype=torch.float16)
    rows = torch.ones(2, WIDTH)
    rows[1, 3] = bad
    with pytest.raises(TranslationRefused, match="does not fit"):
        stored.put(AnchorId(9), rows)
    assert AnchorId(9) not in stored
    stored.check_integrity()


@pytest.mark.parametrize("settings", BOTH, ids=["token", "interpolate"])
def test_a_store_translates_nearly_the_same_at_half_the_memory(settings: dict[str, object]) -> None:
    full, half = (filled(range(0, 400, 40), offset_bits=bits, **settings) for bits in (16, 8))
    value = sample(40)  # one of those that were observed
    estimates = [store.estimate(SLOT, value) for store in (full, half)]
    assert all(estimate.shareable for estimate in estimates)
    assert [type(estimate.value_table) for estimate in estimates] == [OffsetTable, EightBitTable]
    assert relative_error(translated(estimates[1], value), translated(estimates[0], value)) < 0.01
    tables = [estimate.value_table.row_bytes for estimate in estimates if estimate.value_table]
    assert tables[1] == tables[0] * (1 + 2 / 8) / 2  # heads of 8 dimensions


def test_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="offset_bits=4"):
        AnchorStore(AnchorSettings(offset_bits=4))
