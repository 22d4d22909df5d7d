"""Which session a request continues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.sessions.links import SessionLinks
from kedge.types import Namespace, TenantId

HERE, THERE = Namespace(TenantId("a"), ""), Namespace(TenantId("b"), "")


def chain(*blocks: int) -> list[int]:
    """Prefix hashes of blocks."""
    hashes, before = [], 0
    for block in blocks:
        before = hash((before, block))
        hashes.append(before)
    return hashes


def test_a_longer_prompt_continues_the_shorter_one() -> None:
    links = SessionLinks()
    links.put("s", HERE, chain(1, 2, 3), 2)
    assert links.find(HERE, chain(1, 2, 3, 4, 5)) == links.find(HERE, chain(1, 2, 3)) == "s"
    assert links.find(HERE, chain(1, 2, 4)) is None and links.find(THERE, chain(1, 2, 3, 4)) is None


def test_of_two_the_longer_history_is_continued() -> None:
    links = SessionLinks()
    links.put("fork", HERE, chain(1, 2), 1)
    links.put("branch", HERE, chain(1, 2, 3), 2)
    assert links.find(HERE, chain(1, 2, 3, 4)) == "branch" and links.find(HERE, chain(1, 2, 9)) == "fork"


def test_an_end_that_changes_is_known_by_what_is_before_it_but_not_by_what_is_shared() -> None:
    links = SessionLinks()
    links.put("s", HERE, chain(1, 2, 3, 4, 5, 6), 3)
    assert links.find(HERE, chain(1, 2, 3, 4, 5, 9, 9)) == "s"
    assert links.find(HERE, chain(1, 2, 3, 4, 9)) is None, "three blocks back is no mark"
    links.put("s", HERE, chain(1, 2, 3, 7), 3)
    assert links.find(HERE, chain(1, 2, 3, 8)) is None, "the first three may be others' as well"


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
