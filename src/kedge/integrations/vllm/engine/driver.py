"""Requests on vLLM's `AsyncLLM`, from their parameters to the stream of text, tokens and log-probabilities with its
receipt; and messages to the plug-in. One event loop owns it.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from kedge.checks import LAST_SEED
from kedge.engine.common.stream import TextStream, TokenStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.validation import require_new_id
from kedge.errors import EngineClosed, ForwardFailed, KedgeError, RequestError
from kedge.integrations.vllm.entry_point import FIRST_LOGPROBS, FORCED, died
from kedge.integrations.vllm.plugin.hints import AFRESH, Message, ask, request_hints, run_hints, salt_of, short
from kedge.reuse.guard.comparison import COMPARED_TOKENS
from kedge.reuse.reasons import with_reasons
from kedge.structures.bounded import BoundedDict
from kedge.types import (
    AgentId,
    AgentKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Namespace,
    Receipt,
    RequestId,
    ReuseMode,
    RunKey,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
    Tokens,
    WorkflowAgent,
)
from kedge.workflow.forecast import Changes
from kedge.workflow.steps import NextRun

logger = logging.getLogger(__name__)
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
        return SamplingParams(**given, output_kind=RequestOutputKind.DELTA, skip_clone=True)  # nobody else has it
    except VLLMClientError as refusal:
        raise RequestError("sampling", sampling, str(refusal)) from None


# streams --------------------------------------------------------------------------------------------------------------

NO_RECEIPT = Miss("*", "the request ended before vLLM reported where its prompt came from")
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
"""vLLM's reasons. It stops at end-of-sequence tokens only, since stop strings are matched here."""


def receipt_of(
    request: GenerateRequest, sent: ReceiptData | None, cached: int | None, parts_ms: Mapping[str, float]
) -> Receipt:
    """Return the receipt that the plug-in has `sent` for a request.

    Without one, vLLM reports the number of prompt tokens that it did not compute: `cached`, None where it had not
    begun. Whether they are exact is known only where nothing could be translated.
    """
    spans, misses = list[Span](), tuple[Miss, ...]()
    if sent:
        spans = [Span(start, stop, Source(source)) for start, stop, source in sent["spans"]]
        misses = tuple(Miss(one["segment"], one["reason"]) for one in sent["misses"])
    elif cached and request.reuse is ReuseMode.TRANSLATE:
        misses = (NO_RECEIPT,)
    elif cached is not None:
        both = Span(0, cached, Source.DEVICE), Span(cached, request.prompt_tokens, Source.COMPUTED)
        spans = [span for span in both if len(span)]
    reasons, preassembled = with_reasons(request, spans, misses), sent["preassembled"] if sent else 0
    return Receipt(request.request_id, request.reuse, tuple(spans), reasons, parts_ms, preassembled)


def ranked_logprobs(
    tokens: Iterable[int], positions: Iterable[Mapping[int, Any] | None], top: int
) -> Iterator[TokenLogprob | None]:
    """Yield the log-probability of each token, with those of the `top` most probable ones there. vLLM gives them
    together, as its `Logprob`s with ranks from 1; None for the first token of a prompt, which has no context.
    """
    for token, ranked in zip(tokens, positions, strict=True):
        if ranked is None:
            yield None
            continue
        by_rank = sorted(ranked.items(), key=lambda one: one[1].rank or 0)
        best = [(other, one.logprob) for other, one in by_rank if 1 <= (one.rank or 0) <= top]
        yield TokenLogprob(token, ranked[token].logprob, tuple(best))


class StreamedResponse:
    """The response to one request, which ends with a completion or an error. Owned by the engine's event loop."""

    def __init__(
        self, request: GenerateRequest, tokenizer: HFTokenizer, params: Any, room: int, priority: int = 0
    ) -> None:
        """`params` are vLLM's `SamplingParams`; `room` is the number of tokens that the model can add to the prompt.
        The least `priority` goes first, where vLLM goes by that.
        """
        self.request, self.params, self.priority = request, params, priority
        self.stream = TokenStream(request.request_id)
        self.finish: FinishReason | None = None
        """Set once the response is complete: later tokens are dropped."""
        self._arrived = time.perf_counter()
        self._first_token: float | None = None
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._max_tokens = self._ranked = min(request.sampling.max_tokens, room)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._cached: int | None = None
        self._stats: Any = None

    def only_compare(self) -> None:
        """Ask for log-probabilities of no more tokens than the guard compares, where only it wants any."""
        self._ranked = COMPARED_TOKENS
        self.params.extra_args = {**self.params.extra_args, FIRST_LOGPROBS: COMPARED_TOKENS}

    @property
    def has_begun(self) -> bool:
        """Whether vLLM has computed the prompt."""
        return self._first_token is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was matched, in which case vLLM does not end the request by itself."""
        return self._text.stopped

    def take(self, output: Any) -> None:
        """Take a `RequestOutput` with the tokens since the one before. Raises `ForwardFailed` if vLLM gave up."""
        if self._first_token is None:
            self._first_token, top = time.perf_counter(), self.request.prompt_logprobs
            if top is not None:
                self._prompt_logprobs = tuple(ranked_logprobs(self.request.tokens, output.prompt_logprobs, top))
                self.stream.put(TokenDelta("", (), prompt_logprobs=self._prompt_logprobs))
        self._cached, self._stats = output.num_cached_tokens, output.metrics
        if self.finish is None and (news := self._read(output.outputs[0])) != TokenDelta("", ()):
            self.stream.put(news)

    def _read(self, output: Any) -> TokenDelta:
        """Return tokens up to the end of a stop string, with their text and their log-probabilities."""
        reason = output.finish_reason
        if reason is not None and reason not in REASONS:
            raise ForwardFailed("request", self.request.request_id, f"vLLM ended it: {reason}")
        drawn = list(output.token_ids)[: self._max_tokens - len(self._tokens)]
        ends = reason == "stop" and len(drawn) == len(output.token_ids)  # with an end-of-sequence token
        text, tokens, logprobs = "", drawn[:-1] if ends else drawn, tuple[TokenLogprob, ...]()
        for at, token in enumerate(tokens, 1):
            text += self._text.push(token)
            if self.stopped:
                drawn = tokens = tokens[:at]
                break
        if self.request.logprobs is not None:
            ranked = drawn[: max(0, self._ranked - len(self._logprobs))]  # behind them, vLLM repeats the last
            found = ranked_logprobs(ranked, list(output.logprobs)[: len(ranked)], self.request.logprobs)
            logprobs = tuple(one for one in found if one is not None)
        self._tokens += tokens
        self._logprobs += logprobs
        if ends or self.stopped:
            self.finish = FinishReason.STOP
        elif len(self._tokens) >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        else:
            self.finish = None if reason is None else REASONS[reason]
        return TokenDelta(text, tuple(tokens), logprobs=logprobs)

    def end(self, receipt: ReceiptData | None) -> None:
        """End the stream with a completion. `receipt` is the plug-in's, if there is one."""
        held = self._text.flush()
        self.stream.put(TokenDelta(held, (), self.completion(receipt)))

    def completion(self, receipt: ReceiptData | None) -> Completion:
        """Return the whole of what was taken, with the text that was held back."""
        self._text.flush()
        now = time.perf_counter()
        ttft_ms = 1e3 * ((self._first_token or now) - self._arrived)
        parts = {"queue": ttft_ms}
        if self._stats is not None and self._stats.first_token_ts:  # by the clock of vLLM's process
            queue = 1e3 * (self._stats.scheduled_ts - self._stats.queued_ts)
            compute = 1e3 * (self._stats.first_token_ts - self._stats.scheduled_ts)
            parts = {"queue": queue, "compute": compute, "other": max(0.0, ttft_ms - queue - compute)}
        return Completion(
            request_id=self.request.request_id,
            text=self._text.text,
            tokens=tuple(self._tokens),
            finish_reason=self.finish or FinishReason.CANCELLED,
            receipt=receipt_of(self.request, receipt, self._cached, parts),
            ttft_ms=ttft_ms,
            total_ms=1e3 * (now - self._arrived),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


# messages, and all requests at once -----------------------------------------------------------------------------------


class Forecasts:
    """The forecast of every run, merged from changes: the plug-in takes whole forecasts only."""

    def __init__(self) -> None:
        self._runs: dict[RunKey, dict[AgentId, NextRun]] = {}
        self._sent = BoundedDict[tuple[Namespace, str, AgentId], Tokens](owner=lambda one: one[0].tenant)
        """The fixed prompts that the plug-in has: a team's runs begin with the same ones"""
        self._seq = itertools.count()

    def messages(self, changes: Changes, prompts: Mapping[AgentKey, Tokens]) -> Iterator[Message]:
        """Yield fixed prompts that the plug-in does not know from earlier runs, then forecasts: it adopts a prompt with
        the forecast that names its agent.
        """
        for key, tokens in prompts.items():
            if self._sent.get(agent := (key.namespace, key.client_id, key.agent)) == tokens:
                continue
            self._sent[agent] = tokens
            fixed = run_hints(key.run, agent=short(key.agent), fixed_tokens=len(tokens))
            yield Message(fixed, salt_of(key.namespace), tokens)
        by_run: dict[RunKey, dict[AgentId, NextRun | None]] = {}
        for key, next_run in changes.items():
            by_run.setdefault(key.run, {})[key.agent] = next_run
        for run, changed in by_run.items():
            merged = {**self._runs.pop(run, {}), **changed}
            known = {agent: next_run for agent, next_run in merged.items() if next_run is not None}
            if known:
                self._runs[run] = known
            steps = {short(agent): one.steps if math.isfinite(one.steps) else None for agent, one in known.items()}
            yield Message(run_hints(run, seq=next(self._seq), steps=steps), salt_of(run.namespace))


class Driver(StatLoggerBase):
    """Runs requests in vLLM, as a logger of its statistics. An error of vLLM's ends the stream of its request as an
    error of Kedge's.
    """

    def __init__(self, plugged: bool, llm: Any = None) -> None:
        """`plugged`: whether the plug-in's receipts of requests that were ended here are awaited. `llm` is an
        `AsyncLLM` that somebody else has started.
        """
        self._plugged, self.llm = plugged, llm
        self.stats: Any = None
        """vLLM's latest statistics, a `SchedulerStats`; None before the first step"""
        self.counts: Counter[str] = Counter()
        """The plug-in's counters since the start, and the prompt tokens that vLLM looked up in its prefix cache
        (`prefix_queries`) and found (`prefix_hits`)"""
        self._generating: dict[RequestId, asyncio.Task[ReceiptData | None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.forecasts = Forecasts()
        self._translated: BoundedDict[WorkflowAgent, bool] = BoundedDict(owner=lambda one: one.namespace.tenant)
        """Whether an agent's last prompt was translated"""

    async def start(self, arguments: Any) -> None:
        """Start vLLM with these `AsyncEngineArgs`. Raises whatever vLLM raises."""
        self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: self])

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Take vLLM's statistics of a step, which carry the plug-in's counters."""
        if scheduler_stats is not None:
            plugin_stats, found = scheduler_stats.kv_connector_stats, scheduler_stats.prefix_cache_stats
            self.stats = scheduler_stats
            self.counts.update(plugin_stats or {}, prefix_queries=found.queries, prefix_hits=found.hits)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM has a log of its own."""

    # requests -------------------------------------------------------------------------------------------------------

    def response(self, request: GenerateRequest, tokenizer: HFTokenizer, room: int) -> StreamedResponse:
        """Return the response to a request that is not begun yet. Arguments and errors as for `sampling_params`."""
        return StreamedResponse(request, tokenizer, sampling_params(request, room, hinted=self._plugged), room)

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
        request = response.request
        # vLLM's prefix cache is shared by what has the same salt: a check may have one of its own
        own = f"{AFRESH}{request.request_id}" if request.guard.recheck else ""
        prompt = tokens_input(list(request.tokens), cache_salt=f"{salt_of(request.namespace)}{own}" or None)
        outputs = self.llm.generate(prompt, response.params, request.request_id, priority=response.priority)
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
        await asyncio.wait([generating])
        error = None if generating.cancelled() else generating.exception()
        receipt = None if error or generating.cancelled() else generating.result()
        if error is None and receipt is None and self._plugged and response.has_begun:  # it was aborted here
            with suppress(EngineClosed):
                found = await ask(self.llm.engine_core, "receipt", request_id)
                receipt = next(filter(None, found), None)  # one of several engines has it
        if receipt:
            self._translated[response.request.workflow_agent] = bool(receipt["tokens"]["translated"])
        del self._generating[request_id]
        try:
            if error is not None:
                raise error
            response.end(receipt)
        except Exception as failure:  # also of the text's end or the receipt: its reader must not wait for ever
            response.stream.put(kedge_error(failure, request_id))

    def translates(self, request: GenerateRequest) -> bool:
        """Return whether the last prompt of the request's agent was translated, as far as is remembered."""
        return self._translated.get(request.workflow_agent, False)

    # messages to the plug-in ----------------------------------------------------------------------------------------

    async def send(self, *messages: Message) -> None:
        """Send messages to the plug-in in this order, behind those of earlier calls, unless vLLM has died."""
        if messages:
            with suppress(EngineClosed):
                await ask(self.llm.engine_core, "tell", messages)

    # the end --------------------------------------------------------------------------------------------------------

    async def close(self, grace: float | None = None) -> None:
        """Cancel all requests and end vLLM's processes, which have `grace` seconds for that (None: vLLM's own)."""
        for generating in self._generating.values():
            generating.cancel()
        await asyncio.gather(*self._serving)
        self.llm.shutdown(grace)


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
