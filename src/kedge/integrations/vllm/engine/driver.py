"""Requests on vLLM's `AsyncLLM`, and messages to the plug-in. One event loop owns it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensInput, tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from kedge.checks import LAST_SEED
from kedge.engine.validation import require_new_id
from kedge.errors import ForwardFailed, KedgeError, RequestError
from kedge.integrations.vllm.engine.response import StreamedResponse
from kedge.integrations.vllm.entry_point import FORCED, died
from kedge.integrations.vllm.plugin.hints import AFRESH, NO_PROMPT, request_hints, run_hints, salt_of, short
from kedge.integrations.vllm.plugin.metrics import ANSWERS, LATE_ANSWERS, message
from kedge.structures.bounded import BoundedDict
from kedge.types import AgentId, GenerateRequest, Namespace, RequestId, Tokens
from kedge.workflow.forecast import AgentKey, Changes, RunKey
from kedge.workflow.steps import NextRun

logger = logging.getLogger(__name__)
RECEIPT_TIMEOUT = 0.5
"""Seconds to wait for the receipt of a request that was aborted here."""
ReceiptData = Mapping[str, Any]
"""A receipt as the plug-in sends it"""


NO_SEED = -1
"""The seed that vLLM takes for none; `LAST_SEED` is used instead, so that a seeded answer repeats."""
ALIKE = ("temperature", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Parameters that vLLM and Kedge have by the same names and with the same meaning, `None` included"""


def sampling_params(request: GenerateRequest, room: int, *, hinted: bool = True, **more: Any) -> SamplingParams:
    """Return vLLM's parameters for a streamed response, with hints for the plug-in if `hinted`, and with `more` of its
    own. Raises `RequestError` for values that vLLM refuses.

    `room` is the number of tokens that the model can add to the prompt. Stop strings are not among them, as they are
    matched where tokens become text. vLLM draws at least one token.
    """
    sampling = request.sampling
    forced = {FORCED: list(request.forced)} if request.forced else {}  # where vLLM cannot force it, it is drawn
    given = {
        **{name: getattr(sampling, name) for name in (*ALIKE, "top_p", "top_k", "min_p")},
        "max_tokens": max(1, min(sampling.max_tokens, room)),
        "seed": LAST_SEED if sampling.seed == NO_SEED else sampling.seed,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "detokenize": False,
        "structured_outputs": StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
        "extra_args": {"kv_transfer_params": {"kedge": request_hints(request)}, **forced} if hinted else None,
        **more,
    }
    try:
        return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    except VLLMClientError as refusal:
        raise RequestError("sampling", sampling, str(refusal)) from None


class PluginMessage(NamedTuple):
    """Hints for the plug-in without a prompt to run. For vLLM it is a request that is aborted at once."""

    namespace: Namespace
    hints: dict[str, Any]
    tokens: Tokens = NO_PROMPT


class Forecasts:
    """The forecast of every run, merged from changes: the plug-in takes whole forecasts only."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, dict[AgentId, NextRun]] = {}
        self._sent: BoundedDict[tuple[Namespace, str, AgentId], Tokens] = BoundedDict()
        """The fixed prompts that the plug-in has: a team's runs begin with the same ones"""
        self._seq = itertools.count()

    def messages(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> Iterator[PluginMessage]:
        """Yield fixed prompts that the plug-in does not know from earlier runs, then forecasts: it adopts a prompt with
        the forecast that names its agent.
        """
        for key, tokens in prompts.items():
            if self._sent.get(agent := (key.namespace, key.client_id, key.agent)) == tokens:
                continue
            self._sent[agent] = tokens
            fixed = run_hints(key.run, agent=short(key.agent), fixed_tokens=len(tokens))
            yield PluginMessage(key.namespace, fixed, tokens)
        by_run: dict[RunKey, dict[AgentId, NextRun | None]] = {}
        for key, next_run in changes.items():
            by_run.setdefault(key.run, {})[key.agent] = next_run
        for run, changed in by_run.items():
            merged = {**self._runs.pop(run, {}), **changed}
            known = {agent: next_run for agent, next_run in merged.items() if next_run is not None}
            if known:
                self._runs[run] = known
            steps = {short(agent): one.steps if math.isfinite(one.steps) else None for agent, one in known.items()}
            yield PluginMessage(run.namespace, run_hints(run, seq=next(self._seq), steps=steps))


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
        self._in_order, self._numbers, self._forecasts = asyncio.Lock(), itertools.count(), Forecasts()

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

    async def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> None:
        """Pass on a forecast and fixed prompts."""
        await self._send(self._forecasts.messages(changes, prompts))

    async def end_run(self, run: RunKey) -> None:
        """Pass on that a run is over."""
        await self._send([PluginMessage(run.namespace, run_hints(run, final=True))])

    async def _send(self, messages: Iterable[PluginMessage]) -> None:
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
