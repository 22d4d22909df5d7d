"""Holes of a prompt: the runs of positions that a model has to compute, where the KV between them is there already or
is written by translation.

Holes are ascending, not empty, and apart: at least one position lies between two of them. The last one ends with the
prompt, for its last token is always computed. All functions are O(n log n) or better with n holes.
"""

from collections.abc import Iterable
from itertools import pairwise

Holes = tuple[range, ...]


def joined(runs: Iterable[range], nearer_than: int = 1) -> Holes:
    """Return the union of runs as holes. Those with fewer than `nearer_than` positions between them become one."""
    found: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if found and run.start - found[-1].stop < nearer_than:
            found[-1] = range(found[-1].start, max(found[-1].stop, run.stop))
        else:
            found.append(run)
    return tuple(found)


def clipped(holes: Holes, start: int) -> Holes:
    """Return the parts of holes at positions from `start` on."""
    return tuple(range(max(hole.start, start), hole.stop) for hole in holes if hole.stop > start)


def merged_to(holes: Holes, most: int) -> Holes:
    """Return at most `most` holes (at least one) that contain the given ones, by joining the nearest neighbours."""
    excess = len(holes) - max(1, most)
    if excess <= 0:
        return holes
    distances = sorted((after.start - before.stop, at) for at, (before, after) in enumerate(pairwise(holes), 1))
    filled = {at for _, at in distances[:excess]}
    found = [holes[0]]
    for at, hole in enumerate(holes[1:], 1):
        if at in filled:
            found[-1] = range(found[-1].start, hole.stop)
        else:
            found.append(hole)
    return tuple(found)


def between(holes: Holes, start: int) -> Holes:
    """Return the runs of positions from `start` up to the last hole that are in no hole. No hole is before `start`."""
    starts = (start, *(hole.stop for hole in holes))
    return tuple(range(begin, hole.start) for begin, hole in zip(starts, holes, strict=False) if begin < hole.start)
