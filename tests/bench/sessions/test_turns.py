"""Conversations become chains of coarse blocks: same integer, same whole prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.bench.sessions.arrivals import MAX_TOKENS, conversations
from tests.bench.sessions.builders import record


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_a_coarse_id_is_that_of_the_last_fine_block(runs: list[tuple[int, int]], step: int) -> None:
    one = record(n=10_000, h=[list(run) for run in runs])
    fine = [block for first, count in runs for block in range(first, first + count)]
    assert list(one.ids(step)) == fine[step - 1 :: step]
    assert list(one.ids()) == fine
    assert one.blocks == len(fine) // 8


def test_ids_of_different_conversations_never_match() -> None:
    turns = [record(c="a"), record(c="b"), record(c="a", turn=1, n=2048, h=[[0, 32]])]
    (first, second), (other,) = conversations(turns)
    assert second.chain[:2] == first.chain == (0, 1)
    assert second.chain[2:] == (2, 3) and other.chain == (4, 5)


def test_ids_match_where_the_file_says_so_and_the_common_prefix_is_fixed() -> None:
    turns = [
        record(c="a", scope="file", h=[[0, 32]], n=2048),
        record(c="b", scope="file", h=[[0, 16], [70, 16]], n=2048),
        record(c="b", agent="other", scope="file", h=[[0, 8], [200, 8]], n=1024),
    ]
    (first,), (second, other) = conversations(turns)
    assert first.chain == (0, 1, 2, 3)
    assert second.chain == (0, 1, 4, 5)
    assert other.chain == (0, 6)
    assert [turn.fixed_blocks for turn in (first, second, other)] == [2, 2, 2]


def test_tools_and_system_prompts_of_the_same_size_are_shared() -> None:
    sizes = {"n": 2048, "h": [[0, 32]], "tools": 1000, "system": 600}
    first, same, other = conversations(
        [record(c="a", **sizes), record(c="b", **sizes), record(c="c", **{**sizes, "system": 700})]
    )
    # Blocks end at 512, 1024 (system prompt, as its last fine block is), 1536, 2048.
    assert first[0].chain == (0, 1, 2, 3)
    assert same[0].chain == (0, 1, 2, 4)
    assert other[0].chain[0] == 0 and len({*other[0].chain[1:], *first[0].chain}) == 7
    assert [turn.fixed_blocks for (turn,) in (first, same, other)] == [3, 3, 3]


def test_what_a_session_s_first_request_fixes_holds_for_its_later_ones() -> None:
    turns = [record(c=c, turn=turn, tools=512, system=0) for c in "ab" for turn in (0, 1)]
    found = [turn for one in conversations(turns) for turn in one]
    assert [turn.chain for turn in found] == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert [turn.fixed_blocks for turn in found] == [1, 1, 1, 1]


def test_conversations_with_a_prompt_that_is_too_long_are_left_out() -> None:
    turns = [record(c="a"), record(c="b", n=MAX_TOKENS + 1), record(c="b", n=999), record(c="c", n=MAX_TOKENS)]
    assert [one[0].record.conversation for one in conversations(turns)] == ["a", "c"]
