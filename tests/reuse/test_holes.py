"""Lists of holes against sets of positions."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.reuse.holes import Holes, between, clipped, joined, merged_to

SIZE = 60
RUNS = st.lists(st.builds(lambda start, length: range(start, start + length), st.integers(0, 50), st.integers(0, 10)))


@st.composite
def layouts(draw: st.DrawFn) -> Holes:
    """Holes of a prompt of `SIZE` tokens."""
    return joined([*draw(RUNS), range(SIZE - draw(st.integers(1, 9)), SIZE)])


def positions(runs: list[range] | Holes) -> set[int]:
    return {position for run in runs for position in run}


def check_holes(holes: Holes) -> None:
    assert all(holes) and all(before.stop < after.start for before, after in zip(holes, holes[1:], strict=False))


@given(RUNS, st.integers(1, 6))
def test_joined_is_the_union_with_short_gaps_filled(runs: list[range], nearer_than: int) -> None:
    holes = joined(runs, nearer_than)
    check_holes(holes)
    assert positions(joined(runs)) == positions(runs)
    more = positions(holes) - positions(runs)
    filled = positions([gap for gap in gaps(joined(runs)) if len(gap) < nearer_than])
    assert more == filled
    assert all(len(gap) >= nearer_than for gap in gaps(holes))


def gaps(holes: Holes) -> list[range]:
    return [range(before.stop, after.start) for before, after in zip(holes, holes[1:], strict=False)]


@given(layouts(), st.integers(0, SIZE + 3))
def test_clipped_holes_begin_at_the_start(holes: Holes, start: int) -> None:
    found = clipped(holes, start)
    check_holes(found)
    assert positions(found) == {position for position in positions(holes) if position >= start}


@given(layouts(), st.integers(-2, 8))
def test_the_nearest_holes_are_merged_first(holes: Holes, most: int) -> None:
    found = merged_to(holes, most)
    check_holes(found)
    assert len(found) == min(len(holes), max(1, most))
    assert positions(found) >= positions(holes) and found[-1].stop == SIZE
    kept, before = sorted(map(len, gaps(found))), sorted(map(len, gaps(holes)))
    assert kept == before[len(before) - len(kept) :], "the widest gaps are kept"


@given(layouts(), st.integers(0, SIZE + 3))
def test_what_is_written_lies_between_the_holes(holes: Holes, start: int) -> None:
    found = clipped(holes, start)
    written = between(found, start)
    check_holes(written)
    assert positions(written).isdisjoint(positions(found))
    expected = set(range(start, found[-1].start)) - positions(found) if found else set()
    assert positions(written) == expected
