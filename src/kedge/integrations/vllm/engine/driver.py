"""Requests and messages to the plug-in on vLLM's `AsyncLLM`. One event loop owns it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput, tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from kedge.engine.validation import require_new_id
from kedge.errors import ForwardFailed, KedgeError, RequestError
from kedge.integrations.vllm.engine.requests import PluginMessage
from kedge.integrations.vllm.engine.response import StreamedResponse
from kedge.integrations.vllm.entry_point import died
from kedge.integrations.vllm.plugin.hints import AFRESH, salt_of
from kedge.integrations.vllm.plugin.metrics import ANSWERS, LATE_ANSWERS, message
from kedge.types import GenerateRequest, RequestId

logger = logging.getLogger(__name__)
RECEIPT_TIMEOUT = 0.5
"""Seconds to wait for the receipt of a request that was aborted here."""
ReceiptData = Mapping[str, Any]
"""A receipt as the plug-in sends it"""


def sampling_params(arguments: Mapping[str, Any]) -> SamplingParams:
    """Return vLLM's parameters for a streamed response. Raises `RequestError` for values that vLLM refuses."""
    structure = arguments["structured_outputs"]
    if isinstance(structure, dict):
        structure = StructuredOutputsParams(**structure)
    given = {**arguments, "structured_outputs": structure}
    try:
        return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    except VLLMClientError as refusal:
        raise RequestError("sampling", arguments, str(refusal)) from None


def tokens_prompt(request: GenerateRequest) -> TokensInput:
    """Return a request's prompt for vLLM, whose prefix cache a check shares with those of its own salt or with none."""
    own = f"{AFRESH}{request.request_id}" if request.guard.afresh else ""
    return tokens_input(list(request.tokens), cache_salt=f"{salt_of(request.namespace)}{own}" or None)


@dataclass
class Figures:
    """vLLM's latest statistics, and the plug-in's counters since the start."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Share of the device's blocks that requests hold"""
    prefix_queries: int = 0
    prefix_hits: int = 0
    """Prompt tokens that were looked up in the prefix cache, and found"""
    plugin: Counter[str] = field(default_factory=Counter)


class Driver:
    """Runs requests in vLLM. An error of vLLM's ends the stream of its request as an error of Kedge's."""

    def __init__(self, plugged: bool, llm: Any = None) -> None:
        """`plugged`: whether the plug-in's receipts of requests that were ended here are awaited. `llm` is an
        `AsyncLLM` that somebody else has started.
        """
        self._plugged, self.llm = plugged, llm
        self.figures = Figures()
        self._generating: dict[RequestId, asyncio.Task[ReceiptData | None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._in_order, self._numbers = asyncio.Lock(), itertools.count()

    async def start(self, arguments: Any) -> None:
        """Start vLLM with these `AsyncEngineArgs`. Raises whatever vLLM raises."""
        self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: _StatsListener(self)])

    @property
    def is_dead(self) -> bool:
        """Whether vLLM's engine core has ended."""
        return bool(self.llm.errored)

    # requests -------------------------------------------------------------------------------------------------------

    def begin(self, response: StreamedResponse) -> None:
        """Submit a request. Its stream always ends, with a completion or an error. Raises `RequestError` for an id that
        is in flight.
        """
        require_new_id(response.request.request_id, self._generating)
        generating = asyncio.create_task(self._generate(response))
        self._generating[response.request.request_id] = generating
        serving = asyncio.create_task(self._serve(response, generating))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request at the next step. Returns False for one that is not in flight."""
        generating = self._generating.get(request_id)
        return generating is not None and generating.cancel()

    async def _generate(self, response: StreamedResponse) -> ReceiptData | None:
        """Generate a response. Returns the plug-in's receipt, None where the response was ended here."""
        outputs = self.llm.generate(
            tokens_prompt(response.request), response.params, response.request.request_id, priority=response.priority
        )
        async with aclosing(outputs):
            async for output in outputs:
                response.take(output)
                if output.finished:
                    return (output.kv_transfer_params or {}).get("kedge")
                if response.stopped:
                    return None
        return None

    async def _serve(self, response: StreamedResponse, generating: asyncio.Task[ReceiptData | None]) -> None:
        """Wait for the end of a request, and end its stream."""
        request_id = response.request.request_id
        later = LATE_ANSWERS.expect(request_id)
        await asyncio.wait([generating])
        error = None if generating.cancelled() else generating.exception()
        receipt = None if error or generating.cancelled() else generating.result()
        if error is None and receipt is None and self._plugged and response.has_begun and not self.is_dead:
            # an aborted request's comes with vLLM's statistics, not with an output
            done, _ = await asyncio.wait([later], timeout=RECEIPT_TIMEOUT)
            receipt = later.result() if done else None
        LATE_ANSWERS.forget(request_id)
        del self._generating[request_id]
        try:
            if error is not None:
                raise error
            response.end(receipt)
        except Exception as failure:  # also of the text's end or the receipt: its reader must not wait for ever
            response.stream.put(kedge_error(failure, request_id))

    # messages to the plug-in ----------------------------------------------------------------------------------------

    async def send(self, messages: Iterable[PluginMessage]) -> None:
        """Send messages to the plug-in in this order, behind those of earlier calls, unless vLLM has died: as
        `AsyncLLM.notify_kv_transfer_request_rejected` does, with a prompt and the tenant's salt.
        """
        async with self._in_order:
            with suppress(EngineDeadError):
                for one in messages:
                    sent = message(f"kedge-message-{next(self._numbers)}", *one)
                    await self.llm.engine_core.add_request_async(sent)

    # the end --------------------------------------------------------------------------------------------------------

    async def close(self, grace: float | None = None) -> None:
        """Cancel all requests and end vLLM's processes, which have `grace` seconds for that (None: vLLM's own)."""
        for generating in self._generating.values():
            generating.cancel()
        await asyncio.gather(*self._serving)
        self.llm.shutdown(grace)


class _StatsListener(StatLoggerBase):
    """A logger of vLLM's statistics, which carry the plug-in's counters and messages."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,  # noqa: ARG002 (the names are vLLM's)
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        if scheduler_stats is None:
            return
        figures, plugin_stats = self._driver.figures, dict(scheduler_stats.kv_connector_stats or {})
        LATE_ANSWERS.answered(plugin_stats.pop(ANSWERS, {}))
        figures.plugin.update(plugin_stats)
        figures.running, figures.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        figures.usage = scheduler_stats.kv_cache_usage
        figures.prefix_queries += scheduler_stats.prefix_cache_stats.queries
        figures.prefix_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM has a log of its own."""


def kedge_error(error: BaseException, request_id: RequestId) -> KedgeError:
    """Return an error of vLLM's, or from handling its output, as one of Kedge's."""
    if isinstance(error, KedgeError):
        return error
    if isinstance(error, EngineDeadError | asyncio.CancelledError):
        return died()
    if isinstance(error, VLLMClientError):
        return RequestError("request", request_id, str(error))
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
    logger.error("request %s failed", request_id, exc_info=error)
    return ForwardFailed("request", request_id, f"vLLM failed, or handling its output did: {cause!r}")
