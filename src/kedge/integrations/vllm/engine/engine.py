"""vLLM as an `Engine`: its `AsyncLLM` with the plug-in, in this process, behind the same server as the embedded one.

vLLM's own processes run the model; here are an event loop on a thread of its own, the tokenizer and the streams. The
plug-in gets hints: with a request, its agent and the parts of its prompt; between requests, forecasts, fixed prompts
and the ends of runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kedge.engine.base import Engine, Stream
from kedge.engine.common.grammars import Grammars
from kedge.engine.common.guarding.guarded_calls import GuardedCalls
from kedge.engine.common.model_folder import model_path, read_config
from kedge.engine.common.stream import TokenStream
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.validation import require_advice, require_sensible, sensible_hints
from kedge.errors import ConfigError, EngineClosed, RequestError
from kedge.guard import GuardMode
from kedge.hints.actions import ActionOutcome, ActionResult
from kedge.hints.without_prompt import UNREPORTED
from kedge.integrations.vllm.engine.options import (
    copy_dtype,
    plugin_settings,
    prepare_environment,
    refuse_foreign,
    require_vllm,
    transfer_config,
    vllm_arguments,
)
from kedge.integrations.vllm.entry_point import died
from kedge.integrations.vllm.plugin.hints import Message, ask, end_of, expected_prompt, salt_of, tell, turn_hints
from kedge.policies.sessions import NO_SESSIONS, refused
from kedge.reuse.guard.comparison import TOP
from kedge.settings import AnchorSettings, EngineSettings, QuotaSettings
from kedge.types import (
    AgentKey,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunKey,
    SamplingParams,
    Segment,
    TenantId,
    Tokens,
    TurnHints,
)
from kedge.workflow.forecast import Changes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kedge.engine.common.state.saving import Snapshots
    from kedge.integrations.vllm.engine.driver import Driver
    from kedge.reuse.guard.guard import QualityGuard

logger = logging.getLogger(__name__)
STATE_GRACE = 60
"""Seconds that vLLM's processes may take to end where they write a last snapshot"""


class VLLMEngine(Engine):
    """Serves a model of a folder (None: the bundled one) as `kedge.engine.base.Engine` describes.

    Without the plug-in (`plugged=False`) it is stock vLLM, to compare with: hints and forecasts are left out. `state`
    is the folder for what the plug-in keeps over a restart, `quotas` are the limits of what tenants hold.

    Raises `ConfigError` where vLLM is not installed or a setting has no meaning for it, `ModelNotFound` or
    `UnsupportedModel` for the folder, and `EngineClosed` where vLLM does not start.
    """

    tokenizer: HFTokenizer

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineSettings | None = None,
        *,
        plugged: bool = True,
        state: Path | None = None,
        quotas: Mapping[TenantId, QuotaSettings] = MappingProxyType({}),
    ) -> None:
        self.config, self._plugged = config or EngineSettings(backend="vllm"), plugged
        self.state, self._quotas = (state, quotas) if plugged else (None, {})
        require_vllm()
        refuse_foreign(self.config)
        path = model_path(model or self.config.model, copy_dtype(self.config, is_cpu=not torch.cuda.is_available()))
        read_config(path)
        self.tokenizer = HFTokenizer.load(path)
        plugin = plugin_settings(self.config, self.state, self._quotas) if plugged else None
        arguments = _engine_arguments(self.config, path, plugin)
        self._lock, self._is_closed = threading.Lock(), False
        self._failure: EngineClosed | None = None
        self._start(path, arguments)

    def _start(self, path: Path, arguments: Any) -> None:
        from anyio.from_thread import start_blocking_portal  # vLLM brings it

        from kedge.integrations.vllm.engine.driver import Driver

        self._driver = Driver(self._plugged)
        self._loop = ExitStack()
        """The event loop on a thread of its own; vLLM's remaining tasks are cancelled when it is closed"""
        self._portal = self._loop.enter_context(start_blocking_portal(name="kedge-vllm"))
        try:
            self._portal.call(self._driver.start, arguments)
        except ValueError as error:
            self._loop.close()
            raise ConfigError("engine.vllm", self.config.vllm.arguments, str(error)) from error
        except RuntimeError as error:
            self._loop.close()
            raise EngineClosed("engine", str(path), f"vLLM did not start: {error}") from error
        config = self._driver.llm.vllm_config
        model = self._driver.llm.model_config
        self._max_model_len: int = model.max_model_len
        self.tokenizer.most = self._max_model_len - 1
        self._vocab_size: int = model.get_vocab_size()
        self._max_logprobs: int = model.max_logprobs
        eos = self.tokenizer.eos_token_id
        self._grammars = Grammars(self.tokenizer, () if eos is None else (eos,), self._vocab_size)
        self._guard = GuardedCalls(self._submit_check, self.config.guard)
        self._guard_state: Snapshots | None = None
        reasons = self._portal.call(ask, self._driver.llm.engine_core, "translation_refusal") if self._plugged else []
        for refusal in filter(None, reasons):
            logger.warning("nothing is translated: %s", refusal)
        # where nothing is translated there is nothing to compare, and without log-probabilities nothing to do it with
        self._is_guarded = self._plugged and not any(reasons) and self._max_logprobs != 0
        if self._is_guarded and self.config.guard.mode is not GuardMode.OFF:
            warm_up(self._submit_check)
        if self._is_guarded and (state := self.state) is not None:
            try:
                folder = state.absolute() / "guard"
                self._guard_state = keep_guard(self._guard.guard, folder, config, self.config.anchors)
            except ConfigError:
                self.close()
                raise

    # any thread -------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> EngineClosed | None:
        """The error that vLLM's engine core has died; None while it works, and where `close` ended it."""
        if self._failure is None and not self._is_closed and self._driver.llm.errored:
            self._failure = died()
        return self._failure

    def submit(self, request: GenerateRequest) -> TokenStream:
        self._validate(request)
        self._grammars.begin(request.sampling.grammar, request.tenant)  # vLLM says less of what is wrong
        tap, asked = None, request
        if self._is_guarded:
            request, tap = self._guard.begin(request)
            request = within_top(request, self._max_logprobs)
        try:
            response = self._driver.response(request, self.tokenizer, self._max_model_len - request.prompt_tokens)
            response.stream.tap = tap
            if asked.logprobs is None and request.logprobs is not None:
                response.only_compare()
            self._call(partial(self._driver.begin, response))
        except BaseException as error:
            if tap:
                tap(error)
            raise
        return response.stream

    def _submit_check(self, check: GenerateRequest) -> TokenStream:
        """Submit a request of the guard's, whose KV in vLLM's cache may go first."""
        return self.submit(within_top(replace(check, turn=TurnHints(keep_for=0.0)), self._max_logprobs))

    def prepare(self, request: GenerateRequest) -> None:
        """Take the hint that such a request is expected, of an agent whose last prompt was translated.

        One that could not be served is ignored.
        """
        if not self._driver.translates(request):
            return
        with suppress(RequestError):
            self._validate(request)
            expected = self._guard.ordered(request)
            self._send(lambda: self._driver.send(expected_prompt(expected)))

    def _validate(self, request: GenerateRequest) -> None:
        require_sensible(request, self._vocab_size, self._max_model_len - 1)
        for key in ("logprobs", "prompt_logprobs"):
            if (getattr(request, key) or 0) > self._max_logprobs >= 0:
                raise RequestError(
                    key, getattr(request, key), f"must be at most {self._max_logprobs}, vLLM's max_logprobs"
                )

    def cancel(self, request_id: RequestId) -> bool:
        return bool(self._call(lambda: self._driver.cancel(request_id)))

    def limit(self, tenant: TenantId, quota: QuotaSettings) -> None:
        """Check a quota, see `kedge.engine.base.Engine`: vLLM's processes got all when they started. Raises
        `ConfigError` for another one.
        """
        if quota != (known := self._quotas.get(tenant, QuotaSettings())):
            raise ConfigError("limits", tenant, f"vLLM was started with {known}, and takes quotas at its start only")

    def end_run(self, run: RunKey) -> None:
        self._guard.checks.end_run(run, partial(self._send, lambda: self._driver.send(end_of(run))))

    def forecast(self, changes: Changes, prompts: Mapping[AgentKey, Tokens] = MappingProxyType({})) -> None:
        changes, prompts = sensible_hints(changes, prompts)
        self._send(lambda: self._driver.send(*self._driver.forecasts.messages(changes, prompts)))

    def advise(self, namespace: Namespace, hints: TurnHints) -> tuple[ActionOutcome, ...]:
        """Take what a client says of its sessions, see `kedge.engine.base.Engine`.

        Where vLLM does not report within a few seconds what became of it, every hint is deferred.
        """
        require_advice(namespace, hints)
        if not self._plugged:
            return refused(hints, NO_SESSIONS)
        message = Message(turn_hints(hints), salt_of(namespace))
        outcomes: list[ActionOutcome] | None = self._call(partial(tell, self._driver.llm.engine_core, message))
        return refused(hints, UNREPORTED, ActionResult.DEFERRED) if outcomes is None else tuple(outcomes)

    def wait_idle(self, timeout: float = 600.0) -> None:
        if not self._guard.checks.drain(timeout):
            raise TimeoutError(f"checks are left after {timeout} s")

    def inspect(self) -> dict[str, object]:
        """Return the counters of vLLM and the plug-in, which have none for single tenants, and the guard's records."""
        sampling = SamplingParams.of_model(self._driver.llm.model_config.get_diff_sampling_param())
        return {**self._call(partial(_figures, self._driver)), "guard": self._guard.stats(), "sampling": sampling}

    def inspect_tenants(
        self,
        owns: Callable[[Namespace], bool],
        prompts: Sequence[tuple[Namespace, Tokens]],  # noqa: ARG002
    ) -> dict[str, object]:
        """Return what the guard knows of some tenants' agents: vLLM reports nothing of what single ones hold."""
        return {"guard": self._guard.stats(owns)}

    def traffic(self, owns: Callable[[Namespace], bool]) -> Mapping[str, Any] | None:
        """Return the plug-in's report of plain requests if all of it is the given tenants'."""
        reports = self._call(partial(ask, self._driver.llm.engine_core, "report")) if self._plugged else []
        report: Mapping[str, Any] | None = next(iter(reports), None)
        return report if report and all(owns(Namespace.parse(one)) for one in report["namespaces"]) else None

    def close(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._guard.checks.stop()
            grace = STATE_GRACE if self.state else None
            self._portal.call(self._driver.close, grace)
            self._portal.call(self._portal.stop, True)
        self._loop.close()
        self._guard.checks.join()
        if is_first and self._guard_state is not None:
            self._guard_state.close()

    # the event loop ---------------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop's thread, where it may be a coroutine's, and wait for its result. Raises
        `EngineClosed` where the engine is closed, or vLLM has died.
        """
        with self._lock:  # so that nothing is called after the loop's end
            if self._is_closed:
                raise EngineClosed("engine", "vllm", "it was closed")
            if self.failure is not None:
                raise died()
            called = self._portal.start_task_soon(function)
        try:
            return called.result()
        except CancelledError:
            raise EngineClosed("engine", "vllm", "it was closed") from None

    def _send(self, message: Callable[[], Awaitable[None]]) -> None:
        """Send a message to the plug-in, if there is one, without waiting. A closed engine ignores it."""
        with self._lock:
            if self._plugged and not self._is_closed:
                self._portal.start_task_soon(message)


def _figures(driver: Driver) -> dict[str, object]:
    stats, counts, cache = driver.stats, driver.counts.copy(), driver.llm.vllm_config.cache_config
    running, waiting, usage = (
        (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) if stats else (0, 0, 0.0)
    )
    blocks = {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "leased_blocks": round(usage * (cache.num_gpu_blocks or 0)),
        **{name: counts.pop(name, 0) for name in ("prefix_queries", "prefix_hits")},
    }
    bases = counts["base_prefills_queued"] - counts["base_prefills_done"] - counts["base_prefills_dropped"]
    requests = {"running": running, "waiting": waiting, "base_prefills": bases}
    return {"cache": blocks, "requests": requests, "plugin": dict(counts)}


def _engine_arguments(config: EngineSettings, path: Path, plugin: Mapping[str, Any] | None) -> Any:
    """Return `AsyncEngineArgs`, with the plug-in by its settings. Raises `ConfigError` for values that vLLM refuses."""
    prepare_environment()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a process with threads may hang
    if plugin and plugin["state"]:
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(STATE_GRACE))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    chosen = vllm_arguments(config, path, AsyncEngineArgs, is_cpu=current_platform.is_cpu())
    own = {"scheduler_cls": None} if plugin is None else {"kv_transfer_config": transfer_config(plugin)}
    try:
        return AsyncEngineArgs(**{**chosen, **own})
    except ValueError as error:
        raise ConfigError("engine.vllm", config.vllm.arguments, str(error)) from error


# what the quality guard needs, here and in vLLM's own server --------------------------------------------------------


def warm_up(submit: Callable[[GenerateRequest], Stream]) -> None:
    """Draw tokens with log-probabilities, for one request and for two at once: vLLM compiles what these need for one
    row and for several, which takes seconds, and the quality guard asks for them beside any request.
    """
    for prompts in ([(Segment((0,), "p0"),)] * count for count in (1, 2)):
        drawn = [GenerateRequest(one, SamplingParams(max_tokens=1), ReuseMode.OFF, logprobs=TOP) for one in prompts]
        for stream in [submit(one) for one in drawn]:
            stream.result()


def within_top(request: GenerateRequest, most: int) -> GenerateRequest:
    """Return the request with no more log-probabilities than vLLM gives, its `max_logprobs`."""
    if request.logprobs is None or not 0 <= most < request.logprobs:
        return request
    return replace(request, logprobs=most)


def keep_guard(guard: QualityGuard, folder: Path, config: VllmConfig, anchors: AnchorSettings) -> Snapshots:
    """Load what the guard knew before, and begin to save what it learns, until `close`.

    Damaged records and those of another model or of other settings of the anchors are left out, with a line in the
    log. Raises `ConfigError` where the folder cannot be used.
    """
    from kedge.engine.common.state.saving import Snapshots
    from kedge.integrations.vllm.plugin.rank_state import open_state

    state = open_state(folder, config, anchors, guard=guard)
    kept = Snapshots(folder, state.load, state.save, give_back=state.close)
    kept.load()
    kept.start()
    return kept
