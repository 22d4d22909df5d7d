"""What the workers say of one step, merged over the ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kedge.cache import Copied
from kedge.integrations.vllm.plugin.messages import CopyResult, Reports


def test_a_block_that_one_rank_finds_corrupt_is_corrupt() -> None:
    sound, bad = CopyResult.of(Copied(3, True, 0.5)), CopyResult.of(Copied(3, True, 0.2, (1, 4)))
    merged = Reports({3: sound}).aggregate(Reports({3: bad})).copies[3].merged(CopyResult(1, True, 0.1, frozenset({2})))
    assert merged == CopyResult(3, True, 0.5, frozenset({1, 2, 4}))
