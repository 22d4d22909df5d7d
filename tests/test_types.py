"""Ids with parts, and their text forms."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.types import GenerateRequest, Namespace, ReuseMode, SampleId, Segment, TurnHints, ValueKind, is_owned

DIGESTS = st.text("0123456789abcdef", max_size=8)
NAMES = st.one_of(
    st.text(), st.from_regex(r"(input|agent)_x@1(#a)?", fullmatch=True), st.sampled_from(["", "a@0", "#f"])
)
SAMPLES = st.builds(SampleId, st.sampled_from(ValueKind), NAMES, st.integers(0, 10**18 - 1), DIGESTS)


@given(SAMPLES)
def test_samples_are_read_back_from_their_text(sample: SampleId) -> None:
    assert SampleId.parse(str(sample)) == sample


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        ("agent_solver@0", SampleId(ValueKind.AGENT, "solver")),
        ("condition_solver@12", SampleId(ValueKind.CONDITION, "solver", 12)),
        ("input_user_question@0", SampleId(ValueKind.INPUT, "user_question")),
        ("agent_a@0#0af1", SampleId(ValueKind.AGENT, "a", 0, "0af1")),
        ("user_question@0", SampleId(ValueKind.INPUT, "user_question@0")),
        ("agent_a@-1", SampleId(ValueKind.INPUT, "agent_a@-1")),
        ("agent_a@" + "9" * 5000, SampleId(ValueKind.INPUT, "agent_a@" + "9" * 5000)),
        ("", SampleId(ValueKind.INPUT, "")),
    ],
)
def test_the_text_of_samples(text: str, sample: SampleId) -> None:
    assert SampleId.parse(text) == sample


@pytest.mark.parametrize("kind", ValueKind)
def test_an_answer_is_told_by_its_sample_not_by_its_name(kind: ValueKind) -> None:
    assert Segment((1,), "user_question", SampleId(kind, "x")).is_answer is (kind is ValueKind.AGENT)
    assert not Segment((1,), "agent_x_current").is_answer


TENANTS = st.text(st.characters(exclude_characters="/"), max_size=5)


@given(st.builds(Namespace, TENANTS, st.text()))
def test_namespaces_are_read_back_from_their_text(namespace: Namespace) -> None:
    assert Namespace.parse(str(namespace)) == namespace


def test_a_tenant_owns_all_its_partitions_and_no_others() -> None:
    for text in ("acme", "acme/0123", "acme/a/b"):
        assert is_owned("acme", Namespace.parse(text))
    for text in ("acme2", "a", "a/acme"):
        assert not is_owned("acme", Namespace.parse(text))


def test_a_request_is_a_key_whatever_its_client_said_of_the_session() -> None:
    said = GenerateRequest((), turn=TurnHints(session="a", expects={"b": 2.0}))
    unlike = GenerateRequest((), turn=TurnHints(session="a", expects={"b": 3.0}))
    assert {said: 1, unlike: 2}[replace(said)] == 1


def test_a_mode_may_be_given_as_its_value() -> None:
    assert [GenerateRequest((), reuse=mode.value).reuse for mode in ReuseMode] == [*ReuseMode]  # type: ignore[arg-type]
    assert GenerateRequest((), reuse="sometimes").reuse == "sometimes", "whoever serves it says what is wrong"  # type: ignore[arg-type]
