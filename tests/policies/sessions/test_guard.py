"""The guard, and the caches in miniature that it compares, against naive twins."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kedge.policies.sessions.guard import Guard, StepShadow
from tests.policies.sessions.test_links import chain

Prompts = list[tuple[int, list[int], float]]
PROMPTS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.floats(0, 9)), max_size=30
)


@given(PROMPTS, st.integers(1, 12))
def test_the_steps_in_miniature_keep_their_books(prompts: Prompts, capacity: int) -> None:
    shadow = StepShadow(capacity)
    for owner, blocks, step in prompts:
        shadow.move(owner, step)
        before = {block for held in shadow._chains.values() for block in held} | set(shadow._free)
        hits = shadow.access(owner, chain(*blocks))
        assert all(block in before for block in chain(*blocks)[:hits])
        shadow.own(("fixed", owner), chain(*blocks[:2]))
        owned = [block for held in shadow._chains.values() for block in held]
        assert len(shadow._owners) <= capacity and +shadow._owners == {block: owned.count(block) for block in owned}
        assert set(shadow._free) == {block for block, count in shadow._owners.items() if not count}


def test_what_is_needed_last_goes_first_and_before_it_what_nobody_owns() -> None:
    shadow = StepShadow(6)
    shadow.move("soon", 1.0)
    shadow.move("late", 9.0)
    shadow.access("soon", chain(1, 2))
    shadow.access("late", chain(3, 4))
    shadow.access("dead", chain(5, 6))
    shadow.move("dead", None)
    shadow.move("new", 5.0)
    shadow.access("new", chain(7, 8, 9))
    assert shadow.access("dead", chain(5, 6)) == 0, "its end went, and now the other: for itself nothing is evicted"
    assert shadow.access("soon", chain(1, 2)) == 2
    assert shadow.access("late", chain(3, 4)) < 2


def cycle(guard: Guard, rounds: int, step: dict[int, float]) -> list[bool]:
    """Ten prompts in a cycle through room for six; who ruled after each."""
    ruled = []
    for _ in range(rounds):
        for owner in range(10):
            guard.access(owner, chain(*[owner] * 10))
            ahead = {other: ((other - owner - 1) % 10 + 1) * step[other] for other in range(10)}
            guard.on_steps({other: (steps, 1.0) for other, steps in ahead.items()})
            ruled.append(guard.trusted)
    return ruled


def test_steps_that_are_right_rule() -> None:
    guard = Guard(60)
    assert all(cycle(guard, 50, dict.fromkeys(range(10), 1.0)))
    assert guard._lead > 0.3 * guard._accessed


def test_steps_that_lose_give_way_to_lru_until_they_win() -> None:
    """Sessions return by turns of four that fit; the hints keep others instead."""
    guard, rng = Guard(60), random.Random(0)
    for blocks in (rng.sample(range(1000), 5) for _ in range(6)):
        guard.access(("old", blocks[0]), chain(*blocks))
        guard.on_steps({("old", blocks[0]): (0.0, 1.0)})
    for _ in range(40):
        for owner in range(5):
            guard.access(owner, chain(*[owner] * 10))
            guard.on_steps({owner: (50.0, 1.0)})
    assert not guard.trusted and guard._lead < 0
    for owner in range(1000):
        guard.on_steps({("old", owner): None})
    for _ in range(100):
        cycle(guard, 1, dict.fromkeys(range(10), 1.0))
    assert guard.trusted


@given(st.integers(1, 4000), st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), max_size=40))))
def test_a_block_is_in_the_sample_of_every_prompt_that_has_it(
    num_blocks: int, prompts: list[tuple[str, list[int]]]
) -> None:
    guard = Guard(num_blocks)
    for owner, blocks in prompts:
        sample = guard._sample(owner, chain(*blocks))
        assert sample == [block for block in chain(*blocks) if hash(block) % guard._every == 0]


def test_prompts_that_begin_alike_and_are_short_are_seen_in_a_large_cache() -> None:
    """All begin with one block, as those of a chat do, and have fewer blocks than one in the sample stands for."""
    guard = Guard(25_600)
    for user in range(3000):
        guard.access(user, chain(0, user, user))
    assert guard._accessed > 20
