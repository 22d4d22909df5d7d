"""An embedded engine without its thread, so that a test takes its steps, sees every pass and checks the books."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.local import build
from kedge.engine.local.core import EngineCore
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sampler import Sampler
from kedge.engine.local.sequence import RequestSequence, Work
from kedge.reuse.costs import EngineCosts, LinearCost
from kedge.settings import AnchorSettings, EngineSettings, PlannerSettings
from kedge.types import GenerateRequest
from tests.engine.local.conftest import tiny_model, tiny_tokenizer

OPEN = {"min_anchors": 1, "max_error": 1e9, "weak_error": 1e9}
"""Thresholds so wide that whatever was observed once is shared."""
ENOUGH = 5000
"""Steps after which an engine that still has something to do never ends"""


class KnownCosts(EngineCosts):
    """Costs that stay what they are, whatever the clock says: seconds of a pass, its tokens and its sequences, and of
    a translation's segments and tokens.
    """

    passes = (2e-3, 1e-4, 3e-4)
    translations = (1e-3, 1e-5)

    def __init__(self, *, by_cost: bool = True) -> None:
        super().__init__(by_cost=by_cost)
        self._passes, self._translations = LinearCost(self.passes), LinearCost(self.translations)

    def observe_pass(self, tokens: int, sequences: int, seconds: float) -> None:
        pass

    def observe_translation(self, segments: int, tokens: int, seconds: float) -> None:
        pass


@cache
def runner() -> ModelRunner:
    return checked_runner(tiny_model("llama"))


class Stepped:
    """An engine that is stepped by hand."""

    def __init__(
        self, costs: type[EngineCosts] = KnownCosts, model: ModelRunner | None = None, **settings: object
    ) -> None:
        defaults: dict[str, object] = {
            "kv_memory": "256 blocks",
            "device": "cpu",
            "anchors": AnchorSettings(**OPEN),
            "planner": PlannerSettings(by_cost=False),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "EngineCosts", costs)
            self.core: EngineCore
            self.core = EngineCore(build.EngineParts(model or runner(), EngineSettings(**{**defaults, **settings})))
        self.passes: list[list[Work]] = []
        """All passes so far"""
        schedule = self.core.scheduler.schedule
        self.core.scheduler.schedule = lambda: self._noted(schedule())  # type: ignore[method-assign]

    def _noted(self, work: list[Work]) -> list[Work]:
        if work:
            self.passes.append(work)
        return work

    def submit(self, request: GenerateRequest) -> RequestSequence:
        return self.queue(self.sequence(request))

    def sequence(self, request: GenerateRequest) -> RequestSequence:
        """Return the sequence of a request that is not queued yet."""
        return RequestSequence(
            request.request_id, request.namespace, list(request.tokens), request=request,
            stream=TokenStream(request.request_id), sampler=Sampler(request.sampling),
            text=TextStream(tiny_tokenizer(), ()), max_tokens=request.sampling.max_tokens,
        )  # fmt: skip

    def queue(self, sequence: RequestSequence) -> RequestSequence:
        self.core.requests.submit(sequence)
        self.check()
        return sequence

    def step(self) -> None:
        self.core.step()
        self.check()

    def check(self) -> None:
        """Look at the books, as after every step."""
        self.core.parts.check_integrity()

    def until(self, condition: Callable[[], object]) -> None:
        """Step until it holds."""
        for _ in range(ENOUGH):
            if condition():
                return
            self.step()
        pytest.fail("it never came to that")

    def rest(self) -> None:
        """Step until nothing is left but learning."""
        self.until(lambda: self.core.idle and not self.core.parts.cache.transferring)

    def learn(self) -> None:
        """Learn all that is left to be learned."""
        for _ in range(ENOUGH):
            if not self.core.can_learn:
                return
            self.core.parts.learning.backlog.step()
            self.check()
        pytest.fail("learning never ends")

    def serve(self, request: GenerateRequest) -> RequestSequence:
        """Serve a request to its end, then learn from it."""
        sequence = self.submit(request)
        self.rest()
        self.learn()
        return sequence

    def stats(self, part: str) -> dict[str, Any]:
        told: Any = self.core.parts.stats()[part]
        return told

    @property
    def leased(self) -> int:
        """Blocks that somebody holds."""
        blocks: int = self.stats("cache")["leased_blocks"]
        return blocks

    def cost(self, work: list[Work]) -> float:
        """Return what a pass over this work takes."""
        tokens = sum(len(item.positions) for item in work)
        return self.core.parts.costs.pass_seconds(tokens, len(work)) if work else 0.0
