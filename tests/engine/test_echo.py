import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.echo import ByteTokenizer, EchoEngine
from kedge.types import FinishReason, GenerateRequest, Miss, ReuseMode, SampleId, SamplingParams, Segment, Source, Span


@pytest.fixture
def engine() -> Iterator[EchoEngine]:
    with EchoEngine() as engine:
        yield engine


def ask(text: str, *filled: str, agent: str = "", reuse: ReuseMode = ReuseMode.EXACT, **sampling) -> GenerateRequest:
    encode = ByteTokenizer().encode
    samples = (Segment(encode(part), f"x{n}", SampleId.parse(f"x{n}@0")) for n, part in enumerate(filled))
    segments = (Segment(encode(text), "p0"), *samples)
    return GenerateRequest(segments, SamplingParams(**sampling), reuse, agent=agent)


@given(st.text("a<|é🚢"), st.text("a<|é🚢"))
def test_bytes_do_not_depend_on_their_neighbours(left: str, right: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(left) + tokenizer.encode(right) == tokenizer.encode(left + right)
    assert tokenizer.decode(tokenizer.encode(left)) == left


def test_echoes_the_last_placeholder_or_the_prompt(engine: EchoEngine) -> None:
    assert engine.submit(ask("Say: ", "one", "two")).result(60).text == "two"
    done = engine.submit(ask("<|bos|>plain é")).result(60)
    assert (done.text, done.finish_reason) == ("plain é", FinishReason.STOP)
    assert engine.tokenizer.decode(done.tokens) == done.text


def test_ignore_eos_goes_on_to_the_limit(engine: EchoEngine) -> None:
    done = engine.submit(ask("ab", ignore_eos=True, max_tokens=5)).result(60)
    assert (done.text, done.tokens, done.finish_reason) == ("abab", (97, 98, 257, 97, 98), FinishReason.LENGTH)


def test_script_by_agent_and_requests_are_recorded() -> None:
    with EchoEngine({"solver": "42", "mute": ""}) as engine:
        requests = [ask("six times seven", agent=agent) for agent in ("solver", "mute", "else")]
        texts = [engine.submit(request).result(60).text for request in requests]
    assert texts == ["42", "", "six times seven"]
    assert engine.requests == requests


def test_script_by_function_runs_in_the_callers_thread() -> None:
    def answer(request: GenerateRequest) -> str:
        if request.prompt_tokens > 3:
            raise ValueError("too much")
        return f"{request.prompt_tokens} tokens, {threading.current_thread().name}"

    with EchoEngine(answer) as engine:
        assert engine.submit(ask("abc")).result(60).text == f"3 tokens, {threading.current_thread().name}"
        with pytest.raises(ValueError, match="too much"):
            engine.submit(ask("abcd"))
        assert len(engine.requests) == 1


def test_receipts_show_real_prefix_reuse(engine: EchoEngine) -> None:
    cold = engine.submit(ask("shared ", "one")).result(60).receipt
    warm = engine.submit(ask("shared ", "other")).result(60).receipt
    same = engine.submit(ask("shared ", "one")).result(60).receipt
    off = engine.submit(ask("shared ", "one", reuse=ReuseMode.OFF)).result(60).receipt
    assert cold.spans == off.spans == (Span(0, 10, Source.COMPUTED),)
    assert warm.spans == (Span(0, 8, Source.DEVICE), Span(8, 12, Source.COMPUTED)), "'o' is shared, too"
    assert same.spans == (Span(0, 9, Source.DEVICE), Span(9, 10, Source.COMPUTED))
    assert cold.misses == (Miss("*", "not in the cache"),)
    assert warm.misses == (Miss("x0", "not in the cache"),)
    assert same.misses == ()
    assert off.misses == (Miss("*", "reuse is off"),)


def test_an_answer_becomes_a_reusable_prefix(engine: EchoEngine) -> None:
    engine.submit(ask("abc")).result(60)
    assert engine.submit(ask("abcabcX")).result(60).receipt.exact == 5, "the last token drawn has no KV"
