"""Common prefixes against a count item by item."""

import itertools
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kedge.structures.prefixes import SortedKeys, common_length, common_prefix, leading_count

SHORT = st.lists(st.integers(0, 1), max_size=12).map(tuple)


def naive(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(SHORT, SHORT, st.integers(0, 40))
def test_two_sequences(one: tuple[int, ...], other: tuple[int, ...], shared: int) -> None:
    head = tuple(range(shared))
    one, other = head + one, head + other
    expected = naive(one, other)
    assert expected >= shared
    assert common_length(array("q", one), array("q", other)) == common_length(bytes(one), bytes(other)) == expected
    assert common_prefix([one, other]) == one[:expected]


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(-1, 60))
def test_leading_items_are_counted_with_any_guess(answer: int, start: int, stop: int, guess: int) -> None:
    asked: list[int] = []

    def holds(at: int) -> bool:
        asked.append(at)
        return at < answer

    expected = max(start, min(answer, stop))
    assert leading_count(holds, stop, start, guess) == expected
    assert all(start <= at < stop for at in asked)
    assert len(asked) <= (2 if guess == expected else 2 + (stop - start).bit_length())


@given(st.lists(SHORT, max_size=5))
def test_several_sequences(sequences: list[tuple[int, ...]]) -> None:
    least = min((naive(sequences[0], other) for other in sequences), default=0)
    assert common_prefix(sequences) == (sequences[0][:least] if sequences else ())


# sorted keys ----------------------------------------------------------------------------------------------------------


KEYS = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=6).map(bytes)


@given(st.lists(st.tuples(KEYS, st.booleans())), KEYS, st.booleans(), st.integers(1, 5))
def test_the_nearest_are_found_whatever_was_set_and_deleted(
    changes: list[tuple[bytes, bool]], key: bytes, early: bool, half: int
) -> None:
    keys = SortedKeys[int]()
    if early:  # from now on the order is kept, not made
        assert keys.order == []
    for value, (changed, is_set) in enumerate(changes):
        if is_set:
            keys[changed] = value
        elif changed in keys:
            del keys[changed]
    assert keys.order == sorted(keys)
    common = {value: common_length(other, key) for other, value in keys.items()}
    found = keys.nearest(key, 2 * half)
    assert len(found) <= 2 * half and all(common[value] == same for same, value in found)
    most = sorted(common.values(), reverse=True)[:half]
    assert sorted((same for same, _ in found), reverse=True)[: len(most)] == most
