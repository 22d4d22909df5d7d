"""The cases of every figure, in the paper's ratios and at this machine's size, and the controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kedge.bench.workflow.figures import (
    FlowWorkload,
    Sizes,
    branching,
    many_flows,
    random_order,
    single_flow,
    unpressed,
)
from kedge.bench.workflow.lane import Hints, WrongHints, no_hints, true_hints
from kedge.bench.workflow.peer import Encode, peer
from kedge.errors import ConfigError

FIGURES = (5, 6, 8)


@dataclass(frozen=True)
class CaseSizes:
    """Sizes of the workloads.

    The paper's are 8192/32/32 for figure 5, and for figure 6 512 or 1024 fixed tokens for 20, 10, 128 or 64 workflows
    with 256 new tokens and answers of 256.

    An answer's token costs a small model on a CPU a larger share of a prefill than a large model on a GPU, so answers
    are shorter here: on an idle machine a call that finds its fixed prompt costs about 0.4 of computing that prompt.
    """

    sizes: Sizes = Sizes()
    """Figure 5."""
    rooms: tuple[int, ...] = (4, 3, 5)
    """Figure 5: agents, of ten, that the device has room for; the first is the main case."""
    flows: tuple[tuple[int, int], ...] = ((512, 16), (256, 32), (512, 3), (256, 5))
    """Figure 6: fixed tokens and number of workflows; the first is the main case."""
    new: int = 32
    """Figure 6: new tokens of a call."""
    reply: int = 16
    """Figure 6: tokens of an answer."""
    room: int = 16 * 3 * 560
    """Figure 6: tokens of the device tier."""
    answer: int = 32
    """Figure 8: tokens of an answer."""
    questions: int = 2
    """Figure 8: questions of every team in one trial."""


QUICK = CaseSizes(
    sizes=Sizes(1024, 32, 8), rooms=(4,), flows=((256, 8),), new=16, reply=16, room=8 * 3 * 288, answer=8, questions=1
)
"""Fewer tokens and one case per figure."""


@dataclass(frozen=True)
class Control:
    """A case without anything to gain; `hints` returns the filter of forecasts for one engine."""

    workload: FlowWorkload
    hints: Callable[[], Hints] = lambda: true_hints


def cases(figure: int, shape: CaseSizes, vocab: int, seed: int, encode: Encode) -> list[FlowWorkload]:
    """Return the cases of a figure, its main case first. Raises `ConfigError` for an unknown figure."""
    if figure == 5:
        return [single_flow(shape.sizes, vocab, seed, room=room) for room in shape.rooms]
    if figure == 6:
        return [
            many_flows(Sizes(fixed, shape.new, shape.reply), flows, shape.room, vocab, seed)
            for fixed, flows in shape.flows
        ]
    if figure == 8:
        return [peer(encode, seed, output=shape.answer, rounds=shape.questions)]
    raise ConfigError("figure", figure, f"must be one of {', '.join(map(str, FIGURES))}")


def controls(shape: CaseSizes, vocab: int, seed: int) -> dict[str, Control]:
    """Return the controls of figure 5 by name. In none of them may Kedge be slower than LRU."""
    sizes = replace(shape.sizes, fixed=shape.sizes.fixed // 2)
    cyclic = single_flow(sizes, vocab, seed)
    wrong = {
        f"{share:.0%} wrong hints": Control(cyclic, lambda share=share: WrongHints(share, 10, seed))  # type: ignore[misc]
        for share in (0.1, 0.5, 1.0)
    }
    branches = {f"{n} branches": Control(branching(n, sizes, vocab, seed)) for n in (1, 2, 4)}
    return {
        "no pressure": Control(unpressed(sizes, vocab, seed)),
        "no hints": Control(cyclic, lambda: no_hints),
        **wrong,
        "random order": Control(random_order(sizes, vocab, seed)),
        **branches,
    }
