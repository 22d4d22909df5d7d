"""The guard between an engine and its callers: it changes requests as they arrive and reads their completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kedge.engine.base import Item, Stream
from kedge.engine.common.guarding.check import Check, by_placeholder, dense_check, translated_placeholders, trial
from kedge.engine.common.guarding.check_thread import CheckThread
from kedge.engine.common.stream import Tap
from kedge.guard import EVERYTHING, GuardMode
from kedge.reuse.guard.comparison import TOP
from kedge.reuse.guard.guard import GuardVerdict, QualityGuard
from kedge.reuse.guard.record import SentinelFinding
from kedge.reuse.plan import Sentinel
from kedge.settings import GuardSettings
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    RunKey,
    TokenDelta,
    TokenLogprob,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GuardedCall:
    """A request as it arrived and as it is served."""

    asked: GenerateRequest
    served: GenerateRequest
    tried: str
    """The withheld placeholder that a check would translate; "": none is withheld"""
    is_checked: bool


class GuardedCalls:
    """The guard of one engine at work. Any thread may call."""

    def __init__(self, submit: Callable[[GenerateRequest], Stream], settings: GuardSettings) -> None:
        """`submit` is the engine's own: checks are requests, whose guard is off."""
        self._settings, self._guard = settings, QualityGuard(settings)
        self.saved, self.restore = self._guard.saved, self._guard.restore
        self._calls: dict[RequestId, GuardedCall] = {}
        self._checks = CheckThread(submit, self._judged, settings)

    def ordered(self, request: GenerateRequest) -> GenerateRequest:
        """Return an expected request as it will be served."""
        return replace(request, guard=self._verdict(request).orders)

    def arriving(self, request: GenerateRequest) -> None:
        """Note that a request is about to be submitted. To be called before anything of it is queued."""
        if not self._checks.is_under_way(request.request_id):
            self._checks.begin_run(request.run_key)

    def begin(self, request: GenerateRequest) -> tuple[GenerateRequest, Tap | None]:
        """Return the request to serve, and what its stream's items have to pass through: exactly one end of it."""
        if self._checks.is_under_way(request.request_id):
            return request, None
        verdict = self._verdict(request)
        call = GuardedCall(request, replace(request, guard=verdict.orders), verdict.tried, is_checked=False)
        if verdict.is_checked and self._checks.wants(request.workflow_agent):
            self._check(call)
        self._checks.arrived()
        self._calls[request.request_id] = call
        return call.served, partial(self._pass_on, call)

    def _check(self, call: GuardedCall) -> None:
        """Let the call's answer be compared, if that is possible: nothing of it has been drawn yet."""
        request = call.served
        if request.sampling.max_tokens > 0 and request.prompt_logprobs is None:
            call.is_checked = True
            call.served = replace(request, logprobs=max(request.logprobs or 0, TOP))

    def sentinels_read(
        self, request: GenerateRequest, errors: Mapping[Sentinel, float]
    ) -> tuple[GenerateRequest, bool]:
        """Take the relative errors of a request's sentinel tokens before its first token is drawn.

        Returns the request, which is compared from here on if they are unusual, and whether its prompt has to be
        computed.
        """
        call = self._calls.get(request.request_id)
        if call is None:
            return request, False
        found = {self._sentinels_read(request, errors, weak=weak) for weak in (False, True)}
        if SentinelFinding.UNUSUAL in found and not call.is_checked:
            self._check(call)
        return call.served, SentinelFinding.REFUTED in found

    def _sentinels_read(
        self, request: GenerateRequest, errors: Mapping[Sentinel, float], *, weak: bool
    ) -> SentinelFinding:
        of_kind = {one.position: error for one, error in errors.items() if one.is_weak is weak}
        return self._guard.sentinels_read(request, by_placeholder(request, of_kind), weak=weak)

    def _verdict(self, request: GenerateRequest) -> GuardVerdict:
        try:
            return self._guard.verdict(request)
        except Exception:  # nothing is translated while nothing is known
            logger.exception("the guard failed on request %s", request.request_id)
            return GuardVerdict(replace(request.guard, withheld=frozenset((EVERYTHING,))))

    def watched_tokens(self, asked: GenerateRequest) -> int | None:
        """Return of how many tokens of a checked answer log-probabilities are needed; None: of all."""
        return self._settings.tokens if asked.logprobs is None else None

    def end_run(self, run: RunKey, end: Callable[[], None]) -> None:
        """Call `end`, which forgets what the run shared, once no check needs that any more."""
        self._checks.end_run(run, end)

    def wait_idle(self, timeout: float) -> bool:
        """Carry out all checks that wait. Returns False if some are left after `timeout` seconds."""
        return self._checks.drain(timeout)

    def clear(self) -> None:
        """Forget what is known of all agents."""
        self._guard.clear()

    def stop(self) -> None:
        """Begin no more checks."""
        self._checks.stop()

    def join(self) -> None:
        """Wait for the check under way, once the engine has ended its stream."""
        self._checks.join()

    def stats(self, owns: Callable[[Namespace], bool] = lambda _: True) -> dict[str, object]:
        """Return the agents' states with their evidence, of the namespaces that `owns` picks, and counts of checks."""
        return {
            "mode": self._settings.mode.value,
            "max_changed": self._settings.max_changed,
            "checks_done": self._checks.done,
            "checks_dropped": self._checks.dropped,
            "suspicions": self._guard.suspicions,
            "breaches": self._guard.breaches,
            "agents": self._guard.stats(owns),
        }

    # streams -----------------------------------------------------------------------------------------------------

    def _pass_on(self, call: GuardedCall, item: Item) -> Item:
        if isinstance(item, BaseException):
            self._calls.pop(call.asked.request_id, None)
            self._checks.left(0)
            return item
        if item.completion is None:
            return self._stripped(call, item)
        done = item.completion
        self._calls.pop(call.asked.request_id, None)
        self._checks.left(done.receipt.computed + len(done.tokens))
        return self._stripped(call, replace(item, completion=self._noted(call, done)))

    def _noted(self, call: GuardedCall, done: Completion) -> Completion:
        """Return a completion with the guard's notes, having queued its check."""
        try:
            self._completed(call, done)
            return replace(done, receipt=replace(done.receipt, guard=self._guard.notes(call.served)))
        except Exception:  # an answer is not lost for what the guard makes of it
            logger.exception("the guard failed on request %s", call.asked.request_id)
            return done

    def _stripped(self, call: GuardedCall, item: TokenDelta) -> TokenDelta:
        """Leave out log-probabilities that the client did not ask for."""
        if not call.is_checked:
            return item
        done = item.completion and replace(item.completion, logprobs=self._asked(call, item.completion.logprobs))
        return replace(item, logprobs=self._asked(call, item.logprobs), completion=done)

    @staticmethod
    def _asked(call: GuardedCall, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        if call.asked.logprobs is None:
            return ()
        return tuple(replace(one, top=one.top[: call.asked.logprobs]) for one in logprobs)

    def _completed(self, call: GuardedCall, done: Completion) -> None:
        served = call.served
        if done.finish_reason is FinishReason.CANCELLED or self._guard.mode(served) is GuardMode.OFF:
            return
        names = translated_placeholders(served, done.receipt)
        self._guard.translated(served, names)
        if not call.is_checked:
            return
        if call.tried:
            self._checks.add(trial(served, done, self._settings, call.tried))
        elif names:
            self._checks.add(dense_check(served, done, self._settings))

    def _judged(self, check: Check, again: Completion) -> None:
        if (judged := check.judge(again, self._settings.margin)) is not None:
            names, seen = judged
            self._guard.observe(check.of, (check.tried,) if check.tried else names, seen)
