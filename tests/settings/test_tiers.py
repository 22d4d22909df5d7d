from __future__ import annotations

import pytest

from kedge.errors import ConfigError
from kedge.settings import TierSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [("host_memory", -1), ("backup_hits", -1)],
)
def test_a_bad_number_is_named(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.tiers\.{name}={value}"):
        TierSettings(**{name: value})


def test_the_host_tier_is_sized_by_blocks_or_by_memory() -> None:
    assert TierSettings().host_pool_size(100) == 0
    assert TierSettings(host_memory=1024).host_pool_size(100) == 10
    assert TierSettings(host_memory="3 blocks").host_pool_size(100) == 3
    assert TierSettings(host_memory="0 blocks").host_pool_size(100) == 0


def test_memory_for_not_a_single_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tiers\.host_memory=10: too small: a block has 100 bytes"):
        TierSettings(host_memory=10).host_pool_size(100)
