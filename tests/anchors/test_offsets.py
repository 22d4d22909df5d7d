import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.anchor import AnchorId
from kedge.anchors.offsets import Blend, OffsetTable, empty_table, rows_of
from kedge.errors import PlanError, TranslationRefused
from tests.anchors.helpers import generator, in_context, plus, random_kv

WIDTH = 3


def table(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> OffsetTable:
    return OffsetTable(width, dtype, torch.device("cpu"))


def rows(count: int, value: float) -> torch.Tensor:
    return torch.full((count, WIDTH), float(value)) + torch.arange(count)[:, None] / 1024


def read(stored: OffsetTable, anchor: AnchorId) -> torch.Tensor:
    chosen = stored.rows_of_anchors([anchor])[:, None]
    return stored.blend(Blend(chosen, torch.ones(chosen.shape), stored.version))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "drop", "pack"]), st.integers(0, 7), st.integers(0, 40)), max_size=60)
)
def test_behaves_like_a_dict_of_rows(steps: list[tuple[str, int, int]]) -> None:
    stored, twin = table(), dict[AnchorId, torch.Tensor]()
    for number, (step, anchor, count) in enumerate(steps):
        if step == "put" and anchor in twin:
            with pytest.raises(PlanError):
                stored.put(anchor, rows(count, number))
        elif step == "put":
            twin[anchor] = rows(count, number)
            stored.put(anchor, twin[anchor])
        elif step == "drop":
            twin.pop(anchor, None)
            stored.drop(anchor)
        else:
            stored.pack()
            assert stored.arena.nbytes == stored.live * WIDTH * 4
        stored.check_integrity()
        assert stored.anchors == set(twin)
        assert stored.live == sum(map(len, twin.values()))
        for key, wanted in twin.items():
            assert torch.equal(read(stored, key), wanted)


def test_rows_hold_keys_and_values_of_all_layers_but_the_first() -> None:
    base = random_kv(6, 1)
    real = in_context(base, 2)
    offsets = rows_of(real) - rows_of(base)
    assert offsets.shape == (6, empty_table(base).width)
    back = plus(base, offsets)
    torch.testing.assert_close(back.keys, real.keys)
    torch.testing.assert_close(back.values, real.values)
    assert torch.equal(rows_of(real)[2].view(3, 2, 2, 8)[1, 0], real.keys[2, 2])
    assert torch.equal(rows_of(real)[2].view(3, 2, 2, 8)[1, 1], real.values[2, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blend_is_the_weighted_sum(dtype: torch.dtype) -> None:
    kept = empty_table(random_kv(1, 0, dtype)).dtype
    assert kept == (torch.float16 if dtype == torch.float32 else dtype)
    stored = table(dtype=kept)
    data = torch.randn(50, WIDTH, generator=generator(0))
    stored.put(0, data)
    chosen = torch.randint(0, 50, (20, 8), generator=generator(1))
    weights = torch.rand(20, 8, generator=generator(2))
    got = stored.blend(Blend(chosen, weights, stored.version))
    assert got.dtype == kept
    wanted = (data[chosen] * weights[:, :, None]).sum(1)
    assert (got.float() - wanted).norm() / wanted.norm() < (1e-2 if kept == torch.bfloat16 else 1e-3)


def test_the_rows_of_the_same_anchors_move_with_them() -> None:
    stored = table()
    for number in range(3):
        stored.put(number, rows(9, number))
    both = [1, 2]
    assert stored.rows_of_anchors(both).tolist() == [*range(9, 27)]
    assert stored.rows_of_anchors(both) is stored.rows_of_anchors(both)
    stored.drop(0)
    stored.pack()
    assert stored.rows_of_anchors(both).tolist() == [*range(18)]
    stored.drop(1)
    with pytest.raises(KeyError):
        stored.rows_of_anchors(both)


def test_blends_of_nothing_are_empty_and_those_of_an_earlier_version_refused() -> None:
    stored = table()
    for shape in ((0, 4), (3, 0)):
        none = Blend(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), stored.version)
        assert torch.equal(stored.blend(none), torch.zeros(shape[0], WIDTH))
    assert none.slice(1).tokens == 2
    stored.put(0, rows(9, 1))
    stored.put(1, rows(3, 2))
    blend = Blend(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), stored.version)
    stored.drop(1)
    with pytest.raises(PlanError, match="version"):
        stored.blend(blend)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 70_000.0, -70_000.0])
def test_what_does_not_fit_is_refused_and_changes_nothing(bad: float) -> None:
    stored = table(dtype=torch.float16)
    with pytest.raises(TranslationRefused, match="does not fit"):
        stored.put(0, torch.full((2, WIDTH), bad))
    assert stored.arena.nbytes == 0
    with pytest.raises(PlanError):
        stored.put(0, torch.zeros(2, WIDTH + 1))
