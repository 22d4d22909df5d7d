"""The embedded engine in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.engine.base import Quota
from kedge.engine.process.engine import ProcessEngine
from kedge.errors import EngineClosed, RequestError
from kedge.hints.actions import ActionOutcome
from kedge.types import GenerateRequest, Namespace, TenantId, Tokens, TurnHints

if TYPE_CHECKING:
    from kedge.engine.common.state.snapshot import SavedState
    from kedge.engine.local.engine import LocalEngine


class LocalProcessEngine(ProcessEngine):
    """A `LocalEngine` in a process of its own, with all methods that a server needs; see `ProcessEngine`."""

    def __init__(self, make: Callable[[], LocalEngine]) -> None:
        super().__init__(make)

    def prepare(self, request: GenerateRequest) -> None:
        """Pass a hint on, see `kedge.engine.base.Preparing`."""
        with suppress(EngineClosed, RequestError):
            self._tell("prepare", request)

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Pass hints on sessions on, see `kedge.engine.base.Advisable`."""
        return tuple(self._ask("advise", namespace, hints))

    def inspect(self) -> dict[str, Any]:
        """Return the engine's figures, see `kedge.engine.base.Inspectable`."""
        return dict(self._ask("inspect"))

    def inspect_tenants(
        self, owns: Callable[[Namespace], bool], prompts: Sequence[tuple[Namespace, Tokens]]
    ) -> dict[str, Any]:
        """Return some tenants' figures, see `kedge.engine.base.Inspectable`. `owns` is pickled, as `make` is."""
        return dict(self._ask("inspect_tenants", owns, list(prompts)))

    def limit(self, tenant: TenantId, quota: Quota) -> None:
        """Bound what a tenant holds, see `kedge.engine.base.Limiting`."""
        self._ask("limit", tenant, quota)

    def save(self, folder: str | Path) -> SavedState:
        """Write what was learned, see `kedge.engine.local.engine.LocalEngine.save`."""
        saved: SavedState = self._ask("save", Path(folder).absolute())
        return saved

    def load(self, folder: str | Path) -> SavedState:
        """Read what was saved, see `kedge.engine.local.engine.LocalEngine.load`."""
        loaded: SavedState = self._ask("load", Path(folder).absolute())
        return loaded

    def wait_idle(self, timeout: float = 600.0) -> None:
        """Wait until the engine has nothing left to do. Raises `TimeoutError`."""
        self._ask("wait_idle", timeout)

    def clear(self) -> None:
        """Empty the prefix cache and forget all anchors and base KV."""
        self._ask("clear")
