"""What no engine accepts is refused by name, in few words; what can be meant of a hint is kept."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.checks import MAX_COUNT
from kedge.engine.validation import require_advice, require_sensible, sensible_hints
from kedge.errors import EmptyPrompt, InvalidToken, RequestError
from kedge.types import (
    GREEDY_TEMPERATURE,
    MIN_TOP_P,
    AgentKey,
    GenerateRequest,
    Namespace,
    SampleId,
    SamplingParams,
    Segment,
    TurnHints,
    ValueKind,
)
from kedge.workflow.steps import NextRun
from tests.engine.conformance import HUGE, SMALLEST

GOOD = GenerateRequest((Segment((1, 2, 3), "p0"),))
KEY = AgentKey(Namespace("tenant"), "", "run", "agent")
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())

NO_TEXT: tuple[Any, ...] = (None, 5, b"x", "\ud800")
NO_COUNT: tuple[Any, ...] = (-1, 1.0, math.nan, True, "1", MAX_COUNT + 1, 2**63, HUGE)
IMPOSSIBLE_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (*NO_COUNT, None),
    "temperature": (math.nan, math.inf, -math.inf, -SMALLEST, -1.0, -1e-40, 1e308, HUGE, True, "1", None),
    "top_p": (0, 0.0, -0.0, -1e-46, 1.0000001, 2, math.nan, math.inf, HUGE, True, "1", None),
    "seed": (-(2**63) - 1, 2**63, HUGE, 1.0, math.nan, True, "1"),
    "stop": (".", "", None, 5, (5,), (None,), (b".",), ("",), ("\ud800",), ("x",) * 17, ("x" * 1025,)),
    "ignore_eos": (None, 1, "yes"),
    "top_k": (-1, 1.5),
    "min_p": (2,),
    "repetition_penalty": (0,),
    "presence_penalty": (math.nan,),
    "frequency_penalty": (-3,),
}
IMPOSSIBLE_SAMPLES: tuple[Any, ...] = (
    *(5, b"x", "agent_x@0", ("agent", "x", 0, "")),
    *(SampleId(kind, "x") for kind in ("agent", None)),  # type: ignore[arg-type]
    *(SampleId(ValueKind.AGENT, of) for of in NO_TEXT),
    *(SampleId(ValueKind.AGENT, "x", turn) for turn in (-1, 1.0, True, None, HUGE)),  # type: ignore[arg-type]
    *(SampleId(ValueKind.AGENT, "x", 0, digest) for digest in (*NO_TEXT, "0g", "#")),
)
IMPOSSIBLE_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "logprobs": NO_COUNT,
    "prompt_logprobs": NO_COUNT,
    "fixed": (1.0, True, "1"),
    "reuse": ("often", None, 5),
    "request_id": (*NO_TEXT, ""),
    "tenant": (*NO_TEXT, "", "a/b"),
    **dict.fromkeys(("partition", "client", "workflow", "run", "agent", "tool_mark"), NO_TEXT),
    "produces": IMPOSSIBLE_SAMPLES,
    "sampling": (None, {}, 5),
    "segments": (None, 5, [], "text", ((1, 2),), (None,)),
    "guard": (None, {}, 5),
    "forced": (None, 5, [1], "text", *((1, token) for token in (1.5, True, -7, MAX_COUNT + 1, HUGE))),
    "turn": (None, *(TurnHints("s", **{key: HUGE}) for key in ("returns_in", "keep_for"))),
}
IMPOSSIBLE_SEGMENTS: Mapping[str, tuple[Any, ...]] = {
    "name": (*NO_TEXT, ""),
    "sample": IMPOSSIBLE_SAMPLES,
    **dict.fromkeys(("tokens", "base_context", "placeholder_text"), (None, 5, [1], "text", b"x")),
    "in_context": (None, 1, "yes"),
}
NO_TOKENS: tuple[Any, ...] = (1.5, math.nan, True, None, "a", (1,), -1, MAX_COUNT, MAX_COUNT + 1, 2**63, HUGE)
IMPOSSIBLE_ADVICE: tuple[Any, ...] = (
    *(None, "keep it", TurnHints(5), TurnHints("\ud800")),  # type: ignore[arg-type]
    *(TurnHints("s", keep_for=seconds) for seconds in (math.nan, -1.0, HUGE)),
    TurnHints("s", returns_in="soon"),  # type: ignore[arg-type]
    *(TurnHints(expects=said) for said in ({"": 1.0}, {"s": -1.0}, {"s": HUGE}, {"s": None}, ["s"])),  # type: ignore[arg-type]
    TurnHints(expects=dict.fromkeys(map(str, range(65)), 1.0)),
)


def refused(request: GenerateRequest, vocab_size: int | None = None) -> RequestError:
    with pytest.raises(RequestError) as raised:
        require_sensible(request, vocab_size)
    return raised.value


def sampled(**sampling: object) -> GenerateRequest:
    return replace(GOOD, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("where", "build", "keys"),
    [
        ("", sampled, list(IMPOSSIBLE_SAMPLING)),
        ("", partial(replace, GOOD), list(GenerateRequest.__dataclass_fields__)),
        ("turn.", lambda **said: replace(GOOD, turn=TurnHints(**said)), list(TurnHints.__dataclass_fields__)),
    ],
    ids=["sampling", "fields", "turn"],
)
@given(data=st.data(), value=ANYTHING)
def test_anything_is_accepted_or_refused_by_name(
    where: str, build: Any, keys: list[str], data: st.DataObject, value: object
) -> None:
    key = data.draw(st.sampled_from(keys))
    try:
        require_sensible(build(**{key: value}))
    except EmptyPrompt as error:
        assert error.key == "prompt"
    except RequestError as error:
        assert error.key.startswith(where + key) and len(str(error)) < 300


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


def test_a_message_stays_short_whatever_the_value() -> None:
    assert str(refused(sampled(seed=10**5000))).startswith("seed=an integer of 16610 bits: must be an integer from")
    assert len(str(refused(sampled(stop=("x" * 10**6,))))) < 300
    assert len(str(refused(replace(GOOD, segments=[GOOD] * 10**5)))) < 300
    assert len(str(refused(replace(GOOD, segments=(Segment(["a" * 10**6] * 9, "p0"),))))) < 300


def forced(*tokens: Any) -> GenerateRequest:
    return replace(GOOD, forced=tokens)


def with_segment(**changes: Any) -> GenerateRequest:
    return replace(GOOD, segments=(*GOOD.segments, Segment(**{"tokens": (1,), "name": "p1", **changes})))


@pytest.mark.parametrize(
    ("table", "build", "where"),
    [
        (IMPOSSIBLE_SAMPLING, sampled, ""),
        (IMPOSSIBLE_FIELDS, partial(replace, GOOD), ""),
        (IMPOSSIBLE_SEGMENTS, with_segment, "segments[1]."),
    ],
    ids=["sampling", "fields", "segments"],
)
def test_what_cannot_be_is_refused_by_name(table: Any, build: Any, where: str) -> None:
    for key, values in table.items():
        for value in values:
            error = refused(build(**{key: value}))
            assert error.key.startswith(where + key) and len(str(error)) < 500, value


@pytest.mark.parametrize("part", ["tokens", "base_context", "placeholder_text"])
def test_a_token_is_named_with_its_place_and_the_vocabulary(part: str) -> None:
    error = refused(with_segment(**{part: (1, 100)}), vocab_size=100)
    expected = f"segments[1].{part}=100: must be from 0 to 99, in the vocabulary of 100"
    assert isinstance(error, InvalidToken) and str(error) == expected
    require_sensible(with_segment(**{part: (1, 100)}), vocab_size=101)
    for token in NO_TOKENS:
        for key, request in ((f"segments[1].{part}", with_segment(**{part: (1, token)})), ("forced", forced(1, token))):
            error = refused(request, vocab_size=100)
            assert error.key == key and "vocabulary of" in str(error)


def test_no_field_of_a_request_is_left_unchecked() -> None:
    assert GenerateRequest.__dataclass_fields__.keys() - IMPOSSIBLE_FIELDS.keys() == {"is_plain"}, "any value is true"


def test_advice_that_cannot_be_meant_is_refused() -> None:
    space = Namespace("tenant")
    require_advice(space, TurnHints("s", keep_for=1.0))
    for said in IMPOSSIBLE_ADVICE:
        with pytest.raises(RequestError):
            require_advice(space, said)
    for namespace in (None, "tenant", Namespace(""), Namespace("a", 5)):  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            require_advice(namespace, TurnHints("s", keep_for=1.0))  # type: ignore[arg-type]


def test_of_a_hint_what_can_be_meant_is_kept() -> None:
    other = KEY._replace(agent="other")
    changes = {KEY: NextRun(2.0, 0.5), other: None, KEY._replace(run_id="r"): NextRun(math.inf)}
    assert sensible_hints(changes, {KEY: (1, 2), other: ()}) == (changes, {KEY: (1, 2), other: ()})
    numbers: list[Any] = [*((steps, 1.0) for steps in (math.nan, -1.0, -math.inf, HUGE, "soon", True)), (1.0, 2.0)]
    for run in (*(NextRun(*one) for one in numbers), NextRun(1.0, math.nan), NextRun(1.0, "likely"), (1.0, 1.0)):  # type: ignore[arg-type]
        assert sensible_hints({KEY: run}, {KEY: [1, 2]}) == ({}, {})  # type: ignore[dict-item]
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
