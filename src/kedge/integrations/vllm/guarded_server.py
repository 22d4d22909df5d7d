"""Guard and proof under vLLM's own server: between its routes and its `AsyncLLM`, in the API server's process.

The routes answer by `AsyncLLM.generate`. A call whose prompt may be translated passes the guard on the way there: its
orders are added to the hints, and log-probabilities are asked for where its answer is compared. On the way back these
are left out again, and the guard's notes are added to the receipt. Everything else is vLLM's own. Checks are further
requests to the same engine, which no client sees.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams as VllmSampling
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from kedge.engine.base import Item
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.state.saving import Snapshots
from kedge.engine.common.stream import TokenStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import EngineClosed
from kedge.guard import GuardMode
from kedge.integrations.vllm.engine.driver import ALIKE, Driver, StreamedResponse, sampling_params
from kedge.integrations.vllm.engine.engine import keep_guard, warm_up, within_top
from kedge.integrations.vllm.entry_point import COMPARABLE, FIRST_LOGPROBS, is_plugged
from kedge.integrations.vllm.plugin.hints import HintedRequest, ask, end_of, guard_hints, read_hints, tell
from kedge.integrations.vllm.plugin.settings import PluginSettings
from kedge.types import GenerateRequest, RequestId, RunKey, SamplingParams, TokenDelta, TurnHints, new_request_id

logger = logging.getLogger(__name__)
KEPT = ("stop", "stop_token_ids", "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words")
"""Of a client's parameters for vLLM, those that a check draws by, too, besides Kedge's own"""


@dataclass(frozen=True, slots=True)
class ClientSampling(SamplingParams):
    """How a client of vLLM's server wants its tokens drawn."""

    own: VllmSampling | None = field(default=None, compare=False)
    """vLLM's parameters for the call, which say more than Kedge's"""


async def start_guard(client: Any) -> ServerGuard | None:
    """Put the guard before a server's `AsyncLLM`. Returns None, with a line in the log, where nothing can be proved:
    then nothing is translated that needs proof.
    """
    if client is None or not is_plugged(client.vllm_config):
        return None
    model = client.model_config
    if model.max_logprobs == 0 or model.logprobs_mode != COMPARABLE:
        logger.warning("kedge: no guard: it needs vLLM's max_logprobs above 0, and logprobs_mode %s", COMPARABLE)
        return None
    try:
        if any(await ask(client.engine_core, "translation_refusal")):  # which the plug-in has logged
            return None
        settings = PluginSettings.model_validate(client.vllm_config.kv_transfer_config.kv_connector_extra_config)
        guard = ServerGuard(client, settings, HFTokenizer.load(Path(model.tokenizer)))
        if settings.guard.mode is not GuardMode.OFF:
            await asyncio.to_thread(warm_up, guard.submit)
    except Exception:  # whatever it is, the server starts, and translates nothing that needs proof
        logger.exception("kedge: no guard")
        return None
    client.generate = guard.generate
    return guard


class ServerGuard:
    """The guard of one API server. Its event loop owns it; checks are carried out by a thread of the guard's."""

    def __init__(self, client: Any, settings: PluginSettings, tokenizer: HFTokenizer) -> None:
        """`client` is vLLM's `AsyncLLM`. Raises `ConfigError` where the folder for state cannot be used."""
        self._client, self._generate, self._driver = client, client.generate, Driver(plugged=False, llm=client)
        self._loop, self._settings, self._tokenizer = asyncio.get_running_loop(), settings, tokenizer
        self._max_logprobs, self._max_model_len = client.model_config.max_logprobs, client.model_config.max_model_len
        self.calls = GuardedCalls(self.submit, settings.guard)
        self._state: Snapshots | None = None
        if settings.state is not None:
            folder = settings.state.absolute() / _folder(client)
            self._state = keep_guard(self.calls.guard, folder, client.vllm_config, settings.anchors)

    def close(self) -> None:
        """Drop the checks that wait, and write the last snapshot. Blocks."""
        self.calls.checks.stop()
        if self._state is not None:
            self._state.close()

    # clients' calls -----------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **others: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answer as vLLM's `AsyncLLM.generate` does, which has the same parameters."""
        hinted = self._guarded(prompt, sampling_params, others)
        if hinted is None:
            return self._generate(prompt, sampling_params, request_id, **others)
        return self._answer(hinted, prompt, sampling_params, request_id, others)

    def _guarded(self, prompt: Any, params: Any, others: Mapping[str, Any]) -> HintedRequest | None:
        """Return a call that the guard has to do with; None for another."""
        transfer = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
        is_text = isinstance(prompt, Mapping) and prompt.get("type", "token") == "token"
        if not isinstance(transfer, Mapping) or not is_text or others.get("lora_request") is not None:
            return None
        tokens = prompt.get("prompt_token_ids") or ()
        hinted = read_hints(new_request_id(), tokens, prompt.get("cache_salt"), transfer, self._settings.reuse)
        if hinted is None:
            return None
        orders = hinted.request.guard
        if orders.withheld or orders.epoch or orders.rung is not None:  # its client has a guard of its own
            return None
        room = self._max_model_len - len(tokens)
        named = {name: getattr(params, name) for name in ALIKE}
        drawn = ClientSampling(max_tokens=min(room, params.max_tokens or room), own=params, **named)
        is_chosen = params.logprobs == -1 or params.flat_logprobs or getattr(params, "logprob_token_ids", None)
        # an answer that cannot be compared counts as one whose prompt's log-probabilities are asked for
        of_prompt = 0 if is_chosen or params.n > 1 else params.prompt_logprobs
        asked = replace(hinted.request, sampling=drawn, logprobs=params.logprobs, prompt_logprobs=of_prompt)
        return None if self.calls.guard.mode(asked) is GuardMode.OFF else replace(hinted, request=asked)

    async def _answer(
        self, hinted: HintedRequest, prompt: Any, params: VllmSampling, request_id: str, others: Mapping[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        asked, is_over = hinted.request, False
        served, given_tap = self.calls.begin(asked)
        served, tap = within_top(served, self._max_logprobs), given_tap or (lambda item: item)
        ordered = _ordered(params, served, ends=(ends := hinted.ends_run and not asked.turn.session))
        # the log-probabilities of a prompt are the client's alone; of an answer that is not compared its end is enough
        read = replace(served, prompt_logprobs=None)
        seen = StreamedResponse(read, self._tokenizer, ordered, served.sampling.max_tokens)
        if asked.logprobs is None and served.logprobs is not None:
            seen.only_compare()
        is_read = params.output_kind is RequestOutputKind.DELTA and served.logprobs is not None
        try:
            async with aclosing(self._generate(prompt, ordered, request_id, **others)) as outputs:
                async for output in outputs:
                    try:
                        if output.finished or is_read:
                            seen.take(output)
                        if output.finished:
                            done = TokenDelta("", (), seen.completion((output.kv_transfer_params or {}).get("kedge")))
                            is_over = True
                            _note(output, tap(done))
                    except Exception:  # whatever the guard makes of it, the client has its answer
                        logger.exception("the guard failed on request %s", request_id)
                    if served.logprobs != asked.logprobs:
                        _strip(output, asked.logprobs)
                    yield output
        finally:
            if not is_over:
                tap(EngineClosed("request", asked.request_id, "it was not answered to its end"))
            if ends:
                self.end_run(asked.run_key)

    def end_run(self, run: RunKey) -> None:
        """Let the plug-in forget a run as soon as no check needs what it shared."""

        def end() -> None:
            asyncio.run_coroutine_threadsafe(tell(self._client.engine_core, end_of(run)), self._loop)

        self.calls.checks.end_run(run, end)

    # checks -------------------------------------------------------------------------------------------------------

    def submit(self, check: GenerateRequest) -> TokenStream:
        """Begin a request of the guard's, by an id that no other API server has. Any thread may call."""
        own_id = RequestId(f"kedge-check-{uuid.uuid4().hex}")
        check = within_top(replace(check, request_id=own_id, turn=TurnHints(keep_for=0.0)), self._max_logprobs)
        room = self._max_model_len - check.prompt_tokens
        own = None if check.forced or not isinstance(check.sampling, ClientSampling) else check.sampling.own
        kept = {} if own is None else {name: getattr(own, name) for name in KEPT}
        params = sampling_params(check, room, **{**kept, "detokenize": bool(kept.get("stop"))})
        response = StreamedResponse(check, self._tokenizer, params, room, priority=sys.maxsize)
        self._loop.call_soon_threadsafe(self._driver.begin, response)
        return response.stream


def _ordered(params: VllmSampling, served: GenerateRequest, *, ends: bool) -> VllmSampling:
    """Return a client's parameters with the guard's orders. A run that `ends` does so once no check needs it."""
    ordered = copy(params)
    ordered.logprobs = served.logprobs
    transfer = params.extra_args["kv_transfer_params"]
    kedge = {**transfer["kedge"], **guard_hints(served.guard)}
    kedge["final"] = not ends and kedge.get("final")
    ordered.extra_args = {**params.extra_args, FIRST_LOGPROBS: None, "kv_transfer_params": {**transfer, "kedge": kedge}}
    return ordered


def _note(output: RequestOutput, noted: Item) -> None:
    """Add the guard's notes on a call to its receipt, if the plug-in has sent one."""
    transfer = output.kv_transfer_params or {}
    if (receipt := transfer.get("kedge")) and not isinstance(noted, BaseException) and noted.completion:
        found = noted.completion.receipt
        fidelity = found.fidelity and asdict(found.fidelity)
        notes = {"guard": [asdict(one) for one in found.guard], "fidelity": fidelity}
        output.kv_transfer_params = {**transfer, "kedge": {**receipt, **notes}}


def _strip(output: RequestOutput, asked: int | None) -> None:
    """Remove log-probabilities that a client did not ask for. At each position those of the drawn token, which vLLM
    lists first, and of the `asked` most likely ones stay. None removes all.
    """
    for one in output.outputs:
        if asked is None:
            one.logprobs = one.cumulative_logprob = None
        elif one.logprobs is not None:
            one.logprobs = [
                {token: seen for at, (token, seen) in enumerate(ranked.items()) if at == 0 or seen.rank <= asked}
                for ranked in one.logprobs
            ]


def _folder(client: Any) -> str:
    """Return the name of the folder for the guard's records: each replica and each API server has its own."""
    replica = client.vllm_config.parallel_config.data_parallel_index
    number = getattr(client.engine_core, "client_index", 0)
    return f"guard-{replica}-{number}" if replica or number else "guard"
