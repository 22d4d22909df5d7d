"""The extension points of the embedded engine, for experiments.

An experiment passes its own `EngineComponents` to `LocalEngine.from_runner`; the engine itself knows of none. What else
of `engine.local`, `anchors` and `reuse` the benchmarks import is listed, name by name, in `tests/test_imports.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.translator import translate_into
from kedge.engine.local.model.runner import ModelRunner
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.reuse.plan import ReusePlan
from kedge.settings import AnchorSettings
from kedge.types import GenerateRequest


class Assembler(Protocol):
    """The step that writes a plan's KV into a request's slots when it is admitted. Called by the engine's thread."""

    works_ahead: ClassVar[bool]
    """Whether translations may also be written piece by piece, before the request arrives."""

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:
        """Write the translated KV and return the plan as carried out; positions that it marks computed are run
        afterwards.
        """


class Translating:
    """The default assembler: it writes the plan's translations, and nothing else."""

    works_ahead: ClassVar[bool] = True

    def __init__(self, _: ModelRunner, storage: PagedStorage) -> None:
        self._translate_into = translate_into(storage)

    def assemble(self, request: GenerateRequest, table: SlotTable, plan: ReusePlan) -> ReusePlan:  # noqa: ARG002
        self._translate_into(table, plan.translations)
        return plan


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """The replaceable components of an engine, each as a function that builds it."""

    anchors: Callable[[AnchorSettings], AnchorStore] = AnchorStore
    """Settings -> the store of anchors."""
    assembler: Callable[[ModelRunner, PagedStorage], Assembler] = Translating
    """(model runner, storage) -> the assembler."""
    bases: Callable[[int], BaseStore] = BaseStore
    """Most bytes -> the store of base KV."""
