"""What an experiment may replace in an embedded engine. The engine itself knows of no experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kedge.anchors.residence import HostBound
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import Translator
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.contracts import Anchors
from kedge.reuse.plan import ReusePlan
from kedge.settings import AnchorSettings
from kedge.types import GenerateRequest


class Assembler(Protocol):
    """Brings a plan's KV into a request's slots, when the request is admitted. Called by the engine's thread."""

    works_ahead: ClassVar[bool]
    """Whether what is translated may also be written piece by piece, before the request is there to be asked for."""

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        """Write what is translated; what the plan is now. Positions that it calls computed are run afterwards."""


class Translating:
    """Translates what the plan says, and nothing else."""

    works_ahead: ClassVar[bool] = True

    def __init__(self, _: ModelRunner, storage: PagedStorage) -> None:
        self._translator = Translator(storage)

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:  # noqa: ARG002
        self._translator.write(table, plan.translations)
        return plan


@dataclass(frozen=True, slots=True)
class Parts:
    """The replaceable parts of an engine, each as it is built."""

    anchors: Callable[[AnchorSettings, HostBound], Anchors] = AnchorStore
    assembler: Callable[[ModelRunner, PagedStorage], Assembler] = Translating
