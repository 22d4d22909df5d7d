"""Measurement of what writing translated KV takes, before a rank has any to write."""

from __future__ import annotations

import time

import torch

from kedge.integrations.vllm.plugin.pages import Pages
from kedge.kv.segment import KVSegment
from kedge.kv.storage import SlotTable
from kedge.reuse.costs import EngineCosts

LONG = 128
"""Tokens of the longest write that is measured"""
REPEATS = 3


def measure_writes(costs: EngineCosts, pages: Pages) -> None:
    """Write base KV with offsets of zero into pages that are not in use yet."""
    table = pages.first(LONG)
    kv = pages.read(table, 0, len(table.slots))
    base = KVSegment(torch.zeros_like(kv.keys), torch.zeros_like(kv.values))
    _seconds(pages, table, base)  # the first use of anything takes longer
    for part in (base.slice(0, 1), base):
        for _ in range(REPEATS):
            costs.observe_translation(1, part.tokens, _seconds(pages, table, part))
    costs.settle()


def _seconds(pages: Pages, table: SlotTable, base: KVSegment) -> float:
    began = time.monotonic()
    pages.write(table, 0, base, KVSegment(base.keys[1:], base.values[1:]))
    return time.monotonic() - began
