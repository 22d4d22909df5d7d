"""What every `Engine` must do, as tests. Subclass and give an engine:

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def engine(self):
            with MyEngine() as engine:
                yield engine

The engine may be shared by the tests of the class, as those that close it come last. It should take at least 1,024
tokens a request, and be greedy at temperature 0. Nothing here imports pytest, so the methods can also be called by
hand. To see what an assertion compared, call `pytest.register_assert_rewrite("kedge.engine.conformance")` first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kedge.engine.base import Engine, Preparing
from kedge.errors import EmptyPrompt, EngineClosed, InvalidToken, KedgeError, PromptTooLong, RequestError
from kedge.types import (
    AgentId,
    Completion,
    FinishReason,
    GenerateRequest,
    RequestId,
    ReuseMode,
    RunId,
    SampleId,
    SamplingParams,
    Segment,
    TenantId,
    TokenLogprob,
    Tokens,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import NextRun

_fresh = itertools.count()


def fresh_text(topic: str) -> str:
    """A text that no other test has prompted with."""
    return f"Note {next(_fresh)} about {topic}: seven ships lie at anchor, and the tide turns at nine. Go on."


class EngineConformance:
    """The suite. `engine` comes from the subclass; the numbers may be set to fit it."""

    timeout_s = 60.0
    max_tokens = 12
    """Length of a usual answer."""
    long_tokens = 900
    """Length of an answer that is still running when it is cancelled."""
    too_long = 1_000_000
    """Tokens of a prompt that the engine refuses."""

    # building and running -------------------------------------------------------------------------------------------

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
        """A greedy request in three segments, the middle one a placeholder, that only a stop string ends early."""
        before, _, after = engine.tokenizer.chat("You answer in short words.", "\0").partition("\0")
        encode = engine.tokenizer.encode
        segments = (
            Segment(encode(before), "p0"),
            Segment(encode(text), "user_question", SampleId(f"user_question@{text}")),
            Segment(encode(after), "p1"),
        )
        sampling = SamplingParams(max_tokens=max_tokens or self.max_tokens, stop=stop, ignore_eos=True)
        return GenerateRequest(segments, sampling, reuse, tenant=TenantId(tenant))

    def run(self, engine: Engine, request: GenerateRequest) -> Completion:
        """Submits and waits."""
        return engine.submit(request).result(self.timeout_s)

    def serves(self, engine: Engine) -> None:
        """The engine still answers."""
        done = self.run(engine, self.request(engine, fresh_text("health")))
        assert done.finish_reason is FinishReason.LENGTH

    def refuses(self, engine: Engine, tokens: Tokens, error: type[KedgeError]) -> None:
        """A prompt of `tokens` is refused with `error`, and the engine goes on."""
        request = GenerateRequest((Segment(tokens, "p0"),), SamplingParams(max_tokens=1))
        expect(error, lambda: engine.submit(request))
        self.serves(engine)

    # the tokenizer ----------------------------------------------------------------------------------------------------

    def test_texts_survive_encoding(self, engine: Engine) -> None:
        for text in ("", "Hello, world!", "  two  spaces\n\nand lines\t", "naïve 日本 🚢", "12 + 30 = 42"):
            assert engine.tokenizer.decode(engine.tokenizer.encode(text)) == text

    def test_a_text_is_the_bytes_of_its_tokens(self, engine: Engine) -> None:
        for text in (engine.tokenizer.chat("Be brief.", "x"), "naïve 日本 🚢 two\n\nlines"):
            tokens = engine.tokenizer.encode(text)
            assert b"".join(engine.tokenizer.token_bytes(token) for token in tokens) == text.encode()

    def test_encoding_is_deterministic_and_adds_nothing(self, engine: Engine) -> None:
        assert engine.tokenizer.encode("") == ()
        assert engine.tokenizer.encode("anchor") == engine.tokenizer.encode("anchor")

    def test_chat_holds_its_messages_in_order(self, engine: Engine) -> None:
        text = engine.tokenizer.chat("Be brief.", "What is a kedge?")
        assert 0 <= text.find("Be brief.") < text.find("What is a kedge?")
        assert "What is a kedge?" in engine.tokenizer.chat(None, "What is a kedge?")

    def test_specials_in_a_value_are_plain_text(self, engine: Engine) -> None:
        """What a user or a tool wrote cannot end a turn."""
        prompt = engine.tokenizer.chat(None, "x")
        apart = engine.tokenizer.encode(prompt, special=False)
        assert len(apart) > len(engine.tokenizer.encode(prompt))
        assert engine.tokenizer.eos_token_id not in apart
        assert engine.tokenizer.decode(apart) == prompt

    def test_specials_that_are_spelled_out_are_recognised(self, engine: Engine) -> None:
        prompt = engine.tokenizer.encode(engine.tokenizer.chat(None, "x"))
        assert engine.tokenizer.decode(prompt) != engine.tokenizer.chat(None, "x"), "no special token was dropped"

    # one request ------------------------------------------------------------------------------------------------------

    def test_max_tokens_is_honoured(self, engine: Engine) -> None:
        for max_tokens in (1, self.max_tokens):
            done = self.run(engine, self.request(engine, fresh_text("length"), max_tokens=max_tokens))
            assert len(done.tokens) == max_tokens
            assert done.finish_reason is FinishReason.LENGTH
            assert engine.tokenizer.decode(done.tokens).startswith(done.text)

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

    def test_times_are_in_order(self, engine: Engine) -> None:
        done = self.run(engine, self.request(engine, fresh_text("time")))
        assert 0 < done.ttft_ms <= done.total_ms
        assert all(part >= 0 for part in done.receipt.parts_ms.values())

    def test_greedy_is_deterministic(self, engine: Engine) -> None:
        text = fresh_text("determinism")
        first, second = (self.run(engine, self.request(engine, text)) for _ in range(2))
        assert (first.tokens, first.text) == (second.tokens, second.text)

    def test_deltas_concatenate_to_the_completion(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("streams"))
        stream = engine.submit(request)
        deltas = list(stream)
        done = stream.result(self.timeout_s)
        assert stream.request_id == done.request_id == request.request_id
        assert [delta.completion for delta in deltas] == [None] * (len(deltas) - 1) + [done]
        assert "".join(delta.text for delta in deltas) == done.text
        assert tuple(itertools.chain.from_iterable(delta.tokens for delta in deltas)) == done.tokens

    def test_a_stop_string_ends_the_text_before_it(self, engine: Engine) -> None:
        text = fresh_text("stops")
        free = self.run(engine, self.request(engine, text)).text
        stop = _middle(free)
        stream = engine.submit(self.request(engine, text, stop=("\0never\0", stop)))
        streamed = "".join(delta.text for delta in stream)
        done = stream.result(self.timeout_s)
        assert done.finish_reason is FinishReason.STOP
        assert done.text == streamed == free[: free.find(stop)]

    # log-probabilities -----------------------------------------------------------------------------------------------

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
        request = self.request(engine, text, max_tokens=256)
        request = replace(request, sampling=replace(request.sampling, ignore_eos=False), logprobs=0)
        done = self.run(engine, request)
        drawn = len(done.tokens) + (done.finish_reason is FinishReason.STOP)
        assert len(done.logprobs) == drawn
        assert tuple(entry.token for entry in done.logprobs)[: len(done.tokens)] == done.tokens

    def test_a_prompt_is_told_with_its_log_probabilities(self, engine: Engine) -> None:
        """And its whole prefill is paid for, whatever is in the cache; they are the same with and without reuse."""
        text = " ".join(fresh_text("scores") for _ in range(3))
        for _ in range(2):
            self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        told = []
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
            assert bool(done.receipt.misses) or reuse is ReuseMode.OFF, "nobody says why nothing was reused"
            assert done.logprobs == ()
            told.append([round(entry.logprob, 3) for entry in others if entry])
        assert told[0] == told[1] == told[2]

    def test_nobody_asked_nobody_is_told(self, engine: Engine) -> None:
        done = self.run(engine, self.request(engine, fresh_text("silence")))
        assert done.logprobs == done.prompt_logprobs == ()

    def test_a_prompt_can_be_computed_without_an_answer(self, engine: Engine) -> None:
        """With `max_tokens=0`; what it leaves behind is reused."""
        text = " ".join(fresh_text("warming") for _ in range(3))
        request = self.request(engine, text, reuse=ReuseMode.EXACT)
        request = replace(request, sampling=replace(request.sampling, max_tokens=0))
        done = self.run(engine, request)
        assert (done.text, done.tokens, done.finish_reason) == ("", (), FinishReason.LENGTH)
        assert done.receipt.prompt_tokens == request.prompt_tokens
        assert self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT)).receipt.exact > 0

    # reuse ------------------------------------------------------------------------------------------------------------

    def test_exact_reuse_changes_no_token(self, engine: Engine) -> None:
        text = " ".join(fresh_text("reuse") for _ in range(3))
        plain = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        first = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        second = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT))
        again = self.run(engine, self.request(engine, text, reuse=ReuseMode.OFF))
        assert plain.tokens == first.tokens == second.tokens == again.tokens
        assert again.receipt.exact == 0, "a request without reuse leaned on others"
        assert second.receipt.exact > 0, "the second call reused nothing"
        assert second.receipt.computed > 0, "nobody computed the first logits"
        assert second.receipt.translated == 0

    def test_reuse_never_crosses_tenants(self, engine: Engine) -> None:
        text = " ".join(fresh_text("tenants") for _ in range(3))
        self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant="tenant-a"))
        other = f"tenant-b{next(_fresh)}"
        done = self.run(engine, self.request(engine, text, reuse=ReuseMode.EXACT, tenant=other))
        assert done.receipt.exact == 0

    def test_the_end_of_an_unknown_run_is_no_error(self, engine: Engine) -> None:
        engine.end_run(TenantId("conformance"), RunId("unknown"))
        self.serves(engine)

    def test_hints_change_no_token(self, engine: Engine) -> None:
        """Whether right, wrong, late or about nobody."""
        text = fresh_text("hints")
        request = replace(self.request(engine, text, reuse=ReuseMode.EXACT), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        keys = [AgentKey(request.tenant, request.client, request.run, AgentId(name)) for name in ("speaker", "nobody")]
        for steps in (0.0, 3.0, math.inf):
            engine.forecast(dict.fromkeys(keys, NextRun(steps)), dict.fromkeys(keys, request.segments[0].tokens))
            again = replace(request, request_id=RequestId(f"hinted-{next(_fresh)}"))
            assert self.run(engine, again).tokens == plain
        engine.forecast(dict.fromkeys(keys))
        self.serves(engine)

    def test_preparing_changes_no_token(self, engine: Engine) -> None:
        """Hints of nothing, of half of the prompt, of all of it, of another one. An engine may do without them."""
        text = " ".join(fresh_text("preparing") for _ in range(3))
        request = replace(self.request(engine, text), agent=AgentId("speaker"), run=RunId("run"))
        plain = self.run(engine, request).tokens
        request = replace(request, reuse=ReuseMode.EXACT)
        other = self.request(engine, fresh_text("others"), reuse=ReuseMode.EXACT).segments
        begun = (request.segments[0], replace(request.segments[1], tokens=()), request.segments[2])
        for segments in ((), begun, request.segments, other, ()):
            if isinstance(engine, Preparing):
                engine.prepare(replace(request, segments=segments, request_id=RequestId(f"hint-{next(_fresh)}")))
            done = self.run(engine, replace(request, request_id=RequestId(f"prepared-{next(_fresh)}")))
            assert done.tokens == plain
            assert 0 <= done.receipt.preassembled < request.prompt_tokens
        engine.end_run(request.tenant, request.run)

    # several requests -------------------------------------------------------------------------------------------------

    def test_requests_at_once_answer_as_one_by_one(self, engine: Engine) -> None:
        texts = [fresh_text("company") * (1 + n) for n in range(4)]
        alone = [self.run(engine, self.request(engine, text)).tokens for text in texts]
        for reuse in (ReuseMode.OFF, ReuseMode.EXACT):
            streams = [engine.submit(self.request(engine, text, reuse=reuse)) for text in texts]
            assert [stream.result(self.timeout_s).tokens for stream in streams] == alone

    def test_ids_are_unique_and_kept(self, engine: Engine) -> None:
        requests = [self.request(engine, fresh_text("ids")) for _ in range(3)]
        streams = [engine.submit(request) for request in requests]
        ids = [stream.result(self.timeout_s).request_id for stream in streams]
        assert ids == [stream.request_id for stream in streams] == [request.request_id for request in requests]
        assert len(set(ids)) == len(ids)

    def test_cancel_ends_one_request_only(self, engine: Engine) -> None:
        long = engine.submit(self.request(engine, fresh_text("cancelling"), max_tokens=self.long_tokens))
        other_request = self.request(engine, fresh_text("staying"))
        other = engine.submit(other_request)
        deltas = iter(long)
        first = next(deltas)
        assert engine.cancel(long.request_id), "the request had ended before it could be cancelled"
        streamed = first.text + "".join(delta.text for delta in deltas)
        done = long.result(self.timeout_s)
        assert done.finish_reason is FinishReason.CANCELLED
        assert done.text == streamed
        assert len(done.tokens) < self.long_tokens
        assert len(other.result(self.timeout_s).tokens) == self.max_tokens
        assert not engine.cancel(long.request_id), "a request that has ended is no longer known"
        self.serves(engine)

    def test_cancel_of_an_unknown_request(self, engine: Engine) -> None:
        assert engine.cancel(RequestId("nobody's")) is False

    # errors -----------------------------------------------------------------------------------------------------------

    def test_an_empty_prompt_is_refused(self, engine: Engine) -> None:
        self.refuses(engine, (), EmptyPrompt)

    def test_a_prompt_that_is_too_long_is_refused(self, engine: Engine) -> None:
        self.refuses(engine, engine.tokenizer.encode("a")[:1] * self.too_long, PromptTooLong)

    def test_tokens_outside_the_vocabulary_are_refused(self, engine: Engine) -> None:
        valid = engine.tokenizer.encode("a")
        for token in (-1, 2**31 - 1, 2**63):
            self.refuses(engine, (*valid, token), InvalidToken)

    def test_numbers_and_stop_strings_that_cannot_be_are_refused(self, engine: Engine) -> None:
        good = self.request(engine, fresh_text("nonsense"))
        for bad in (
            replace(good, sampling=replace(good.sampling, max_tokens=-1)),
            replace(good, sampling=replace(good.sampling, stop=("",))),
            replace(good, logprobs=-1),
            replace(good, prompt_logprobs=-1),
        ):
            expect(RequestError, partial(engine.submit, bad))
        self.serves(engine)

    # the end ----------------------------------------------------------------------------------------------------------

    def test_close_cancels_refuses_and_is_idempotent(self, engine: Engine) -> None:
        request = self.request(engine, fresh_text("closing"), max_tokens=self.long_tokens)
        stream = engine.submit(request)
        next(iter(stream))
        engine.close()
        assert stream.result(self.timeout_s).finish_reason is FinishReason.CANCELLED
        engine.close()
        engine.forecast({})
        if isinstance(engine, Preparing):
            engine.prepare(request)
        late = self.request(engine, fresh_text("closing"))
        expect(EngineClosed, lambda: engine.submit(late))


def expect(error: type[Exception], call: Callable[[], object]) -> None:
    """Asserts that `call` raises `error`."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def are_chances(entries: Sequence[TokenLogprob], top: int) -> None:
    """Asserts that `entries` are what distributions say: the likeliest first, none likelier, no more than certain."""
    for entry in entries:
        logprobs = [logprob for _, logprob in entry.top]
        assert len(entry.top) == len({token for token, _ in entry.top}) == top
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= logprobs[0], "a token is likelier than the likeliest"
        assert all(logprob == entry.logprob for token, logprob in entry.top if token == entry.token)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-6


def _middle(text: str) -> str:
    """Two clean characters from the middle of a text, or one where no two stand together."""
    pieces = [text[at : at + size] for size in (2, 1) for at in range(1, len(text) - size + 1)]
    clean = [piece for piece in pieces if "\ufffd" not in piece]
    assert clean, f"the answer {text!r} is too short to be stopped"
    pairs = [piece for piece in clean if len(piece) == 2] or clean
    return pairs[len(pairs) // 2]
