"""Receipts, log-probabilities and streamed responses from vLLM's data. No vLLM is needed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.engine.common.model_folder import model_path
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.errors import ForwardFailed
from kedge.integrations.vllm.engine import driver
from kedge.integrations.vllm.engine.driver import NO_RECEIPT, StreamedResponse, ranked_logprobs, receipt_of
from kedge.integrations.vllm.entry_point import FIRST_LOGPROBS
from kedge.integrations.vllm.plugin.requests import receipt_to_dict
from kedge.reuse.plan import ALL_COMPUTED
from kedge.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Miss,
    Receipt,
    ReuseMode,
    SampleId,
    SamplingParams,
    Segment,
    Source,
    Span,
    TokenDelta,
    TokenLogprob,
)

PROMPT = (Segment(tuple(range(3, 103)), "p0"),)
EOS = 1


SPANS = (
    Span(0, 32, Source.DEVICE),
    Span(32, 48, Source.HOST),
    Span(48, 60, Source.COMPUTED),
    Span(60, 99, Source.TRANSLATED),
    Span(99, 100, Source.COMPUTED),
)


def receipt_data(*spans: Span) -> dict[str, Any]:
    sent = Receipt("r", ReuseMode.TRANSLATE, spans, (Miss("p0", "why"),))
    return dict(json.loads(json.dumps(receipt_to_dict(sent))))


def test_a_receipt_has_the_spans_that_the_plug_in_sent() -> None:
    request = GenerateRequest(PROMPT, reuse=ReuseMode.TRANSLATE)
    receipt = receipt_of(request, receipt_data(*SPANS), None, {"queue": 1.0})
    assert receipt.spans == SPANS and receipt.parts_ms == {"queue": 1.0}
    assert (receipt.request_id, receipt.misses) == (request.request_id, (Miss("p0", "why"),))
    told = GenerateRequest(PROMPT, reuse=ReuseMode.EXACT, prompt_logprobs=0)
    data = {**receipt_data(Span(0, 100, Source.COMPUTED)), "misses": []}
    assert receipt_of(told, data, None, {}).misses == (ALL_COMPUTED,), "log-probabilities are a reason for computing it"


def test_the_fallback_receipt_has_known_facts_only() -> None:
    exact, translate = (GenerateRequest(PROMPT, reuse=mode) for mode in (ReuseMode.EXACT, ReuseMode.TRANSLATE))
    assert receipt_of(exact, None, None, {}).spans == ()
    assert receipt_of(exact, None, 32, {}).spans == (Span(0, 32, Source.DEVICE), Span(32, 100, Source.COMPUTED))
    assert receipt_of(translate, None, 0, {}).spans == (Span(0, 100, Source.COMPUTED),)
    unknown = receipt_of(translate, None, 32, {})
    assert (unknown.spans, unknown.misses) == ((), (NO_RECEIPT,))


def chances(*entries: tuple[int, float, int]) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=logprob, rank=rank) for token, logprob, rank in entries}


def test_the_likeliest_come_first_and_the_drawn_one_is_among_them_only_by_rank() -> None:
    first = chances((7, -3.0, 9), (5, -0.5, 1), (6, -1.0, 2))
    second = chances((5, -0.25, 1), (6, -2.0, 2))
    assert list(ranked_logprobs((7, 5, 9), (first, second, None), 2)) == [
        TokenLogprob(7, -3.0, ((5, -0.5), (6, -1.0))),
        TokenLogprob(5, -0.25, ((5, -0.25), (6, -2.0))),
        None,
    ]
    assert list(ranked_logprobs((7,), (first,), 0)) == [TokenLogprob(7, -3.0)]


# answers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.load(model_path(None))


def output(tokens: tuple[int, ...], reason: str | None = None, logprobs: Any = None) -> Any:
    one = SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(outputs=[one], finished=reason is not None, num_cached_tokens=0, metrics=None)


def answered(
    tokenizer: HFTokenizer, request: GenerateRequest, *outputs: Any, room: int = 100, is_guarded: bool = False
) -> tuple[list[TokenDelta], Completion]:
    response = StreamedResponse(request, tokenizer, SimpleNamespace(extra_args={}), room)
    if is_guarded:
        response.only_compare()
        assert response.params.extra_args == {FIRST_LOGPROBS: driver.COMPARED_TOKENS}
    for one in outputs:
        response.take(one)
    response.end(None)
    deltas = list(response.stream)
    done = deltas[-1].completion
    assert done and "".join(delta.text for delta in deltas) == done.text
    assert tuple(token for delta in deltas for token in delta.tokens) == done.tokens
    return deltas, done


def ask(**more: Any) -> GenerateRequest:
    sampling = {name: more.pop(name) for name in ("max_tokens", "stop") if name in more}
    return GenerateRequest(PROMPT, SamplingParams(**{"max_tokens": 4, **sampling}), **more)


def test_the_token_that_ends_an_answer_is_not_in_it(tokenizer: HFTokenizer) -> None:
    three = tokenizer.encode("one two")[:3]
    logprobs = [chances((token, -1.0, 1)) for token in (*three, EOS)]
    _, done = answered(tokenizer, ask(logprobs=0), output((*three, EOS), "stop", logprobs))
    assert (done.tokens, done.finish_reason) == (three, FinishReason.STOP)
    assert [entry.token for entry in done.logprobs] == [*three, EOS]


def test_tokens_beyond_the_answer_are_dropped(tokenizer: HFTokenizer) -> None:
    tokens = (*tokenizer.encode("one two three four"),)[:5]
    logprobs = [chances((token, -1.0, 1)) for token in tokens]
    request = ask(logprobs=0, produces=SampleId.parse("s"))
    for last in ("length", "stop"):
        deltas, done = answered(
            tokenizer, request, output(tokens[:2], None, logprobs[:2]), output(tokens[2:], last, logprobs[2:])
        )
        assert (done.tokens, done.finish_reason) == (tokens[:4], FinishReason.LENGTH)
        assert len(done.logprobs) == 4 and [len(delta.tokens) for delta in deltas] == [2, 2, 0]
    deltas, done = answered(
        tokenizer, request, output(tokens[:4], None, logprobs[:4]), output(tokens[4:], "length", logprobs[4:])
    )
    assert done.tokens == tokens[:4] and [len(delta.tokens) for delta in deltas] == [4, 0]


def test_behind_the_first_tokens_vllm_repeats_log_probabilities(
    tokenizer: HFTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "COMPARED_TOKENS", 2)
    one, two, three, four = (chances((token, -1.0, 1)) for token in (5, 6, 7, 8))
    steps = output((5,), None, [one]), output((6, 7), None, [two, two]), output((8,), "length", [two])
    deltas, done = answered(tokenizer, ask(logprobs=0), *steps, is_guarded=True)
    assert done.tokens == (5, 6, 7, 8) and [entry.token for entry in done.logprobs] == [5, 6]
    assert [len(delta.logprobs) for delta in deltas] == [1, 1, 0, 0]
    whole = output((5, 6, 7, 8), "length", [one, two, three, four])
    _, done = answered(tokenizer, ask(logprobs=0), whole, is_guarded=True)
    assert [entry.token for entry in done.logprobs] == [5, 6]


def test_answers_that_vllm_gives_up_or_nobody_wanted(tokenizer: HFTokenizer) -> None:
    with pytest.raises(ForwardFailed, match="error"):
        StreamedResponse(ask(), tokenizer, None, 100).take(output((), "error"))
    _, done = answered(tokenizer, ask(), output((5,)), output((), "abort"))
    assert done.finish_reason is FinishReason.CANCELLED
    _, none = answered(tokenizer, ask(max_tokens=0), output((5,), "length"))
    assert (none.tokens, none.text, none.finish_reason) == ((), "", FinishReason.LENGTH), "none was wanted"


def test_times_are_those_of_vllms_process(tokenizer: HFTokenizer) -> None:
    one = output((5,), "length")
    one.metrics = SimpleNamespace(queued_ts=1.0, scheduled_ts=1.25, first_token_ts=1.75)
    _, done = answered(tokenizer, ask(max_tokens=1), one)
    assert done.receipt.parts_ms == {"queue": 250.0, "compute": 500.0, "other": 0.0}
