"""Which host blocks a session gives up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kedge.integrations.vllm.plugin.host_loads import HostBackups


def test_what_two_device_blocks_held_is_given_up_on_the_host_once() -> None:
    """Two requests computed the same at once; the queue takes a block out once, and a second time is an error."""
    held, busy = SimpleNamespace(ref_cnt=0), SimpleNamespace(ref_cnt=1)
    known = SimpleNamespace(get_one_block={"twice": held, "in use": busy}.get)
    left: list[Any] = []
    tier: Any = SimpleNamespace(
        device=SimpleNamespace(num_gpu_blocks=10),
        host=SimpleNamespace(cached_block_hash_to_block=known),
        queue=SimpleNamespace(leave=lambda blocks, owner: left.append((blocks, owner))),
    )
    blocks: Any = [SimpleNamespace(block_hash=one) for one in ("twice", "gone", "twice", None, "in use")]
    HostBackups(tier, math.inf)._leave(blocks, "session")
    assert left == [([held], "session")]
