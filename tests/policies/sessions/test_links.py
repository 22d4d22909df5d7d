"""Which session a request continues."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.sessions.turns import Chain, SessionLinks
from kedge.structures.prefixes import chain_of
from kedge.types import Namespace

HERE, THERE, HERE_TOO = Namespace("a", ""), Namespace("b", ""), Namespace("a", "salt")


def chain(*blocks: int) -> Chain:
    """Prefix hashes of blocks."""
    return chain_of(blocks, 1)


def test_a_longer_prompt_continues_the_shorter_one_and_of_two_the_longer() -> None:
    links = SessionLinks()
    links.put("branch", HERE, chain(1, 2, 3), 2)
    assert links.find(HERE, chain(1, 2, 3, 4, 5)) == links.find(HERE, chain(1, 2, 3)) == "branch"
    assert links.find(HERE, chain(1, 2, 4)) is None and links.find(THERE, chain(1, 2, 3, 4)) is None
    links.put("fork", HERE, chain(1, 2), 1)
    assert links.find(HERE, chain(1, 2, 3, 4)) == "branch" and links.find(HERE, chain(1, 2, 9)) == "fork"


def test_an_end_that_changes_is_known_by_what_is_before_it_but_not_by_what_is_shared() -> None:
    links = SessionLinks()
    links.put("s", HERE, chain(1, 2, 3, 4, 5, 6), 3)
    assert links.find(HERE, chain(1, 2, 3, 4, 5, 9, 9)) == "s"
    assert links.find(HERE, chain(1, 2, 3, 4, 9)) is None, "three blocks back is no mark"
    links.put("s", HERE, chain(1, 2, 3, 7, 8), 3)
    assert links.find(HERE, chain(1, 2, 3, 7, 9)) == "s"
    assert links.find(HERE, chain(1, 2, 3, 8)) is None, "the first three may be others' as well"
    links.put("all", THERE, chain(1, 2), 2)
    assert links.find(THERE, chain(1, 2, 3)) == "all", "unless nothing else is there"


def test_a_prompt_that_goes_on_behind_what_many_begin_with_is_a_new_session() -> None:
    links = SessionLinks()
    assert links.begin(HERE, chain(0)) == 0, "no other is known"
    links.put("hello", HERE, chain(0), 0)
    assert links.find(HERE, chain(0, 1)) == "hello"
    assert links.begin(HERE, chain(0, 1, 2, 3, 4)) == 1 and links.begin(THERE, chain(0)) == 0
    links.put("chat", HERE, chain(0, 1, 2, 3, 4), 1)
    assert links.find(HERE, chain(0, 9)) is None and links.find(HERE, chain(0)) == "hello"
    assert links.find(HERE, chain(0, 1, 2, 3, 9)) == "chat", "the last block of its first prompt has changed"


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12))
def test_no_session_shares_more_with_others_than_is_returned(prompts: list[list[int]]) -> None:
    links, before = SessionLinks(), list[list[int]]()
    for blocks in prompts:
        shared = max((sum(map(int.__eq__, chain(*blocks), chain(*one))) for one in before), default=0)
        bound = links.begin(HERE, chain(*blocks))
        assert shared <= bound <= max(0, 2 * shared - 1)
        before.append(blocks)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=6), st.booleans())))
def test_marks_are_those_of_the_sessions_that_are_there(puts: list[tuple[str, list[int], bool]]) -> None:
    links = SessionLinks()
    for name, blocks, drop in puts:
        links.put(name, HERE, chain(*blocks), max(0, len(blocks) - 1))
        if drop:
            links.drop(name)
            assert links.find(HERE, chain(*blocks)) != name
    for name in "abc":
        links.drop(name)
    assert not links._ends and not links._marks
