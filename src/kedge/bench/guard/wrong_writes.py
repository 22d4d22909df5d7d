"""An assembler that writes one agent's translations wrongly, whatever they are made from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kedge.anchors.translator import Translate, translate_into
from kedge.bench.guard.wrong_base import WrongBase
from kedge.engine.local.components import Assembler, Translating
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.rotary import Rotary
from kedge.kv.segment import KVSegment
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan, Translation
from kedge.types import AgentId, GenerateRequest

EVERY = 61
"""Distance of flipped bytes: no multiple of a number's bytes, so that all of them are met"""

MakeWrite = Callable[[ModelRunner, PagedStorage], Translate]


@dataclass(slots=True)
class WrongWrites:
    """The component: the translations of `agent`'s requests are written wrongly, once there is one."""

    make: MakeWrite
    agent: AgentId | None = None

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        """Return the assembler of an engine."""
        return _WrongAssembler(self, Translating(runner, storage), self.make(runner, storage))


@dataclass(frozen=True, slots=True)
class _WrongAssembler:
    works_ahead: ClassVar[bool] = False
    fault: WrongWrites
    right: Assembler
    wrong: Translate

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.agent != self.fault.agent:
            return self.right.assemble(request, table, plan)
        self.wrong(table, plan.translations)
        return plan


def at_another_base(runner: ModelRunner, storage: PagedStorage) -> Translate:
    """Rotate keys by another RoPE base than the model's."""
    other = copy.copy(storage)
    other.rotary = Rotary(WrongBase(runner.rotary), runner.max_positions, runner.device)
    return translate_into(other)


def with_swapped_heads(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Write the heads in reverse order."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        for item in translations:
            translate(table, [item])
            slots = table.slots[item.start : item.start + item.base.tokens].to(storage.keys.device)
            for pool in (storage.keys, storage.values):
                pool[:, slots] = pool[:, slots].flip(2)

    return write


def from_corrupt_base(_: ModelRunner, storage: PagedStorage) -> Translate:
    """Read base KV of which bytes are flipped."""
    translate = translate_into(storage)

    def write(table: SlotTable, translations: Sequence[Translation]) -> None:
        translate(table, [replace(item, base=_corrupt(item.base)) for item in translations])

    return write


def flip_bytes(numbers: Tensor) -> None:
    """Flip some bytes of contiguous numbers, in place."""
    raw = numbers.view(torch.uint8).flatten()
    raw[::EVERY] ^= 0xFF


def _corrupt(base: KVSegment) -> KVSegment:
    keys, values = (numbers.clone(memory_format=torch.contiguous_format) for numbers in (base.keys, base.values))
    flip_bytes(keys)
    flip_bytes(values)
    return KVSegment(keys, values)
