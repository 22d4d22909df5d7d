"""Which cases every figure has, in the paper's ratios and at this machine's size, and the controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kedge.bench.workflow.figures import Sizes, Workload, branching, many_flows, random_order, single_flow, unpressed
from kedge.bench.workflow.lane import Hints, Wrong, right, silent
from kedge.bench.workflow.peer import Encode, peer
from kedge.errors import ConfigError

FIGURES = (5, 6, 8)


@dataclass(frozen=True)
class Shape:
    """Sizes of the workloads. The paper's are 8192/32/32 for figure 5, and for figure 6 512 or 1024 fixed tokens for
    20, 10, 128 or 64 workflows with 256 new tokens and answers of 256.

    A token of an answer costs a small model on a CPU more of a prefill than a large one on a GPU, so answers are
    shorter here: on an idle machine a call that finds its fixed prompt costs about 0.4 of computing that prompt.
    """

    sizes: Sizes = Sizes()
    """Figure 5."""
    rooms: tuple[int, ...] = (4, 3, 5)
    """Figure 5: for how many of the ten agents the device has room; the first stands for the figure."""
    flows: tuple[tuple[int, int], ...] = ((512, 16), (256, 32), (512, 3), (256, 5))
    """Figure 6: fixed tokens and workflows; the first stands for the figure."""
    new: int = 32
    """Figure 6: new tokens of a call."""
    said: int = 16
    """Figure 6: tokens of an answer."""
    room: int = 16 * 3 * 560
    """Figure 6: tokens of the device tier."""
    answer: int = 32
    """Figure 8: tokens of an answer."""
    questions: int = 2
    """Figure 8: questions of every team in one trial."""


QUICK = Shape(
    sizes=Sizes(1024, 32, 8), rooms=(4,), flows=((256, 8),), new=16, said=16, room=8 * 3 * 288, answer=8, questions=1
)
"""The same on fewer tokens, in one case a figure."""


@dataclass(frozen=True)
class Control:
    """Where nothing can be gained; `hints` makes the way that forecasts take to one engine."""

    workload: Workload
    hints: Callable[[], Hints] = lambda: right


def cases(figure: int, shape: Shape, vocab: int, seed: int, encode: Encode) -> list[Workload]:
    """The cases of a figure, the one that stands for it first. Raises `ConfigError` for an unknown figure."""
    if figure == 5:
        return [single_flow(shape.sizes, vocab, seed, room=room) for room in shape.rooms]
    if figure == 6:
        return [
            many_flows(Sizes(fixed, shape.new, shape.said), flows, shape.room, vocab, seed)
            for fixed, flows in shape.flows
        ]
    if figure == 8:
        return [peer(encode, seed, output=shape.answer, rounds=shape.questions)]
    raise ConfigError("figure", figure, f"the workloads are those of {', '.join(map(str, FIGURES))}")


def controls(shape: Shape, vocab: int, seed: int) -> dict[str, Control]:
    """The controls of figure 5, by name. In each of them Kedge must not be slower than LRU."""
    sizes = replace(shape.sizes, fixed=shape.sizes.fixed // 2)
    cyclic = single_flow(sizes, vocab, seed)
    wrong = {
        f"{share:.0%} wrong hints": Control(cyclic, lambda share=share: Wrong(share, 10, seed))  # type: ignore[misc]
        for share in (0.1, 0.5, 1.0)
    }
    branches = {f"{n} branches": Control(branching(n, sizes, vocab, seed)) for n in (1, 2, 4)}
    return {
        "no pressure": Control(unpressed(sizes, vocab, seed)),
        "no hints": Control(cyclic, lambda: silent),
        **wrong,
        "random order": Control(random_order(sizes, vocab, seed)),
        **branches,
    }
