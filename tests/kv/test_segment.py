from __future__ import annotations

import pytest
import torch

from kedge.errors import PlanError
from kedge.kv.segment import KVSegment


def kv(tokens: int) -> KVSegment:
    return KVSegment(torch.randn(3, tokens, 2, 4), torch.randn(3, tokens, 2, 4))


def test_slices_are_views_and_cat_puts_them_back() -> None:
    whole = kv(7)
    parts = [whole.slice(0, 2), whole.slice(2, 2), whole.slice(2)]
    assert [p.tokens for p in parts] == [2, 0, 5]
    assert parts[0].keys.data_ptr() == whole.keys.data_ptr()
    back = KVSegment.cat(parts)
    assert torch.equal(back.keys, whole.keys)
    assert torch.equal(back.values, whole.values)


def test_figures() -> None:
    half = KVSegment(torch.zeros(3, 7, 2, 4, dtype=torch.float16), torch.zeros(3, 7, 2, 4, dtype=torch.float16))
    assert (half.layers, half.tokens, half.dtype, half.nbytes) == (3, 7, torch.float16, 2 * 3 * 7 * 8 * 2)
    assert half.device == torch.device("cpu")


def test_owned_copies_views_only() -> None:
    whole = kv(7)
    assert whole.owned().keys is whole.keys
    part = whole.slice(1, 2)
    assert part.owned().keys.untyped_storage().nbytes() == part.keys.nbytes
    assert torch.equal(part.owned().values, part.values)


@pytest.mark.parametrize("values", [torch.zeros(3, 6, 2, 4), torch.zeros(3, 7, 2, 4).half()])
def test_keys_and_values_must_match(values: torch.Tensor) -> None:
    with pytest.raises(PlanError, match="kv="):
        KVSegment(torch.zeros(3, 7, 2, 4), values)
