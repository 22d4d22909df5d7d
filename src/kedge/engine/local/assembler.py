"""The step that writes a plan's KV: the extension point of the embedded engine, for experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kedge.anchors.translator import translate_into
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan
from kedge.types import GenerateRequest


class Assembler:
    """Write a plan's translations into a request's slots when it is admitted. Called by the engine's thread.

    An experiment passes one of its own to `LocalEngine.from_runner`.
    """

    works_ahead: ClassVar[bool] = True
    """Whether translations may also be written piece by piece, before the request arrives."""

    def __init__(self, _: ModelRunner, storage: PagedStorage) -> None:
        self._translate_into = translate_into(storage)

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:  # noqa: ARG002
        """Write the translated KV and return the plan as carried out; positions that it marks computed are run
        afterwards.
        """
        self._translate_into(table, plan.translations)
        return plan


MakeAssembler = Callable[[ModelRunner, PagedStorage], Assembler]
