"""What no engine accepts is refused by name, in few words; what can be meant of a hint is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.engine.validation import require_new_id, require_sensible, sensible_hints
from kedge.errors import EmptyPrompt, InvalidToken, RequestError
from kedge.types import (
    GREEDY_TEMPERATURE,
    MIN_TOP_P,
    AgentId,
    GenerateRequest,
    Namespace,
    RequestId,
    RunId,
    SamplingParams,
    Segment,
    TenantId,
    TurnHints,
)
from kedge.workflow.forecast import AgentKey
from kedge.workflow.steps import NextRun

GOOD = GenerateRequest((Segment((1, 2, 3), "p0"),))
KEY = AgentKey(Namespace(TenantId("tenant")), "", RunId("run"), AgentId("agent"))
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())


def refused(request: GenerateRequest, vocab_size: int | None = None) -> RequestError:
    with pytest.raises(RequestError) as raised:
        require_sensible(request, vocab_size)
    return raised.value


def sampled(**sampling: object) -> GenerateRequest:
    return replace(GOOD, sampling=SamplingParams(**sampling))


@given(st.sampled_from(["max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos"]), ANYTHING)
def test_any_sampling_is_accepted_or_refused_by_name(key: str, value: object) -> None:
    try:
        require_sensible(sampled(**{key: value}))
    except RequestError as error:
        assert error.key == key and len(str(error)) < 300


@given(st.sampled_from(list(GenerateRequest.__dataclass_fields__)), ANYTHING)
def test_any_field_is_accepted_or_refused_by_name(key: str, value: object) -> None:
    try:
        require_sensible(replace(GOOD, **{key: value}))
    except EmptyPrompt as error:
        assert error.key == "prompt"
    except RequestError as error:
        assert error.key.startswith(key)


@given(st.sampled_from(list(TurnHints.__dataclass_fields__)), ANYTHING)
def test_any_hint_of_a_turn_is_accepted_or_refused_by_name(key: str, value: object) -> None:
    try:
        require_sensible(replace(GOOD, turn=replace(TurnHints(), **{key: value})))
    except RequestError as error:
        assert error.key == f"turn.{key}"


@given(ANYTHING)
def test_only_requests_are_requests(value: object) -> None:
    assert refused(value).key == "request"


@given(st.floats(0, 100), st.floats(0, 1, exclude_min=True), st.integers(-(2**63), 2**63 - 1))
def test_all_numbers_in_range_are_accepted(temperature: float, top_p: float, seed: int) -> None:
    request = sampled(temperature=temperature, top_p=top_p, seed=seed)
    require_sensible(request)
    assert request.sampling.temperature == 0 or request.sampling.temperature >= GREEDY_TEMPERATURE
    assert request.sampling.top_p >= MIN_TOP_P


def test_what_single_precision_cannot_hold_is_stored_as_what_it_comes_to() -> None:
    assert SamplingParams(temperature=1e-40).temperature == 0
    assert SamplingParams(top_p=1e-46).top_p == MIN_TOP_P
    assert SamplingParams(temperature=GREEDY_TEMPERATURE, top_p=MIN_TOP_P) == SamplingParams(8 * 32, 1e-5, 1e-6)
    assert SamplingParams(temperature=-1e-40).temperature == -1e-40, "what is wrong stays wrong"


def test_a_bare_string_is_no_list_of_stop_strings() -> None:
    assert str(refused(sampled(stop="."))) == "stop='.': must be a sequence of strings, as in ('.',)"


def test_a_message_stays_short_whatever_the_value() -> None:
    assert str(refused(sampled(seed=10**5000))).startswith("seed=an integer of 16610 bits: must be an integer from")
    assert len(str(refused(sampled(stop=("x" * 10**6,))))) < 300
    assert len(str(refused(replace(GOOD, segments=[GOOD] * 10**5)))) < 300
    assert len(str(refused(replace(GOOD, segments=(Segment(["a" * 10**6] * 9, "p0"),))))) < 300


@pytest.mark.parametrize("part", ["tokens", "base_context", "placeholder_text"])
def test_a_token_is_named_with_its_place_and_the_vocabulary(part: str) -> None:
    segments = (*GOOD.segments, Segment(**{"tokens": (1,), "name": "p1", part: (1, 100)}))
    error = refused(replace(GOOD, segments=segments), vocab_size=100)
    expected = f"segments[1].{part}=100: must be from 0 to 99, in the vocabulary of 100"
    assert isinstance(error, InvalidToken) and str(error) == expected
    require_sensible(replace(GOOD, segments=segments), vocab_size=101)


def test_an_id_is_new_unless_it_is_in_flight() -> None:
    require_new_id(RequestId("a"), {RequestId("b")})
    with pytest.raises(RequestError, match="request_id='b': duplicate"):
        require_new_id(RequestId("b"), {RequestId("b")})


def test_of_a_hint_what_can_be_meant_is_kept() -> None:
    other = KEY._replace(agent="other")
    changes = {KEY: NextRun(2.0, 0.5), other: None, KEY._replace(run_id="r"): NextRun(math.inf)}
    assert sensible_hints(changes, {KEY: (1, 2), other: ()}) == (changes, {KEY: (1, 2), other: ()})
    wrong = {KEY._replace(agent=5): NextRun(1.0), "key": NextRun(1.0), other: NextRun(math.nan)}
    assert sensible_hints({**changes, **wrong}, {KEY: (-1,), other: (1,)}) == (
        {KEY: NextRun(2.0, 0.5), KEY._replace(run_id="r"): NextRun(math.inf)},
        {other: (1,)},
    )


@given(ANYTHING, st.dictionaries(st.text() | st.just(KEY), ANYTHING))
def test_no_hint_raises(nothing: object, nonsense: dict[object, object]) -> None:
    for changes, prompts in ((nothing, nonsense), (nonsense, nothing), (nonsense, nonsense)):
        kept, tokens = sensible_hints(changes, prompts)
        assert set(kept) | set(tokens) <= {KEY}
