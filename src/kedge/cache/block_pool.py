"""Which blocks of a KV pool are free."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from kedge.errors import ConfigError, OutOfBlocks, PlanError


class BlockPool:
    """Blocks `0 … num_blocks-1`, handed out in as few ascending runs as possible.

    Attention reads a contiguous run without copying. Free runs are known by their start, by their stop (to merge
    neighbours) and by their length (for the best fit).
    """

    def __init__(self, num_blocks: int) -> None:
        """Begin with all blocks free. Raises `ConfigError` for a negative number; with none, nothing can be
        allocated.
        """
        if num_blocks < 0:
            raise ConfigError("num_blocks", num_blocks, "a pool cannot have fewer than no blocks")
        self.num_blocks = num_blocks
        self.num_free = 0
        self._is_free = bytearray(num_blocks)
        self._length: dict[int, int] = {}
        self._start_by_stop: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        if num_blocks:
            self._give_back(0, num_blocks)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Return `n` blocks, ascending: the run that follows block `after` if it is long enough, else the best-fitting
        run, else the fewest runs. Raises `OutOfBlocks`, having changed nothing, if fewer than `n` are free.
        """
        if n < 0:
            raise PlanError("blocks", n, "cannot allocate a negative number")
        if n > self.num_free:
            raise OutOfBlocks("blocks", n, f"{self.num_free} of {self.num_blocks} are free")
        blocks: list[int] = []
        for start, count in sorted(self._choose(n, after)):
            self._take(start, count)
            blocks.extend(range(start, start + count))
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises `PlanError`, having changed nothing, for one that is free or not of this pool."""
        runs = _runs(sorted(blocks))
        for start, count in runs:
            inside = start >= 0 and start + count <= self.num_blocks
            if not inside or self._is_free.count(1, start, start + count):
                raise PlanError("blocks", range(start, start + count), "freed twice, or not of this pool")
        for start, count in runs:
            self._give_back(start, count)

    def is_free(self, block: int) -> bool:
        """Return whether `block` has no owner."""
        return bool(self._is_free[block])

    def check_integrity(self) -> None:
        """Raise `PlanError` unless the free runs are whole, apart from each other and sum to `num_free`."""
        runs = sorted(self._length.items())
        expected = bytearray(self.num_blocks)
        for start, length in runs:
            expected[start : start + length] = b"\x01" * length
        consistent = (
            expected == self._is_free
            and sum(length for _, length in runs) == self.num_free == self._is_free.count(1)
            and self._by_length == sorted((length, start) for start, length in runs)
            and self._start_by_stop == {start + length: start for start, length in runs}
            and all(start not in self._start_by_stop for start, _ in runs)
        )
        if not consistent:
            raise PlanError("free runs", runs, f"do not describe {self.num_free} free blocks")

    def _choose(self, n: int, after: int | None) -> list[tuple[int, int]]:
        if after is not None and 0 < n <= self._length.get(after + 1, 0):
            return [(after + 1, n)]
        chosen, runs = list[tuple[int, int]](), self._by_length
        unused = len(runs)
        while n and n > runs[unused - 1][0]:
            unused -= 1
            length, start = runs[unused]
            chosen.append((start, length))
            n -= length
        if n:
            chosen.append((runs[bisect_left(runs, (n,), 0, unused)][1], n))
        return chosen

    def _take(self, start: int, count: int) -> None:
        length = self._forget_run(start)
        if length > count:
            self._remember_run(start + count, length - count)
        self._is_free[start : start + count] = bytes(count)
        self.num_free -= count

    def _give_back(self, start: int, count: int) -> None:
        self._is_free[start : start + count] = b"\x01" * count
        self.num_free += count
        stop = start + count
        if stop in self._length:
            stop += self._forget_run(stop)
        if start in self._start_by_stop:
            start = self._start_by_stop[start]
            self._forget_run(start)
        self._remember_run(start, stop - start)

    def _remember_run(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start_by_stop[start + length] = start
        insort(self._by_length, (length, start))

    def _forget_run(self, start: int) -> int:
        length = self._length.pop(start)
        del self._start_by_stop[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Run `(start, count)` of ascending blocks. Raises `PlanError` for a block that occurs twice."""
    runs: list[tuple[int, int]] = []
    start = stop = blocks[0] if blocks else 0
    for block in blocks:
        if block < stop:
            raise PlanError("block", block, "freed twice")
        if block > stop:
            runs.append((start, stop - start))
            start = block
        stop = block + 1
    return [*runs, (start, stop - start)] if blocks else runs
