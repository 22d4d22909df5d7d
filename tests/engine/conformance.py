"""Conformance tests for every `Engine`. Subclass `EngineConformance` and provide an engine:

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def engine(self):
            with MyEngine() as engine:
                yield engine

The engine may be shared by the tests of the class, as those that close it come last. It should take at least 1,024
tokens a request, and be greedy at temperature 0. Override `small_engine` to have overload tested, and `check_at_rest`
to look for what is left of requests that have ended.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from kedge.checks import MAX_COUNT, MAX_STOP_LENGTH, MAX_STOPS
from kedge.engine.base import Engine, Stream
from kedge.errors import EmptyPrompt, EngineClosed, InvalidToken, KedgeError, PromptTooLong, RequestError
from kedge.types import (
    AgentKey,
    Completion,
    FinishReason,
    GenerateRequest,
    Namespace,
    RequestId,
    ReuseMode,
    RunKey,
    SampleId,
    SamplingParams,
    Segment,
    TokenLogprob,
    Tokens,
    TurnHints,
    ValueKind,
)
from kedge.workflow.steps import NextRun

fresh = itertools.count()


def fresh_text(topic: str) -> str:
    """Return a text that no other test has prompted with."""
    return f"Note {next(fresh)} about {topic}: seven ships lie at anchor, and the tide turns at nine. Go on."


def fresh_id() -> RequestId:
    """Return a request id that no other test has used."""
    return f"conformance-{next(fresh)}"


def sampled(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    """Return the request under an id of its own, with these changes to how it is sampled."""
    return replace(request, request_id=fresh_id(), sampling=replace(request.sampling, **changes))


def are_chances(entries: Sequence[TokenLogprob], top: int) -> None:
    """Assert that `entries` are valid distributions: the likeliest token first, and probabilities of at most 1."""
    for entry in entries:
        logprobs = [logprob for _, logprob in entry.top]
        assert len(entry.top) == len({token for token, _ in entry.top}) == top
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= logprobs[0], "a token is likelier than the likeliest"
        assert all(logprob == entry.logprob for token, logprob in entry.top if token == entry.token)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-6


def middle(text: str) -> str:
    """Return two clean characters from the middle of a text, or one where no two stand together."""
    pieces = [text[at : at + size] for size in (2, 1) for at in range(1, len(text) - size + 1)]
    clean = [piece for piece in pieces if "\ufffd" not in piece]
    assert clean, f"the answer {text!r} is too short to be stopped"
    pairs = [piece for piece in clean if len(piece) == 2] or clean
    return pairs[len(pairs) // 2]


ANSWER = 4
"""Tokens of an answer on the small engine."""
KINDS = 6
"""Number of different prompts among the concurrent requests."""
HUGE = 10**5000
"""An integer that Python refuses to print."""
SMALLEST = 5e-324


def _extremes(good: GenerateRequest) -> Iterator[GenerateRequest]:
    for temperature in (1e-5, 1e-3, 1, 2.0):
        yield sampled(good, temperature=temperature, top_p=1, seed=1)
    for top_p in (1e-6, 0.5, 1 - 1e-16):
        yield sampled(good, temperature=2.0, top_p=top_p)
    yield sampled(good, stop=tuple(f"\0{n}" + "x" * (MAX_STOP_LENGTH - 4) for n in range(MAX_STOPS)))
    for fixed in (-1, 0, 2**63, HUGE):
        yield replace(good, fixed=fixed, reuse=ReuseMode.EXACT)
    name: Any = "naïve 🚢\n\0" * 500
    yield replace(good, client=name, workflow=name, run=name, agent=name, produces=SampleId(ValueKind.AGENT, name))
    yield replace(good, segments=(*good.segments, Segment((), "p2"), *good.segments[1:]))


class EngineConformance:
    """The conformance suite. `engine` comes from the subclass, which may also set the numbers to fit it."""

    timeout_s = 60.0
    max_tokens = 12
    """Length of a usual answer."""
    long_tokens = 900
    """Length of an answer that is still running when it is cancelled."""
    too_long = 1_000_000
    """Tokens of a prompt that the engine refuses."""
    small_capacity = 256
    """Tokens that the cache of `small_engine` holds."""
    clients = 32
    """Threads that use the engine at once."""

    def small_engine(self, engine: Engine) -> AbstractContextManager[Engine]:
        """Return an engine that holds few requests at once (`small_capacity`): one of its own, or `engine` itself.

        Overload is not tested where a subclass provides none.
        """
        pytest.skip(f"no small engine is provided beside {type(engine).__name__}")

    def check_at_rest(self, engine: Engine) -> None:
        """Raise if anything is left of requests that have ended. Does nothing here; engines that can check
        override it.
        """

    # building and running ---------------------------------------------------------------------------------------------

    def request(
        self,
        engine: Engine,
        text: str,
        *,
        reuse: ReuseMode = ReuseMode.OFF,
        tenant: str = "conformance",
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> GenerateRequest:
        """Return a greedy request of three segments, the middle one a placeholder, which only a stop string
        ends early.
        """
        before, _, after = engine.tokenizer.chat("You answer in short words.", "\0").partition("\0")
        encode = engine.tokenizer.encode
        segments = (
            Segment(encode(before), "p0"),
            Segment(encode(text), "user_question", SampleId(ValueKind.INPUT, text)),
            Segment(encode(after), "p1"),
        )
        sampling = SamplingParams(max_tokens=max_tokens or self.max_tokens, stop=stop, ignore_eos=True)
        return GenerateRequest(segments, sampling, reuse, tenant=tenant)

    def run(self, engine: Engine, request: GenerateRequest) -> Completion:
        """Submit a request and wait for its end."""
        return engine.submit(request).result(self.timeout_s)

    def again(self, engine: Engine, request: GenerateRequest, **changes: Any) -> Completion:
        """Run the same request under an id of its own, with these changes to its fields."""
        return self.run(engine, replace(request, request_id=fresh_id(), **changes))

    def serves(self, engine: Engine) -> None:
        """Assert that the engine still answers."""
        done = self.run(engine, self.request(engine, fresh_text("health")))
        assert done.finish_reason is FinishReason.LENGTH

    def refuses(self, engine: Engine, tokens: Tokens, error: type[KedgeError]) -> Any:
        """Assert that a prompt of `tokens` is refused with `error`, which is returned, and the engine goes on."""
        request = GenerateRequest((Segment(tokens, "p0"),), SamplingParams(max_tokens=1))
        refusal = pytest.raises(error, engine.submit, request).value
        self.serves(engine)
        return refusal

    # more requests than there is room for -------------------------------------------------------------------------

    crowd = 24
    """Number of concurrent requests to the small engine."""

    def test_overload_on_a_small_pool_ends_every_request_and_aborts_end_what_they_name(self, engine: Engine) -> None:
        """Overload the small engine in every reuse mode; afterwards it answers as before."""
        with self.small_engine(engine) as small:
            alone = [self.run(small, self.large(small, kind, ReuseMode.OFF)).tokens for kind in range(KINDS)]
            for reuse, aborts in itertools.product(ReuseMode, (False, True)):
                streams = [small.submit(self.large(small, number, reuse)) for number in range(self.crowd)]
                for stream in streams[::2] if aborts else ():
                    small.cancel(stream.request_id)
                for number, stream in enumerate(streams):
                    done = stream.result(self.timeout_s)
                    if not aborts or number % 2:
                        assert done.finish_reason is FinishReason.LENGTH
                        assert done.tokens == alone[number % KINDS] or reuse is ReuseMode.TRANSLATE
                assert self.run(small, self.large(small, 0, ReuseMode.OFF)).tokens == alone[0]
                self.check_at_rest(small)

    def test_many_clients_at_once_are_answered_as_one_by_one(self, engine: Engine) -> None:
        """Compare concurrent with sequential answers, while some clients send invalid requests and others cancel."""
        requests = [self.request(engine, fresh_text("clients"), reuse=ReuseMode.EXACT) for _ in range(4)]
        alone = [self.run(engine, request).tokens for request in requests]

        def client(number: int) -> None:
            request = requests[number % 4]
            pytest.raises(RequestError, engine.submit, sampled(request, top_p=0.0))
            given_up = engine.submit(sampled(request, max_tokens=self.long_tokens))
            engine.cancel(given_up.request_id)
            assert self.again(engine, request).tokens == alone[number % 4]
            assert given_up.result(self.timeout_s).finish_reason is FinishReason.CANCELLED

        with ThreadPoolExecutor(self.clients) as threads:
            list(threads.map(client, range(self.clients)))
        self.check_at_rest(engine)
        self.serves(engine)

    def large(self, engine: Engine, number: int, reuse: ReuseMode) -> GenerateRequest:
        """Return one of `KINDS` calls of agents whose prompts take from a third of the small engine to nearly all."""
        kind = number % KINDS
        size = self.small_capacity * (KINDS + 1 + 2 * kind) // (3 * KINDS) - ANSWER
        text = engine.tokenizer.encode(f"{kind} sheep count the {kind} ships at anchor. " * size)
        return GenerateRequest(
            segments=(
                Segment(text[: size // 3], "p0"),
                Segment(text[size // 3 : size - 3], "user_question", SampleId(ValueKind.INPUT, "user_question", kind)),
                Segment(text[size - 3 : size], "p1"),
            ),
            sampling=SamplingParams(ANSWER, ignore_eos=True),
            reuse=reuse,
            request_id=fresh_id(),
            tenant=f"crowd-{number % 2}",
            workflow="crowd",
            run=f"run-{number // KINDS}",
            agent=f"agent-{kind}",
            produces=SampleId(ValueKind.AGENT, str(kind)),
        )

    # aborts -------------------------------------------------------------------------------------------------------

    def test_aborts_at_any_stage_leave_a_neighbour_alone(self, engine: Engine) -> None:
        """Abort a request at every stage. The neighbour's tokens are the clock: some aborts hit the prefill, others the
        answer.
        """
        text = fresh_text("neighbours")
        alone = self.run(engine, self.request(engine, text)).tokens
        for stage in range(self.max_tokens):
            neighbour = engine.submit(self.request(engine, text))
            long = " ".join(fresh_text("aborts") for _ in range(4))
            stream = engine.submit(self.request(engine, long, max_tokens=self.long_tokens))
            deltas = iter(neighbour)
            for _ in range(stage):
                next(deltas, None)
            engine.cancel(stream.request_id)
            assert neighbour.result(self.timeout_s).tokens == alone
            assert stream.result(self.timeout_s).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        self.check_at_rest(engine)

    @pytest.mark.parametrize("reuse", ReuseMode)
    def test_an_abort_may_come_at_once_twice_and_after_the_end(self, engine: Engine, reuse: ReuseMode) -> None:
        stream = engine.submit(self.request(engine, fresh_text("aborts"), reuse=reuse, max_tokens=self.long_tokens))
        assert engine.cancel(stream.request_id)
        engine.cancel(stream.request_id)
        deltas, done = list(stream), stream.result(self.timeout_s)
        assert done.finish_reason is FinishReason.CANCELLED
        assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [done]
        assert "".join(delta.text for delta in deltas) == done.text
        ended = self.run(engine, self.request(engine, fresh_text("aborts")))
        for request_id in (stream.request_id, ended.request_id, "unknown"):
            assert not engine.cancel(request_id), "a request that has ended is no longer known"
        assert ended.finish_reason is FinishReason.LENGTH
        self.serves(engine)

    # ids ----------------------------------------------------------------------------------------------------------

    def test_a_duplicate_of_a_request_in_flight_is_refused(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("duplicates"), max_tokens=self.long_tokens)
        stream = engine.submit(request)
        other = replace(self.request(engine, fresh_text("duplicates")), request_id=request.request_id)
        for duplicate in (request, other, request):
            refusal = pytest.raises(RequestError, engine.submit, duplicate).value
            assert refusal.key == "request_id" and "duplicate" in str(refusal)
        next(iter(stream))
        pytest.raises(RequestError, engine.submit, request)
        assert engine.cancel(request.request_id), "the request had ended before it could be cancelled"
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        self.serves(engine)

    def test_one_of_many_duplicates_at_once_is_accepted(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("races"), max_tokens=self.long_tokens)
        start = Barrier(8)

        def submit(_: int) -> Stream | None:
            start.wait(self.timeout_s)
            try:
                return engine.submit(request)
            except RequestError:
                return None

        with ThreadPoolExecutor(8) as threads:
            accepted = [stream for stream in threads.map(submit, range(8)) if stream]
        engine.cancel(request.request_id)
        assert len(accepted) == 1
        assert accepted[0].result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        self.serves(engine)

    def test_an_id_may_come_again_once_its_request_has_ended(self, engine: Engine) -> None:
        """Submit an id again after its request has ended, also while the engine still learns from the earlier
        request.
        """
        for reuse in ReuseMode:
            request = self.call(engine, fresh_text("repetitions"), reuse)
            plain = self.again(engine, request, reuse=ReuseMode.OFF).tokens
            for _ in range(3):
                done = self.run(engine, request)
                assert (done.request_id, done.finish_reason) == (request.request_id, FinishReason.LENGTH)
                assert done.tokens == plain or reuse is ReuseMode.TRANSLATE

    def test_an_id_may_come_again_after_an_abort_and_after_a_refusal(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("repetitions"))
        for _ in range(3):
            stream = engine.submit(replace(request, sampling=replace(request.sampling, max_tokens=self.long_tokens)))
            engine.cancel(request.request_id)
            assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
            pytest.raises(RequestError, engine.submit, replace(request, segments=()))
            assert self.run(engine, request).finish_reason is FinishReason.LENGTH

    def call(self, engine: Engine, text: str, reuse: ReuseMode) -> GenerateRequest:
        """Return an agent's call with an answer that other agents are going to read."""
        return replace(
            self.request(engine, text, reuse=reuse),
            request_id=fresh_id(),
            workflow="flow",
            run="run",
            agent="speaker",
            produces=SampleId(ValueKind.AGENT, "speaker"),
        )

    # values -------------------------------------------------------------------------------------------------------

    def test_prompts_that_cannot_be_computed_are_refused(self, engine: Engine) -> None:
        self.refuses(engine, (), EmptyPrompt)
        valid = engine.tokenizer.encode("a")[:1]
        too_long = self.refuses(engine, valid * self.too_long, PromptTooLong)
        before = pytest.raises(PromptTooLong, engine.tokenizer.measure, "a b " * self.too_long).value
        assert before.most == too_long.most, "whoever looks, before the text is tokenized or after it"
        for token in (-1, 2**31 - 1, 2**63):
            self.refuses(engine, (*valid, token), InvalidToken)

    def test_what_cannot_be_meant_is_refused_by_name(self, engine: Engine) -> None:
        """`tests/engine/test_validation.py` has all such values; the engine knows how large its vocabulary is."""
        good = self.request(engine, fresh_text("nonsense"))
        assert pytest.raises(RequestError, engine.submit, sampled(good, max_tokens=HUGE)).value.key == "max_tokens"
        first, placeholder, last = good.segments
        foreign = replace(good, segments=(first, replace(placeholder, base_context=(2**63,)), last))
        refusal = pytest.raises(RequestError, engine.submit, foreign).value
        assert refusal.key == "segments[1].base_context" and "vocabulary of" in str(refusal)
        self.serves(engine)

    def test_tiny_temperatures_and_nuclei_are_greedy(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("tiny numbers"))
        plain = self.run(engine, request)
        for temperature in (0, -0.0, SMALLEST, 1e-320, 1e-46, 1e-40, 1e-9):
            assert self.run(engine, sampled(request, temperature=temperature)).tokens == plain.tokens, temperature
        for top_p in (SMALLEST, 1e-320, 1e-46, 1e-40, 1e-9):
            assert self.run(engine, sampled(request, temperature=1.0, top_p=top_p)).tokens == plain.tokens, top_p

    def test_extreme_values_that_are_accepted_are_answered(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("extremes"))
        for request in _extremes(good):
            done = self.run(engine, replace(request, request_id=fresh_id()))
            assert done.finish_reason is FinishReason.LENGTH
            assert len(done.tokens) == self.max_tokens
        self.serves(engine)

    def test_any_seed_repeats(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("seeds"))
        for seed in (-(2**63), -1, 0, 2**63 - 1):
            seeded = [self.run(engine, sampled(request, temperature=1.0, seed=seed)).tokens for _ in range(2)]
            assert seeded[0] == seeded[1], seed

    def test_an_answer_without_end_is_refused_or_can_be_ended(self, engine: Engine) -> None:
        request = sampled(self.request(engine, fresh_text("endless")), max_tokens=MAX_COUNT)
        try:
            stream = engine.submit(request)
        except PromptTooLong:
            return self.serves(engine)
        next(iter(stream))
        engine.cancel(request.request_id)
        assert stream.result(self.timeout_s).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        return self.serves(engine)

    # hints --------------------------------------------------------------------------------------------------------

    def test_hints_change_no_token(self, engine: Engine) -> None:
        """Check forecasts that are right, wrong, late, or about unknown agents."""
        request = self.call(engine, fresh_text("hints"), ReuseMode.EXACT)
        plain = self.run(engine, request).tokens
        keys = [AgentKey(*request.run_key, name) for name in ("speaker", "unknown")]
        for steps in (0.0, 3.0, math.inf):
            engine.forecast(dict.fromkeys(keys, NextRun(steps)), dict.fromkeys(keys, request.segments[0].tokens))
            assert self.again(engine, request).tokens == plain
        engine.forecast(dict.fromkeys(keys))
        self.serves(engine)

    def test_preparing_changes_no_token(self, engine: Engine) -> None:
        """Check hints of an empty, half, whole or different prompt. An engine may ignore them."""
        text = " ".join(fresh_text("preparing") for _ in range(3))
        request = self.call(engine, text, ReuseMode.EXACT)
        plain = self.again(engine, request, reuse=ReuseMode.OFF).tokens
        other = self.request(engine, fresh_text("others"), reuse=ReuseMode.EXACT).segments
        begun = (request.segments[0], replace(request.segments[1], tokens=()), request.segments[2])
        for segments in ((), begun, request.segments, other, ()):
            engine.prepare(replace(request, segments=segments, request_id=fresh_id()))
            done = self.again(engine, request)
            assert done.tokens == plain
            assert 0 <= done.receipt.preassembled < request.prompt_tokens
        engine.end_run(request.run_key)

    def test_hints_that_cannot_be_meant_are_ignored(self, engine: Engine) -> None:
        request = self.call(engine, fresh_text("nonsense"), ReuseMode.EXACT)
        plain = self.run(engine, request).tokens
        key: Any = AgentKey(*request.run_key, "speaker")
        nonsense: Any = [({key: NextRun(math.nan)}, {key: (-1,)}), ({"speaker": NextRun(1.0)}, {None: (1, 2)})]
        for changes, prompts in nonsense:
            engine.forecast(changes, prompts)
            assert self.again(engine, request).tokens == plain
        impossible: Any = [{"segments": None}, {"segments": (Segment((-1, 2**70), "p0"),)}, {"tenant": 5}]
        for wrong in impossible:
            engine.prepare(replace(request, **{"request_id": fresh_id(), **wrong}))
            assert self.again(engine, request).tokens == plain
        engine.forecast({key: None})
        self.serves(engine)

    def test_advice_on_sessions_changes_no_token_and_is_answered(self, engine: Engine) -> None:
        """Check advice on sessions that are known, unknown, or another tenant's. An engine may take none."""
        text, name = fresh_text("advice"), fresh_id()
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), turn=TurnHints(name))
        plain = self.run(engine, request).tokens
        for namespace in (request.namespace, Namespace("others")):
            for said in (TurnHints(name, keep_for=9.0, returns_in=1.0), TurnHints(expects={name: math.inf, "x": 1.0})):
                outcomes = engine.advise(namespace, said)
                assert len(outcomes) == 2 and all(one.reason for one in outcomes), outcomes
                assert self.again(engine, request).tokens == plain
        assert {one.action_id for one in engine.advise(request.namespace, TurnHints(name, is_last=True))} == {"final"}
        assert engine.advise(request.namespace, TurnHints()) == ()
        pytest.raises(RequestError, engine.advise, request.namespace, TurnHints(name, keep_for=-1.0))
        pytest.raises(RequestError, engine.advise, None, TurnHints(name, keep_for=1.0))
        assert self.again(engine, request).tokens == plain

    def test_the_end_of_a_run_ends_no_request(self, engine: Engine) -> None:
        """Check the end of another run, of another tenant's run, and of the request's own run."""
        request = replace(self.request(engine, fresh_text("runs"), reuse=ReuseMode.TRANSLATE), run="run")
        plain = self.again(engine, request, reuse=ReuseMode.OFF).tokens
        for tenant, run in (("others", "run"), (request.tenant, "other"), ("", ""), (request.tenant, "run")):
            stream = engine.submit(replace(request, request_id=fresh_id(), reuse=ReuseMode.EXACT))
            engine.end_run(RunKey(Namespace(tenant), request.client, run))
            assert stream.result(self.timeout_s).tokens == plain

    # reuse --------------------------------------------------------------------------------------------------------

    def test_exact_reuse_changes_no_token(self, engine: Engine) -> None:
        text = " ".join(fresh_text("reuse") for _ in range(3))
        plain = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        first = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        second = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        again = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        assert plain.tokens == first.tokens == second.tokens == again.tokens
        assert again.receipt.exact == 0, "a request without reuse leaned on others"
        assert second.receipt.exact > 0, "the second call reused nothing"
        assert second.receipt.computed > 0, "the first logits were not computed"
        assert second.receipt.translated == 0

    def test_reuse_never_crosses_tenants(self, engine: Engine) -> None:
        text = " ".join(fresh_text("tenants") for _ in range(3))
        self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant="tenant-a"))
        other = f"tenant-b{next(fresh)}"
        done = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant=other))
        assert done.receipt.exact == 0

    # log-probabilities --------------------------------------------------------------------------------------------

    def test_an_answer_is_told_with_its_log_probabilities(self, engine: Engine) -> None:
        request = replace(self.request(engine, fresh_text("chances")), logprobs=3)
        stream = engine.submit(request)
        deltas = list(stream)
        done = stream.result(self.timeout_s)
        assert tuple(entry.token for entry in done.logprobs) == done.tokens
        assert tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)) == done.logprobs
        assert all(bool(delta.logprobs) == bool(delta.tokens) for delta in deltas), "each comes with its token"
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in done.logprobs), "it was greedy"
        are_chances(done.logprobs, 3)
        assert done.prompt_logprobs == ()

    def test_the_token_that_ends_an_answer_has_one_too(self, engine: Engine) -> None:
        text = fresh_text("ends")
        request = sampled(self.request(engine, text, max_tokens=256), ignore_eos=False)
        request = replace(request, logprobs=0)
        done = self.run(engine, request)
        drawn = len(done.tokens) + (done.finish_reason is FinishReason.STOP)
        assert len(done.logprobs) == drawn
        assert tuple(entry.token for entry in done.logprobs)[: len(done.tokens)] == done.tokens

    def test_a_prompt_is_told_with_its_log_probabilities(self, engine: Engine) -> None:
        """Check that the whole prompt is computed, whatever is cached, and that its logprobs do not depend on reuse."""
        text = " ".join(fresh_text("scores") for _ in range(3))
        self.run(engine, replace(self.request(engine, text, reuse=ReuseMode.EXACT), prompt_logprobs=0))
        plain = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        assert plain.receipt.exact > 0, "its KV is left to others"
        reported = []
        for reuse in ReuseMode:
            request = replace(self.request(engine, text, reuse=reuse), prompt_logprobs=2)
            stream = engine.submit(request)
            deltas = list(stream)
            done = stream.result(self.timeout_s)
            first, others = done.prompt_logprobs[:1], done.prompt_logprobs[1:]
            assert first == (None,) and all(others)
            assert tuple(entry.token for entry in others if entry) == request.tokens[1:]
            are_chances([entry for entry in others if entry], 2)
            assert [bool(delta.prompt_logprobs) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
            assert deltas[0].prompt_logprobs == done.prompt_logprobs
            assert done.receipt.computed == request.prompt_tokens
            assert bool(done.receipt.misses) or reuse is ReuseMode.OFF, "the receipt gives no reason"
            assert done.logprobs == ()
            reported.append([round(entry.logprob, 3) for entry in others if entry])
        assert reported[0] == reported[1] == reported[2]

    def test_a_prompt_can_be_computed_without_an_answer(self, engine: Engine) -> None:
        """Run a prompt with `max_tokens=0`; later requests reuse its KV."""
        text = " ".join(fresh_text("warming") for _ in range(3))
        request = sampled(self.request(engine, text, reuse=ReuseMode.EXACT), max_tokens=0)
        done = self.run(engine, request)
        assert (done.text, done.tokens, done.finish_reason) == ("", (), FinishReason.LENGTH)
        assert done.receipt.prompt_tokens == request.prompt_tokens
        assert self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT)).receipt.exact > 0

    # answers ------------------------------------------------------------------------------------------------------

    def test_receipt_accounts_for_every_prompt_token(self, engine: Engine) -> None:
        text = fresh_text("receipts")
        for reuse in (*ReuseMode, *ReuseMode):
            request = self.request(engine, text, reuse=reuse)
            receipt = self.run(engine, request).receipt
            assert (receipt.request_id, receipt.mode) == (request.request_id, reuse)
            edges = [0, *(span.stop for span in receipt.spans)]
            assert [span.start for span in receipt.spans] == edges[:-1], "spans leave a gap or overlap"
            assert all(len(span) > 0 for span in receipt.spans)
            assert edges[-1] == receipt.prompt_tokens == request.prompt_tokens
            assert all(part >= 0 for part in receipt.parts_ms.values())

    def test_deltas_concatenate_to_the_completion(self, engine: Engine) -> None:
        for max_tokens in (1, self.max_tokens):
            request = self.request(engine, fresh_text("streams"), max_tokens=max_tokens)
            stream = engine.submit(request)
            deltas = list(stream)
            done = stream.result(self.timeout_s)
            assert (len(done.tokens), done.finish_reason) == (max_tokens, FinishReason.LENGTH)
            assert engine.tokenizer.decode(done.tokens).startswith(done.text)
            assert stream.request_id == done.request_id == request.request_id
            assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [done]
            assert "".join(delta.text for delta in deltas) == done.text
            assert tuple(itertools.chain.from_iterable(delta.tokens for delta in deltas)) == done.tokens
            assert done.logprobs == done.prompt_logprobs == (), "nobody asked"
            assert 0 < done.ttft_ms <= done.total_ms

    def test_a_stop_string_ends_the_text_before_it(self, engine: Engine) -> None:
        text = fresh_text("stops")
        free = self.run(engine, self.request(engine, text)).text
        stop = middle(free)
        stream = engine.submit(self.request(engine, text, stop=("\0never\0", stop)))
        streamed = "".join(delta.text for delta in stream)
        done = stream.result(self.timeout_s)
        assert done.finish_reason is FinishReason.STOP
        assert done.text == streamed == free[: free.find(stop)]

    # texts --------------------------------------------------------------------------------------------------------

    def test_texts_survive_encoding_and_are_the_bytes_of_their_tokens(self, engine: Engine) -> None:
        chat = engine.tokenizer.chat("Be brief.", "x")
        for text in ("", "Hello, world!", "  two  spaces\n\nand lines\t", "naïve 日本 🚢", "12 + 30 = 42", chat):
            tokens = engine.tokenizer.encode(text)
            assert text == chat or engine.tokenizer.decode(tokens) == text
            assert b"".join(map(engine.tokenizer.token_bytes, tokens)) == text.encode()
        assert engine.tokenizer.encode("") == ()

    def test_chat_holds_its_messages_in_order(self, engine: Engine) -> None:
        text = engine.tokenizer.chat("Be brief.", "What is a kedge?")
        assert 0 <= text.find("Be brief.") < text.find("What is a kedge?")
        assert "What is a kedge?" in engine.tokenizer.chat(None, "What is a kedge?")

    def test_specials_in_a_value_are_plain_text(self, engine: Engine) -> None:
        """Check that text from a user or a tool cannot end a turn."""
        prompt = engine.tokenizer.chat(None, "x")
        apart = engine.tokenizer.encode(prompt, special=False)
        assert len(apart) > len(engine.tokenizer.encode(prompt))
        assert engine.tokenizer.decode(engine.tokenizer.encode(prompt)) != prompt, "no special token was dropped"
        assert engine.tokenizer.eos_token_id not in apart
        assert engine.tokenizer.decode(apart) == prompt

    def test_close_cancels_refuses_and_is_idempotent(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("closing"), max_tokens=self.long_tokens)
        stream = engine.submit(request)
        next(iter(stream))
        engine.close()
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        engine.close()
        engine.forecast({})
        engine.prepare(request)
        engine.end_run(request.run_key)
        pytest.raises(EngineClosed, engine.submit, self.request(engine, fresh_text("closing")))
