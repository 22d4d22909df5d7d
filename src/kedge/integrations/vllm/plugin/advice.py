"""Hints without a prompt, in vLLM's scheduler: each is taken when its message arrives, and answered with statistics."""

from __future__ import annotations

from collections.abc import Callable

from kedge.hints.actions import ActionOutcome
from kedge.hints.without_prompt import run_ended, took_forecast
from kedge.integrations.vllm.plugin.agent_prompts import AgentPrompts
from kedge.integrations.vllm.plugin.hints import HintedRequest
from kedge.integrations.vllm.plugin.session_histories import SessionHistories
from kedge.structures.bounded import BoundedDict
from kedge.types import RequestId, RunKey

MAX_UNSENT = 1024
"""Answers that wait for a step to go with; the oldest is dropped"""
Answers = dict[str, list[dict[str, str]]]
"""What becomes of hints, by the id of the message that they came with"""


class Advice:
    """What clients say of their sessions and runs between requests. Owned by the scheduler."""

    def __init__(self, sessions: SessionHistories, prompts: AgentPrompts, end_run: Callable[[RunKey], None]) -> None:
        """`end_run` forgets a run that is over."""
        self._sessions, self._prompts, self._end_run = sessions, prompts, end_run
        self._answers: BoundedDict[RequestId, list[dict[str, str]]] = BoundedDict(MAX_UNSENT)

    def take(self, hinted: HintedRequest) -> None:
        """Take the hints of a message."""
        request = hinted.request
        outcomes = [*self._of_run(hinted), *self._sessions.advise(request.namespace, request.turn)]
        self._answers[request.request_id] = [one.to_dict() for one in outcomes]

    def _of_run(self, hinted: HintedRequest) -> list[ActionOutcome]:
        outcomes = []
        if hinted.steps is not None:
            is_newer = bool(hinted.request.run) and self._prompts.forecast(hinted, hinted.steps)
            outcomes.append(took_forecast(hinted.request.run, is_newer))
        if hinted.ends_run:
            self._end_run(hinted.run)
            outcomes.append(run_ended())
        return outcomes

    def answers(self) -> Answers:
        """Return what became of the hints since the last call."""
        taken = {str(request_id): outcomes for request_id, outcomes in self._answers.items()}
        self._answers.clear()
        return taken
