"""A block is the end of a fixed prompt once prompts went on from it in three ways."""

from __future__ import annotations

from kedge.discovery.bounds import EXAMPLES
from kedge.discovery.found_agents import SharedHeads


def test_the_last_block_with_three_continuations_is_the_end_of_the_fixed_prompt() -> None:
    heads = SharedHeads()
    for role in "xyz":
        assert heads.find(["system", role]) == []
        for question in range(EXAMPLES):
            heads.observe(["system", role, question], "end")
    assert [heads.find(["system", role, 9]) for role in "xyz"] == [[1, 0]] * 3
    assert heads.find(["system", "new"]) == [0]
    assert heads.find(["other"]) == []


def test_prompts_that_are_repeated_or_continued_make_no_agent() -> None:
    heads = SharedHeads()
    for _ in range(9):
        heads.observe(["a", "b"], "end")
    for length in range(3, 9):
        heads.observe([*"abcdefgh"[:length]], "end")
    assert heads.find([*"abcdefgh"]) == []


def test_a_prompt_that_ends_within_a_block_goes_on_in_its_own_way() -> None:
    heads = SharedHeads()
    for rest in range(EXAMPLES):
        heads.observe(["a"], rest)
    assert heads.find(["a"]) == [0]


def test_memory_is_bounded() -> None:
    heads = SharedHeads(100)
    for prompt in range(1000):
        heads.observe([prompt, -prompt], 0)
    assert len(heads) == 100
