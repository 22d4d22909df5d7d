"""What a refusal says of two identities that differ."""

from __future__ import annotations

import pytest

from kedge.engine.common.state.files import differences, identity_of

OURS = identity_of({"model": "a", "rank": 0, "ranks": 1})


def test_the_parts_that_differ_are_named_with_both_values() -> None:
    assert differences(identity_of({"model": "a", "rank": 0, "ranks": 2}), OURS) == ("ranks", [2], [1])
    theirs = identity_of({"model": "b", "rank": 0})
    assert differences(theirs, OURS) == ("model, ranks", ["b", None], ["a", 1])


@pytest.mark.parametrize("theirs", ["0f" * 32, "", "[1]", "null", 5, None, {"model": "b"}, "{"])
def test_what_has_no_parts_differs_as_a_whole(theirs: object) -> None:
    assert differences(theirs, OURS) == ("identity", theirs, OURS)


def test_digests_differ_as_a_whole() -> None:
    assert differences("0f" * 32, "1e" * 32) == ("identity", "0f" * 32, "1e" * 32)
