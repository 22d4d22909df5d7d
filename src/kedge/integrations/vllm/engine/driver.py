"""Everything that touches vLLM's `AsyncLLM`: requests, messages to the plug-in, base prefills, figures.

One event loop owns it, and its thread is the only one that calls it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from kedge.errors import EngineClosed, ForwardFailed, KedgeError, RequestError
from kedge.integrations.vllm.engine.answer import Answer
from kedge.integrations.vllm.engine.base_prefills import BasePrefills
from kedge.integrations.vllm.engine.requests import Message
from kedge.integrations.vllm.plugin.metrics import NEEDS, RECEIPTS
from kedge.types import Namespace, RequestId, Tokens

logger = logging.getLogger(__name__)
LATE = 0.5
"""Seconds for which the receipt of an answer that was ended from outside is waited for."""
Receipt = Mapping[str, Any]
"""The plug-in's"""


def sampling_params(arguments: Mapping[str, Any]) -> SamplingParams:
    """vLLM's parameters, for an answer that is streamed. Raises `RequestError` for those that it refuses."""
    try:
        return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
    except VLLMClientError as refusal:
        raise RequestError("sampling", arguments, str(refusal)) from None


@dataclass
class Figures:
    """What vLLM told last, and what the plug-in has counted since the start."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    """Share of the device's blocks that requests hold"""
    prefix_queries: int = 0
    prefix_hits: int = 0
    """Prompt tokens that were looked up in the prefix cache, and found"""
    plugin: Counter[str] = field(default_factory=Counter)


class Driver:
    """Runs requests in vLLM. What vLLM raises becomes an error of Kedge in the stream of the request."""

    def __init__(self) -> None:
        self.figures = Figures()
        self._answers: dict[RequestId, asyncio.Task[Receipt | None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._unbegun: set[RequestId] = set()
        """Requests that wait for their first token"""
        self._late: dict[RequestId, asyncio.Future[Receipt]] = {}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._numbers = itertools.count()
        self.bases = BasePrefills(self._prefill_base)

    async def start(self, arguments: Any) -> None:
        """Starts vLLM with these `AsyncEngineArgs`. Whatever it raises is the caller's to tell."""
        self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: _Listener(self)])
        self._telling = asyncio.create_task(self._tell_all())

    @property
    def is_dead(self) -> bool:
        """Whether vLLM's engine core has ended."""
        return bool(self.llm.errored)

    # requests -------------------------------------------------------------------------------------------------------

    def begin(self, answer: Answer) -> None:
        """Submits a request; its stream ends with a completion or an error, whatever happens."""
        self.bases.pause()
        generating = asyncio.create_task(self._generate(answer))
        self._answers[answer.request.request_id] = generating
        self._unbegun.add(answer.request.request_id)
        serving = asyncio.create_task(self._serve(answer, generating))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    @property
    def in_flight(self) -> Container[RequestId]:
        """Requests whose streams have not ended."""
        return self._answers.keys()

    def cancel(self, request_id: RequestId) -> bool:
        """Ends a request at the next step; False where it is not known."""
        generating = self._answers.get(request_id)
        return generating is not None and generating.cancel()

    async def _generate(self, answer: Answer) -> Receipt | None:
        """The plug-in's receipt, where the answer came to its own end."""
        request = answer.request
        prompt = tokens_input(list(request.tokens), cache_salt=str(request.namespace))
        async with aclosing(self.llm.generate(prompt, answer.params, request.request_id)) as outputs:
            async for output in outputs:
                answer.take(output)
                self._has_begun(request.request_id)
                if output.finished:
                    return (output.kv_transfer_params or {}).get("kedge")
                if answer.stopped:
                    return None
        return None

    def _has_begun(self, request_id: RequestId) -> None:
        """It waits for its first token no longer."""
        self._unbegun.discard(request_id)
        self._resume_bases()

    def _resume_bases(self) -> None:
        """While nobody waits for a first token, base prefills delay none."""
        if not self._unbegun:
            self.bases.resume()

    async def _serve(self, answer: Answer, generating: asyncio.Task[Receipt | None]) -> None:
        request_id = answer.request.request_id
        late = self._late[request_id] = asyncio.get_running_loop().create_future()
        await asyncio.wait([generating])
        error = None if generating.cancelled() else generating.exception()
        said = None if error else await self._said(answer, generating, late)
        del self._late[request_id], self._answers[request_id]
        _end(answer, error, said)
        self._has_begun(request_id)

    async def _said(
        self, answer: Answer, generating: asyncio.Task[Receipt | None], late: asyncio.Future[Receipt]
    ) -> Receipt | None:
        """The plug-in's receipt, which comes with the last output or, where there was none, on a way of its own."""
        said = None if generating.cancelled() else generating.result()
        if said is None and answer.has_begun and not self.is_dead:
            return await _within(late, LATE)
        return said

    def needed(self, prompts: Iterable[tuple[Namespace, Tokens]]) -> None:
        """Base prefills that would help those who call next."""
        for namespace, tokens in prompts:
            self.bases.ask(namespace, tuple(tokens))
        self._resume_bases()

    def heard(self, receipts: Mapping[str, Receipt]) -> None:
        """Receipts of requests that were ended from outside, by vLLM's ids: ours, a hyphen and something random."""
        for name, receipt in receipts.items():
            future = self._late.get(RequestId(name.rpartition("-")[0]))
            if future is not None and not future.done():
                future.set_result(receipt)

    # the plug-in ----------------------------------------------------------------------------------------------------

    def tell(self, messages: Iterable[Message]) -> None:
        """Messages to the plug-in, in this order; one that is dead needs none."""
        for message in messages if not self.is_dead else ():
            self._messages.put_nowait(message)

    async def _tell_all(self) -> None:
        """As `AsyncLLM.notify_kv_transfer_request_rejected`, with a prompt and with the salt that names the tenant."""
        while True:
            message = await self._messages.get()
            try:
                await self.llm.engine_core.add_request_async(self._as_request(message))
            except EngineDeadError:
                return

    def _as_request(self, message: Message) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=f"kedge-message-{next(self._numbers)}",
            prompt_token_ids=list(message.tokens),
            mm_features=None,
            sampling_params=_params(message.hints),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=str(message.namespace),
            data_parallel_rank=None,
            abort_immediately=True,
        )

    async def _prefill_base(self, namespace: Namespace, tokens: Tokens) -> None:
        prompt, name = tokens_input(list(tokens), cache_salt=str(namespace)), f"kedge-base-{next(self._numbers)}"
        try:
            async with aclosing(self.llm.generate(prompt, _params({"base": True}), name)) as outputs:
                async for _ in outputs:
                    pass
        except (VLLMClientError, EngineGenerateError, EngineDeadError) as error:
            logger.warning("a base prefill of %d tokens failed: %s", len(tokens), error)

    # the end --------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancels what runs and ends vLLM's processes."""
        await self.bases.close()
        for generating in self._answers.values():
            generating.cancel()
        await asyncio.gather(*self._serving)
        await self.bases.close()  # what has ended just now may have asked for some
        self._telling.cancel()
        self.llm.shutdown()


class _Listener(StatLoggerBase):
    """vLLM's logger of what its scheduler says of a step."""

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
        figures, told = self._driver.figures, dict(scheduler_stats.kv_connector_stats or {})
        self._driver.heard(told.pop(RECEIPTS, {}))
        self._driver.needed(told.pop(NEEDS, ()))
        figures.plugin.update(told)
        figures.running, figures.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
        figures.usage = scheduler_stats.kv_cache_usage
        figures.prefix_queries += scheduler_stats.prefix_cache_stats.queries
        figures.prefix_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """vLLM has a log of its own."""


def _params(hints: Mapping[str, Any]) -> SamplingParams:
    extra = {"kv_transfer_params": {"kedge": dict(hints)}}
    return SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)


async def _within(future: asyncio.Future[Receipt], seconds: float) -> Receipt | None:
    done, _ = await asyncio.wait([future], timeout=seconds)
    return future.result() if done else None


def _end(answer: Answer, error: BaseException | None, said: Receipt | None) -> None:
    """Put the last item into an answer's stream: a completion, or an error of Kedge.

    Whatever goes wrong while the completion is put together (the text's end, the receipt) is the request's own error:
    its reader must not wait for ever.
    """
    try:
        if error is not None:
            raise error
        answer.end(said)
    except Exception as failure:
        answer.fail(_told(failure, answer.request.request_id))


def _told(error: Exception, request_id: RequestId) -> KedgeError:
    """Return an error of vLLM's, or of what is done with its output, as one of Kedge's."""
    if isinstance(error, KedgeError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineClosed("engine", "vllm", "its engine core has died; vLLM's log says why")
    if isinstance(error, VLLMClientError):
        return RequestError("request", request_id, str(error))
    cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
    logger.error("request %s failed", request_id, exc_info=error)
    return ForwardFailed("request", request_id, f"vLLM failed, or what is done with its output: {cause!r}")
