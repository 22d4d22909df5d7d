"""Measurement of the costs of passes and translations at the start, in slots that are not in use yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from kedge.anchors.offsets import empty_table
from kedge.anchors.sites import no_offsets
from kedge.anchors.translator import Translate, translate_into
from kedge.engine.local.batch import flatten
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import Sequence
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.costs import EngineCosts
from kedge.reuse.plan import Translation
from kedge.types import Namespace, RequestId, TenantId

LONG, LONG_ON_GPU = 128, 1024
"""Tokens of the longest pass that is measured; on a GPU some hundred take hardly longer than one"""
MANY = 4
"""Sequences of the pass with several"""
REPEATS = 3
SLOW = 0.25
"""Seconds of a one-token pass from which longer ones are not measured: the model is too slow on this machine."""


def measure(costs: EngineCosts, runner: ModelRunner, storage: PagedStorage, capacity: int) -> None:
    """Run a few passes and write a few segments; `capacity` is the tokens of the storage, none of them in use."""
    longest = min(LONG_ON_GPU if storage.keys.is_cuda else LONG, capacity, runner.max_positions)
    run = partial(_run, runner, storage)
    run(1, 1)  # the first use of anything takes longer
    alone = _seconds(partial(run, 1, 1))
    for tokens, sequences in ((1, 1), (longest, 1), (min(MANY, longest), min(MANY, longest))):
        if alone < SLOW or tokens == 1:
            for _ in range(REPEATS):
                costs.observe_pass(tokens, sequences, _seconds(partial(run, tokens, sequences)))
    write = partial(_write, storage, translate_into(storage))
    write(1)  # builds the kernel
    for tokens in (1, longest):
        for _ in range(REPEATS):
            costs.observe_translation(1, tokens, _seconds(partial(write, tokens)))
    costs.settle()


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _run(runner: ModelRunner, storage: PagedStorage, tokens: int, sequences: int) -> None:
    """Run a pass over `tokens` tokens, shared by so many sequences, and wait for its result."""
    share = tokens // sequences
    work = []
    for at in range(sequences):
        table = SlotTable(torch.arange(at * share, (at + 1) * share))
        sequence = Sequence(RequestId("measuring"), Namespace(TenantId("")), [0] * share, table)
        work.append(Work(sequence, list(range(share))))
    runner.forward(flatten(work, storage))[0, 0].item()


def _write(storage: PagedStorage, translate: Translate, tokens: int) -> None:
    """Move so many tokens of base KV to other slots."""
    spec = storage.spec
    shape = (spec.layers, tokens, spec.kv_heads, spec.head_dim)
    zeros = torch.zeros(shape, dtype=spec.dtype, device=storage.keys.device)
    base = KVSegment(zeros, zeros)
    table = empty_table(base)
    translate(SlotTable(torch.arange(tokens)), [Translation(0, base, no_offsets(base, table), table)])
    if storage.keys.is_cuda:
        torch.cuda.synchronize(storage.keys.device)
