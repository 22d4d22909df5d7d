"""Hints without a prompt, from vLLM's server to the plug-in in its scheduler, and back what becomes of them.

For vLLM a message is a request that is aborted at once. Such a request has no output, so the answer comes with vLLM's
statistics.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.integrations.vllm.plugin.hints import NO_PROMPT
from kedge.types import Namespace

TIMEOUT = 5.0
"""Seconds to wait for what becomes of hints: as long as a step may take"""
BEST_FIRST = list(ActionResult)
"""Of what several data-parallel engines answer, the best counts: a session is in one of them"""


def message(
    request_id: str,
    namespace: Namespace,
    hints: Mapping[str, Any],
    tokens: Sequence[int] = NO_PROMPT,
    rank: int | None = None,
) -> EngineCoreRequest:
    """Return hints for the plug-in as a request that vLLM aborts at once; `rank` is a data-parallel engine's."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=hinted_params(hints),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=str(namespace),
        data_parallel_rank=rank,
        abort_immediately=True,
    )


def hinted_params(hints: Mapping[str, Any]) -> SamplingParams:
    """Return parameters that carry hints for the plug-in."""
    extra = {"kv_transfer_params": {"kedge": dict(hints)}}
    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)


class AdviceCalls:
    """Hints that were sent and not answered yet. One event loop owns it."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[list[ActionOutcome]]] = {}

    def __len__(self) -> int:
        """Return the number of messages that wait for an answer."""
        return len(self._waiting)

    async def ask(
        self, engine_core: Any, namespace: Namespace, hints: Mapping[str, Any], timeout: float = TIMEOUT
    ) -> list[ActionOutcome] | None:
        """Send hints to every engine of vLLM's client, and return what becomes of them; None: that was not reported.

        Raises what vLLM raises where its engine has died.
        """
        count = len(getattr(engine_core, "core_engines", ()))
        ranks = range(count) if count > 1 else [None]
        name = f"kedge-advice-{uuid.uuid4().hex}"
        answers = [self._wait_for(f"{name}-{at}") for at in range(len(ranks))]
        try:
            for at, rank in enumerate(ranks):
                given = message(f"{name}-{at}", namespace, {**hints, "advice": True}, rank=rank)
                await engine_core.add_request_async(given)
            done, _ = await asyncio.wait(answers, timeout=timeout)
        finally:
            for at in range(len(ranks)):
                del self._waiting[f"{name}-{at}"]
        return _best(one.result() for one in done) if done else None

    def _wait_for(self, name: str) -> asyncio.Future[list[ActionOutcome]]:
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        return future

    def answered(self, answers: Mapping[str, Iterable[Any]]) -> None:
        """Take answers by the ids of their messages; those that nobody waits for are dropped."""
        for name, outcomes in answers.items():
            future = self._waiting.get(name)
            if future is not None and not future.done():
                future.set_result([ActionOutcome.from_dict(one) for one in outcomes])


def _best(answers: Iterable[list[ActionOutcome]]) -> list[ActionOutcome]:
    best: dict[tuple[str, str], ActionOutcome] = {}
    for one in (one for outcomes in answers for one in outcomes):
        known = best.setdefault((one.action_id, one.session), one)
        if BEST_FIRST.index(one.outcome) < BEST_FIRST.index(known.outcome):
            best[one.action_id, one.session] = one
    return list(best.values())
