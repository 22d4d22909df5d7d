from __future__ import annotations

from kedge.structures.bounded import Lru


def test_keeps_what_was_used_last() -> None:
    made: list[str] = []
    lru: Lru[str, str] = Lru(2)
    for key in "abacb":
        lru.get(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b", "c", "b"]
    assert len(lru) == 2
    assert list(lru.values()) == ["c", "b"]
