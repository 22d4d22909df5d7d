"""The keys that begin most like a given one, against a count of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kedge.structures.prefixes import SortedKeys, common_length

KEYS = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=6).map(bytes)


def common(keys: SortedKeys[int], key: bytes) -> list[int]:
    """Return how much each key has in common with `key`, if anything, the most first."""
    return sorted((same for other in keys if (same := common_length(other, key))), reverse=True)


@given(st.lists(st.tuples(KEYS, st.booleans())), KEYS, st.booleans())
def test_the_nearest_come_first_whatever_was_set_and_deleted(
    changes: list[tuple[bytes, bool]], key: bytes, early: bool
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
    found = list(keys.nearest(key))
    assert [same for same, _ in found] == common(keys, key)
    assert {value for _, value in found} == {value for other, value in keys.items() if common_length(other, key)}
    assert all(same == common_length(other, key) for same, value in found for other in keys if keys[other] == value)


def test_the_first_of_many_is_found_without_comparing_all() -> None:
    keys = SortedKeys[int]()
    for at in range(10_000):
        keys[b"head" + at.to_bytes(4, "big")] = at
    assert [value for _, value in keys.nearest(b"head" + (4711).to_bytes(4, "big") + b"more")][:1] == [4711]
    found = keys.nearest(b"head")
    assert next(found) == (4, 0)
