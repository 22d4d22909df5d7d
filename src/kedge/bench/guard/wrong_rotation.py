"""An assembler that rotates translated keys by another RoPE base than the model's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.anchors.translator import Translator
from kedge.engine.local.components import Assembler, Translating
from kedge.engine.local.model.runner import ModelRunner
from kedge.errors import ConfigError
from kedge.kv.rotary import Rotary, Rotation
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan
from kedge.types import AgentId, GenerateRequest

TIMES_BASE = 50.0
"""The wrong base over the model's: that of long-context models over the usual 10000"""


class WrongBase(nn.Module):
    """A rotary module with the model's frequencies as they are at another base."""

    def __init__(self, rotary: Rotation) -> None:
        super().__init__()
        if rotary.tables is None:
            raise ConfigError("model", "rotation", "the fault needs one rotation of all layers, half with half")
        cos, sin = rotary.tables
        frequencies = torch.atan2(sin[1], cos[1])
        places = torch.arange(len(frequencies), device=frequencies.device) / len(frequencies)
        self._frequencies = frequencies / TIMES_BASE**places

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, positions, rotary_dim]."""
        angles = position_ids[..., None] * self._frequencies
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()


@dataclass(slots=True)
class WrongRotation:
    """The component: the translations of `agent`'s requests are rotated wrongly, once there is one."""

    agent: AgentId | None = None

    def __call__(self, runner: ModelRunner, storage: PagedStorage) -> Assembler:
        """Return the assembler of an engine."""
        other = copy.copy(storage)
        other.rotary = Rotary(WrongBase(runner.rotary), runner.max_positions, runner.device)
        return _MisrotatingAssembler(self, Translating(runner, storage), Translator(other))


@dataclass(frozen=True, slots=True)
class _MisrotatingAssembler:
    works_ahead: ClassVar[bool] = False
    fault: WrongRotation
    right: Assembler
    wrong: Translator

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        if request.agent != self.fault.agent:
            return self.right.assemble(request, table, plan)
        self.wrong.write(table, plan.translations)
        return plan
