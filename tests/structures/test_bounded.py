from hypothesis import given
from hypothesis import strategies as st

from kedge.structures.bounded import BoundedDict


def test_an_owner_pushes_out_nothing_of_others() -> None:
    entries: BoundedDict[str, int] = BoundedDict(4, owner=lambda key: key[0])
    for key in ("a1", "b1", "b2", "c1", "b3", "b4", "b5"):
        entries[key] = 1
    assert list(entries) == ["a1", "c1", "b4", "b5"]
    entries["a2"] = 1
    assert list(entries) == ["a1", "c1", "b5", "a2"], "of two that have as many, it is who used none for longer"

    many: BoundedDict[int, None] = BoundedDict(512, owner=lambda key: key < 100)
    many.update(dict.fromkeys(range(513)))
    assert [*many] == [*range(100), *range(103, 513)], "as all owners are looked at, a few go at once"
    pair: BoundedDict[int, int] = BoundedDict(512, owner=lambda key: min(key, 511))
    pair.update(zip(range(512), range(512), strict=True))
    assert pair.use(512, lambda: 7) == 7 and 511 not in pair, "of an owner of two it is the older"


@given(st.integers(1, 4), st.booleans(), st.lists(st.tuples(st.sampled_from("=upfc"), st.integers(0, 6))))
def test_it_is_a_list_in_the_order_of_use(limit: int, owned: bool, operations: list[tuple[str, int]]) -> None:
    evicted, gone, naive = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    owner = (lambda _: 0) if owned else None
    entries: BoundedDict[int, int] = BoundedDict(limit, lambda key, value: evicted.append((key, value)), owner)
    for how, key in operations:
        if how == "=":
            entries[key] = key
        elif how == "u":
            assert entries.use(key, lambda key=key: key) == key
        elif how == "p":
            assert entries.pop(key, None) == (key if key in naive else None)
        elif how == "f" and naive:
            assert entries.popitem(last=False) == (key := naive[0], key)
        elif how == "c":
            entries.clear()
            naive = []
        naive = [*(one for one in naive if one != key), *([key] if how in "=u" else [])]
        gone += [(one, one) for one in naive[:-limit]]
        naive = naive[-limit:]
        assert list(entries) == naive and evicted == gone
    assert len(entries._owned.get(0, ())) == owned * len(naive)
