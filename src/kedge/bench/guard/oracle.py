"""Dense prefill of the questions and prompts that a guarded engine has answered, on an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from kedge.bench.guard.lane import AnsweredCall, GuardLane
from kedge.bench.lab.methods import Loaded
from kedge.guard import GuardMode
from kedge.reuse.guard.comparison import WordingComparison, compare_wording
from kedge.settings import EngineSettings, GuardSettings
from kedge.types import ReuseMode
from kedge.workflow.graph import Workflow

AT_ONCE = 8
"""Questions and prompts that are computed side by side"""


class DenseOracle(AbstractContextManager["DenseOracle"]):
    """The right answers. It shares the model with the lanes, so no lane may work while it does."""

    def __init__(self, loaded: Loaded, flow: Workflow, device: str) -> None:
        config = EngineSettings(device=device, guard=GuardSettings(mode=GuardMode.OFF))
        self._lane, self._known = GuardLane(loaded, flow, config), dict[str, str]()
        self._margin = GuardSettings().margin

    def __exit__(self, *error: object) -> None:
        self._lane.engine.close()

    def answers(self, questions: Sequence[str]) -> list[str]:
        """Return the last agent's answers to these questions, which the team answers without reuse."""
        new = [one for one in dict.fromkeys(questions) if one not in self._known]
        with ThreadPoolExecutor(AT_ONCE, "kedge-oracle") as pool:
            texts = pool.map(lambda question: self._lane.ask(question, reuse=ReuseMode.OFF)[0], new)
            self._known.update(zip(new, texts, strict=True))
        return [self._known[one] for one in questions]

    def compare(self, calls: Sequence[AnsweredCall]) -> list[WordingComparison]:
        """Compare answers with those to the same prompts without reuse, as the guard does."""
        streams = [(call, self._lane.again(call)) for call in calls]
        found = [compare_wording(stream.result(), call.completion, self._margin) for call, stream in streams]
        return [one for one in found if one is not None]
