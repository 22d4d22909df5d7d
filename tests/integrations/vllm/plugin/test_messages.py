"""What the workers say of one step, merged over the ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from kedge.integrations.vllm.plugin.messages import Reports, TranslationVerdict
from kedge.types import Miss, RequestId


def test_what_one_rank_has_to_compute_all_ranks_compute() -> None:
    few = TranslationVerdict((range(5, 9), range(99, 100)), (Miss("few", ""),), needs=((1, 2),))
    many = TranslationVerdict((range(7, 20), range(99, 100)), (Miss("many", ""),))
    assert few.merged(many) == TranslationVerdict((range(5, 20), range(99, 100)), (Miss("many", ""),), ((1, 2),))
    dense = TranslationVerdict((range(100),), (Miss("dense", ""),))
    merged = Reports(verdicts={RequestId("r"): few}).aggregate(Reports(verdicts={RequestId("r"): dense}))
    assert merged.verdicts == {"r": TranslationVerdict((range(100),), (Miss("dense", ""),), ((1, 2),))}
