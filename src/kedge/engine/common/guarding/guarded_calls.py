"""The guard between an engine and its callers: it changes requests as they arrive and reads their completions.

A thread carries out checks one by one: freely while the engine is idle, else within a token budget, and then on the
most promising rung alone, so that one rung after the other is proved. Idle: no request for one check duration. So a
check delays a request by at most the time already waited. Runs end once no check needs what they shared.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isinf
from operator import attrgetter

from kedge.engine.base import Item, Stream
from kedge.engine.common.guarding.check import Check, by_placeholder, dense_check, translated_placeholders, trial
from kedge.engine.common.stream import Tap
from kedge.errors import EngineClosed, KedgeError, TranslationRefused
from kedge.guard import EVERYTHING, GuardMode
from kedge.reuse.costs import GRACE, MAX_PENDING
from kedge.reuse.guard.comparison import TOP
from kedge.reuse.guard.fidelity import RUNGS
from kedge.reuse.guard.guard import GuardVerdict, QualityGuard
from kedge.reuse.plan import Sentinel
from kedge.settings import GuardSettings
from kedge.structures.bounded import ENTRIES, BoundedDict
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    RunKey,
    TenantId,
    TokenDelta,
    TokenLogprob,
    WorkflowAgent,
)

Sharers = tuple[TenantId, bool, WorkflowAgent]
"""The tenant of a check, whether it is a trial, and its agent: those who share the budget"""
MAX_PAUSE = 5.0
"""Most seconds without a request after which an engine counts as idle, `GRACE` being the fewest: what a check took
beside many requests says nothing of an idle engine"""
SETTLED_SHARE = 0.2
"""Share of the budget for checks of settled agents. Each computes a whole prompt, three times what a translated call
does: within all of the budget they took 22 % of a team's tokens (SmolLM2 under load), two thirds of what it saved
"""
MAX_WAITING = 2
"""Checks of one agent that may wait before no more are prepared: the budget does not pay for them"""
logger = logging.getLogger(__name__)


def _carry_out(end: Callable[[], None]) -> None:
    try:
        end()
    except EngineClosed:
        pass  # with all that any run shared
    except Exception:  # the thread that ends a check is not the one that asked for it
        logger.exception("a run could not be ended after its checks")


def _sharers(check: Check) -> Sharers:
    return check.of.tenant, bool(check.tried), check.of.workflow_agent


class CheckThread:
    """The checks of one engine. Of more than `MAX_PENDING` that wait, the oldest one is dropped of the agent with the
    most, of the tenant with the most. Any thread may call.
    """

    def __init__(
        self,
        submit: Callable[[GenerateRequest], Stream],
        judged: Callable[[Check, Sequence[Completion | None]], None],
        settings: GuardSettings,
    ) -> None:
        """`judged` is called with every check and its answers, None for requests without one, on this thread."""
        self._submit, self._judged, self._settings = submit, judged, settings
        self._changed = threading.Condition()
        self._waiting: deque[Check] = deque()
        self._recent: deque[tuple[Sharers, int]] = deque(maxlen=MAX_PENDING)
        """Whose the last checks were, and the tokens that they took"""
        self._current: Check | None = None
        self._in_flight, self._idle_since = 0, time.monotonic()
        self._credit, self._is_charged = 0.0, False
        """Tokens that requests have earned, and whether the check under way takes them"""
        self._pause = GRACE
        """Seconds without a request after which the engine counts as idle: about as many as the last check took"""
        self._draining, self._closed = 0, False
        self._ends: dict[RunKey, Callable[[], None]] = {}
        """The ends of runs that wait for checks which need what the run shared"""
        self._thread: threading.Thread | None = None
        self.done = self.dropped = self.computed = 0
        """Checks carried out, and not; tokens computed for either"""

    # requests that are served ------------------------------------------------------------------------------------

    def arrived(self, run: RunKey) -> None:
        """Note that a request of a run is being served. If the end of an earlier run with its id still waits, that
        happens now, so that it does not hit the new one, and its checks are dropped.
        """
        with self._changed:
            self._in_flight += 1
            if end := self._ends.pop(run, None):
                self._drop([check for check in self._waiting if check.run == run])
            self._changed.notify_all()  # else a client without pauses would never see its credit spent
        if end:
            _carry_out(end)

    def left(self, tokens: int) -> None:
        """Note that a request has ended, for which `tokens` tokens were computed."""
        with self._changed:
            self._in_flight -= 1
            self._idle_since = time.monotonic()
            share = SETTLED_SHARE if all(check.is_settled for check in self._waiting) else 1.0
            credit = self._credit + share * self._settings.budget * tokens
            self._credit = credit if self._waiting else min(credit, 0.0)  # what nothing waits for is not saved up
            self._changed.notify_all()

    # checks ------------------------------------------------------------------------------------------------------

    def add(self, check: Check) -> None:
        """Queue a check."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(check)
            if len(self._waiting) > MAX_PENDING:
                agents = Counter(check.of.workflow_agent for check in self._waiting)
                tenants = Counter(check.of.tenant for check in self._waiting)
                held = [(tenants[one.of.tenant], agents[one.of.workflow_agent]) for one in self._waiting]
                self._drop([self._waiting[held.index(max(held))]])
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kedge-guard", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._carry_out_ends()

    def wants(self, agent: WorkflowAgent, *, is_settled: bool) -> bool:
        """Return whether another check of an agent would be carried out soon."""
        with self._changed:
            of_agent = (check for check in self._waiting if check.of.workflow_agent == agent)
            return sum(is_settled or not check.is_settled for check in of_agent) < MAX_WAITING

    def _drop(self, checks: Sequence[Check]) -> None:
        for check in checks:
            self._waiting.remove(check)
            self.dropped += 1

    def is_under_way(self, request_id: RequestId) -> bool:
        """Return whether a request is the check that is being carried out."""
        current = self._current
        return current is not None and any(one.request_id == request_id for one in current.requests)

    # runs --------------------------------------------------------------------------------------------------------

    def end_run(self, run: RunKey, end: Callable[[], None]) -> None:
        """Call `end` as soon as no check needs what the run shared, usually at once. Raises what it raises then."""
        with self._changed:
            if is_held := self._holds(run):
                self._ends[run] = end
        if not is_held:
            end()

    def _holds(self, run: RunKey) -> bool:
        """Return whether a check needs what a run shared."""
        return any(check is not None and check.run == run for check in (*self._waiting, self._current))

    def _carry_out_ends(self) -> None:
        """Carry out the ends of runs that no check needs any more. Called without the lock."""
        with self._changed:
            ends = [self._ends.pop(run) for run in list(self._ends) if not self._holds(run)]
        for end in ends:
            _carry_out(end)

    def drain(self, timeout: float) -> bool:
        """Carry out all checks as if the engine were idle. Returns False if some are left after `timeout` seconds."""
        with self._changed:
            self._draining += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not (self._waiting or self._current), timeout)
            finally:
                self._draining -= 1

    def stop(self) -> None:
        """Drop what waits, and carry out the ends of runs; the check under way ends with its engine."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            ends, self._ends = list(self._ends.values()), {}
            self._changed.notify_all()
        for end in ends:
            _carry_out(end)

    def join(self) -> None:
        """Wait for the thread's end, after `stop` and the engine's end."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (check := self._next()) is not None:
            self._carry_out(check)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            self._carry_out_ends()

    def _next(self) -> Check | None:
        with self._changed:
            while not self._closed:
                wait = self._seconds_to_wait()
                if wait == 0:
                    self._waiting.remove(check := self._first())
                    self._current = check.narrowed() if self._is_charged else check
                    return self._current
                self._changed.wait(wait)
            return None

    def _seconds_to_wait(self) -> float | None:
        """Return 0 if the first check may start, else the time until it may; None: until something changes."""
        if not self._waiting:
            return None
        if self._draining:
            return 0
        if self._in_flight == 0:
            return max(0.0, self._idle_since + self._pause - time.monotonic())
        if self._credit <= 0:
            return None
        self._is_charged = True
        return 0

    def _first(self) -> Check:
        """Return the check to carry out next, settled ones last: of the tenant, then the kind, then the agent with the
        fewest tokens of late. A check of a translated call takes four times as many tokens as a trial. So neither these
        checks nor trials of new agents keep the others waiting.
        """
        spent = Counter[Hashable]()
        for sharers, tokens in self._recent:
            spent.update(dict.fromkeys(sharers, tokens))
        return min(self._waiting, key=lambda one: (one.is_settled, *map(spent.__getitem__, _sharers(one))))

    def _carry_out(self, check: Check) -> None:
        is_done, answers, began = False, list[Completion | None](), time.monotonic()
        try:
            if is_done := self._answer(check.requests, answers):
                self._judged(check, answers)
        except KedgeError as error:  # the engine was closed, or has no room for it
            logger.debug("a check was not carried out: %s", error)
            is_done = False
        except Exception:  # whatever happens to a check is no request's concern
            is_done = False
            logger.exception("a check failed")
        computed = sum(answer.receipt.computed + len(answer.tokens) for answer in answers if answer is not None)
        with self._changed:
            if is_done:  # pauses shorter than a check are a client's between two calls: it would run beside the second
                self._pause = min(max(GRACE, time.monotonic() - began), MAX_PAUSE)
            if self._is_charged:  # later requests pay for what it took on top
                self._credit, self._is_charged = self._credit - computed, False
            self._recent.append((_sharers(check), computed))
            self.computed += computed
            self.done += is_done
            self.dropped += not is_done

    def _answer(self, requests: Sequence[GenerateRequest], answers: list[Completion | None]) -> bool:
        """Add the answers to all requests, several at once. None: nothing is translated in this way yet. One request by
        anchors and one without find that out first, so that the others do not compute whole prompts in vain. Returns
        False once one is cancelled.
        """
        kinds = [None if (rung := one.guard.rung) is None else RUNGS[rung].by_anchors for one in requests]
        firsts = [at for at, kind in enumerate(kinds) if kind is None or at == kinds.index(kind)]
        answers += [None] * len(requests)

        def run(which: Sequence[int]) -> bool:
            streams = [self._submit(requests[at]) for at in which]
            for at, stream in zip(which, streams, strict=True):
                with suppress(TranslationRefused):
                    answers[at] = answer = stream.result()
                    if answer.finish_reason is FinishReason.CANCELLED:
                        return False
            return True

        if not run(firsts):
            return False
        found = {kinds[at] for at in firsts if (answer := answers[at]) and answer.receipt.translated}
        return run([at for at, kind in enumerate(kinds) if at not in firsts and kind in found])


@dataclass(slots=True)
class GuardedCall:
    """A request as it arrived and as it is served."""

    asked: GenerateRequest
    served: GenerateRequest
    tried: str
    """The withheld placeholder that a check would translate, or `EVERYTHING`; "": none is withheld"""
    is_checked: bool
    is_settled: bool
    """Whether its comparison can wait until agents are compared that are new, or whose mean seems to rise"""


class GuardedCalls:
    """The guard of one engine at work. Any thread may call."""

    def __init__(self, submit: Callable[[GenerateRequest], Stream], settings: GuardSettings) -> None:
        """`submit` is the engine's own: checks are requests, whose guard is off."""
        self._settings, self.guard = settings, QualityGuard(settings)
        self._calls: dict[RequestId, GuardedCall] = {}
        self._incomparable = BoundedDict[WorkflowAgent, None](ENTRIES, owner=attrgetter("namespace.tenant"))
        """Agents whose last answer could not be compared: the next ones are not asked for log-probabilities"""
        self.checks = CheckThread(submit, self._judged, settings)
        """To be stopped before the engine ends, and joined once it has ended the stream of the check under way"""

    def ordered(self, request: GenerateRequest) -> GenerateRequest:
        """Return an expected request as it will be served."""
        return replace(request, guard=self._verdict(request).orders)

    def begin(self, request: GenerateRequest) -> tuple[GenerateRequest, Tap | None]:
        """Return the request to serve, and what its stream's items have to pass through: exactly one end of it. To be
        called before anything of it is scheduled.
        """
        if self.checks.is_under_way(request.request_id):
            return request, None
        verdict = self._verdict(request) if request.wants_translation else GuardVerdict(request.guard)
        served, settled = replace(request, guard=verdict.orders), verdict.is_settled
        call = GuardedCall(request, served, verdict.tried, is_checked=False, is_settled=settled)
        is_drawn = request.sampling.max_tokens > 0 and request.prompt_logprobs is None
        if verdict.is_checked and is_drawn and self._wants(call):
            call.is_checked, top = True, max(request.logprobs or 0, TOP)
            call.served = replace(served, logprobs=top)
        self.checks.arrived(request.run_key)
        self._calls[request.request_id] = call
        return call.served, partial(self._pass_on, call)

    def _wants(self, call: GuardedCall) -> bool:
        """Return whether an answer may be compared soon, with as many on the way as wait at most: log-probabilities
        cost every request beside it.
        """
        agent = call.asked.workflow_agent
        coming = sum(one.is_checked and one.asked.workflow_agent == agent for one in [*self._calls.values()])
        is_due = coming < MAX_WAITING and agent not in self._incomparable
        return is_due and self.checks.wants(agent, is_settled=call.is_settled)

    def sentinels_read(self, request: GenerateRequest, errors: Mapping[Sentinel, float]) -> bool:
        """Take the relative errors of a request's sentinel tokens before its first token is drawn. Returns whether its
        prompt has to be computed.
        """
        if request.request_id not in self._calls:
            return False
        drawn = {one.position: error for one, error in errors.items() if not one.is_weak}
        weak = {one.position: error for one, error in errors.items() if one.is_weak}
        return self.guard.sentinels_read(request, by_placeholder(request, drawn), by_placeholder(request, weak))

    def _verdict(self, request: GenerateRequest) -> GuardVerdict:
        try:
            return self.guard.verdict(request)
        except Exception:  # nothing is translated while nothing is known
            logger.exception("the guard failed on request %s", request.request_id)
            return GuardVerdict(replace(request.guard, withheld=frozenset((EVERYTHING,))))

    def stats(self, owns: Callable[[Namespace], bool] = lambda _: True) -> dict[str, object]:
        """Return the agents' states with their evidence, of the namespaces that `owns` picks, and counts of checks."""
        return {
            "mode": self._settings.mode.value,
            "fidelity": None if isinf(self._settings.fidelity) else self._settings.fidelity,
            "max_changed": self._settings.max_changed,
            "checks_done": self.checks.done,
            "checks_dropped": self.checks.dropped,
            "checked_tokens": self.checks.computed,
            "suspicions": self.guard.suspicions,
            "breaches": self.guard.breaches,
            "agents": self.guard.stats(owns),
        }

    # streams -----------------------------------------------------------------------------------------------------

    def _pass_on(self, call: GuardedCall, item: Item) -> Item:
        if isinstance(item, BaseException):
            self._calls.pop(call.asked.request_id, None)
            self.checks.left(0)
            return item
        if item.completion is None:
            return self._stripped(call, item)
        done = item.completion
        self._calls.pop(call.asked.request_id, None)
        self.checks.left(done.receipt.computed + len(done.tokens))
        return self._stripped(call, replace(item, completion=self._noted(call, done)))

    def _noted(self, call: GuardedCall, done: Completion) -> Completion:
        """Return a completion with the guard's notes, having queued its check."""
        served = call.served
        try:
            if done.finish_reason is not FinishReason.CANCELLED and self.guard.mode(served) is not GuardMode.OFF:
                names = translated_placeholders(served, done.receipt)
                self.guard.translated(served, names)
                self._compare(call, done, names)
            guard, fidelity = self.guard.notes(served), self.guard.fidelity(served)
            return replace(done, receipt=replace(done.receipt, guard=guard, fidelity=fidelity))
        except Exception:  # an answer is not lost for what the guard makes of it
            logger.exception("the guard failed on request %s", call.asked.request_id)
            return done

    def _compare(self, call: GuardedCall, done: Completion, names: Sequence[str]) -> None:
        """Queue the check of an answer with these placeholders translated, if there is anything to compare."""
        served, agent = call.served, call.served.workflow_agent
        if not (call.is_checked or agent in self._incomparable):
            return
        is_trial = bool((rungs := self.guard.to_try(served, call.tried)) and call.tried)
        if not (is_trial or names):
            self._incomparable[agent] = None
            return
        self._incomparable.pop(agent, None)
        if call.is_checked and is_trial:
            control = self.guard.needs_control(served)
            self.checks.add(trial(served, done, call.tried, rungs, control=control, is_settled=call.is_settled))
        elif call.is_checked:
            beside = [one for one in rungs if one is not None]
            self.checks.add(dense_check(served, done, beside, is_settled=call.is_settled))

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

    def _judged(self, check: Check, answers: Sequence[Completion | None]) -> None:
        ways = check.judge(answers)
        findings = [seen.finding for seen in ways if seen.finding is not None]
        tried = {one.guard.rung for one in check.requests if one.guard.rung is not None}
        if check.tried in ("", EVERYTHING) and (findings or tried):
            placeholders = {one.name for one in check.of.segments if one.is_placeholder}
            tried -= {one.rung for one in findings}
            self.guard.found(check.of, placeholders, findings, tried, check.noise(answers))
        for seen in ways:
            if seen.is_served:
                names = seen.names if check.tried in ("", EVERYTHING) else (check.tried,)
                self.guard.observe(check.of, names, seen.comparison)
