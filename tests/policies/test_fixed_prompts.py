"""Where the fixed part of a prompt ends: declared, or the last block from which prompts went on in three ways."""

import itertools

import pytest

from kedge.policies.fixed_prompts import WAYS, FixedLengths, SharedHeads
from kedge.structures.prefixes import chain_of
from kedge.types import GenerateRequest, SampleId, Segment

BLOCK = 4
FIXED = tuple(range(40))
fresh = itertools.count(1000)


def test_the_last_block_with_three_continuations_is_the_end_of_the_fixed_prompt() -> None:
    heads = SharedHeads()
    for role in "xyz":
        assert heads.find(["system", role]) == []
        for question in range(WAYS):
            heads.observe(["system", role, question], "end")
    assert [heads.find(["system", role, 9]) for role in "xyz"] == [[1, 0]] * 3
    assert heads.find(["system", "new"]) == [0]
    assert heads.find(["other"]) == []


def test_prompts_that_are_repeated_or_continued_have_no_fixed_part() -> None:
    heads = SharedHeads()
    for _ in range(9):
        heads.observe(["a", "b"], "end")
    for length in range(3, 9):
        heads.observe([*"abcdefgh"[:length]], "end")
    assert heads.find([*"abcdefgh"]) == []
    for rest in range(9):
        heads.observe("z", rest)
    assert len(heads["z"]) == WAYS, "more are not remembered"


def length(lengths: FixedLengths, tokens: tuple[int, ...], tenant: str = "a", answer: int = 0) -> int | None:
    request = GenerateRequest((Segment(tokens, "p0"),), tenant=tenant)
    return lengths.of(request, chain_of((*tokens, *range(answer)), BLOCK))


def own(size: int = 7) -> tuple[int, ...]:
    """Tokens that no other prompt has."""
    return tuple(next(fresh) for _ in range(size))


def test_a_length_comes_from_the_request_then_from_its_segments_then_from_other_prompts() -> None:
    lengths = FixedLengths(BLOCK)
    parts = (Segment(FIXED, "p0"), Segment((1, 2), "q", SampleId.parse("q@0")))
    assert [lengths.of(GenerateRequest(parts, fixed=fixed), ()) for fixed in (0, 7)] == [0, 7]
    assert lengths.of(GenerateRequest(parts, fixed=len(FIXED) + 3), ()) == len(FIXED), "longer than the prompt"
    assert lengths.of(GenerateRequest(parts), ()) == len(FIXED)
    assert lengths.of(GenerateRequest(parts[::-1]), ()) is None, "it begins with a value"
    found = [length(lengths, FIXED + own()) for _ in range(5)]
    assert found == [None, None, *[len(FIXED)] * 3]


@pytest.mark.parametrize(("size", "found"), [(37, 36), (3, None), (0, None)])
def test_it_ends_with_a_whole_block(size: int, found: int | None) -> None:
    lengths = FixedLengths(BLOCK)
    assert [length(lengths, FIXED[:size] + own()) for _ in range(4)][-1] == found


def test_a_session_that_grows_has_no_fixed_part_and_answers_are_not_part_of_prompts() -> None:
    lengths = FixedLengths(BLOCK)
    assert [length(lengths, tuple(range(size)), answer=size % 5) for size in range(5, 95, 9)] == [None] * 10
    request = GenerateRequest((Segment(FIXED, "p0"),))
    assert [lengths.of(request, chain_of((*FIXED, *own()), BLOCK)) for _ in range(4)] == [None] * 4


def test_versions_of_a_template_and_days_have_their_own_and_tenants_are_apart() -> None:
    lengths = FixedLengths(BLOCK)
    for day in range(4):
        seen = [length(lengths, (*FIXED[:10], 500 + day, *FIXED[10:], *own())) for _ in range(4)]
        assert seen[-2:] == [40, 40], "on one day"
    assert length(lengths, (*FIXED[:10], 900, *FIXED[10:])) == 8, "what all days have in common"
    assert length(lengths, (*FIXED[:10], 900, *FIXED[10:]), tenant="b") is None
    lengths._heads._limit = 60
    assert [length(lengths, own(30), tenant="b") for _ in range(50)] == [None] * 50
    assert length(lengths, (*FIXED[:10], 901, *FIXED[10:])) == 8, "no tenant makes another forget"
