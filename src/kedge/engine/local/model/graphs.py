"""Passes of few tokens as CUDA graphs: all kernels of a model are launched at once.

Started one by one from Python, the kernels of such a pass take longer to launch than to run. A graph replays what was
captured with the same addresses and shapes: so there is one for each of some numbers of rows, its inputs are copied
into buffers that stay, and rows that are left over repeat the last one, which writes the same KV to its slot once more.
All are captured before the first request, which would wait for it otherwise.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kedge.engine.local.attention.latent import LatentWeights
from kedge.engine.local.attention.paged import Batch, ForwardBatch, Scoring
from kedge.kv.storage import PagedStorage

logger = logging.getLogger(__name__)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that are captured: for decode steps, and the few tokens computed beside translated ones"""
TOGETHER = 16
"""Least rows of a pass whose rows of one sequence attend together"""
WITH_LOGITS = 64
"""Most rows of a graph whose logits are computed"""
WARMUPS = 2
"""Passes before the capture, in which kernels are compiled and libraries allocate memory"""

Kind = tuple[int, bool]
"""A graph's rows, and whether those of one sequence attend together"""
Attend = Callable[..., Tensor]
"""Attention of few tokens, with the arguments of `kedge.kv.attention_kernel.attend`"""
Captured = tuple[Callable[[], object], Tensor]
"""A replay function, and the tensor that holds its result"""


@dataclass(slots=True)
class Rows(ForwardBatch):
    """A pass whose inputs stay where they are: every row is a token that sees the context up to it. At most
    `WITH_LOGITS` of them need logits.
    """

    lengths: Tensor
    """int32 [rows]: tokens of each row's context, including its own"""
    owners: Tensor
    """int32 [rows]: the sequence of each row"""
    blocks: Tensor
    """int32 [sequences, longest context in blocks]"""
    attend_with: Attend
    together: bool = False
    """Whether rows mostly follow others of their sequence, as those of prompts do"""

    @classmethod
    def of(cls, storage: PagedStorage, longest: int, attend: Attend) -> Self:
        """Allocate buffers for the most rows, with contexts of up to `longest` tokens."""
        device, most = storage.keys.device, ROWS[-1]
        tokens, positions, slots, logits = torch.zeros(4, most, dtype=torch.int64, device=device)
        lengths, owners = torch.tensor([[1], [0]], dtype=torch.int32, device=device).repeat(1, most)
        blocks = torch.zeros(most, -(-longest // storage.block_size), dtype=torch.int32, device=device)
        return cls(tokens, positions, slots, logits[:WITH_LOGITS], storage, lengths, owners, blocks, attend)

    def first(self, count: int, *, together: bool = False) -> Self:
        """Return the first rows, as views."""
        names = ("tokens", "positions", "slots", "lengths", "owners", "blocks", "logits_rows")
        return replace(self, **{name: getattr(self, name)[:count] for name in names}, together=together)

    def fill(self, batch: Batch) -> None:
        """Copy in a batch of at most this many tokens; the other rows repeat the last one."""
        blocks, sizes = block_table(batch), [one.stop - one.start for one in batch.sequences]
        owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
        _fill(self.tokens, batch.tokens)
        _fill(self.positions, batch.positions)
        _fill(self.slots, batch.slots)
        _fill(self.lengths, batch.positions + 1)
        _fill(self.owners, owners.to(self.owners.device))
        _fill(self.logits_rows, batch.logits_rows)
        self.blocks[: len(blocks), : blocks.shape[1]].copy_(blocks)

    def attend(self, layer: int, query: Tensor, how: Scoring, latent: LatentWeights | None = None) -> Tensor:
        keys, values = self.storage.pools[layer]
        assert latent is None, "`on_gpu` gives graphs to no pool of latents"
        context = (self.blocks, self.owners, self.lengths, self.storage.block_size)
        scores = how.scaling, how.window, how.softcap, how.sinks
        return self.attend_with(query.transpose(0, 1), keys, values, *context, *scores, together=self.together)


def _fill(target: Tensor, source: Tensor) -> None:
    target[: len(source)].copy_(source)
    target[len(source) :].copy_(source[-1:].expand(len(target) - len(source), *source.shape[1:]))


def block_table(batch: Batch) -> Tensor:
    """Return int32 [sequences, blocks], on the CPU: the blocks of each sequence, padded with zeros."""
    size = batch.storage.block_size
    lists = [[b for run in s.runs for b in range(run.start // size, -(-run.stop // size))] for s in batch.sequences]
    longest = max(map(len, lists))
    return torch.tensor([[*blocks, *[0] * (longest - len(blocks))] for blocks in lists], dtype=torch.int32)


def kind_of(batch: Batch) -> Kind | None:
    """Return the graph that a pass takes; None if it has too many rows for any."""
    rows = len(batch.tokens)
    size = next((size for size in ROWS if size >= rows), None)
    return None if size is None else (size, size >= TOGETHER and 2 * len(batch.sequences) <= rows)


class StepGraphs:
    """The CUDA graphs of passes of few tokens over one storage."""

    def __init__(
        self,
        run: Callable[[ForwardBatch], Tensor],
        storage: PagedStorage,
        longest: int,
        attend: Attend,
        capture: Callable[[Callable[[], Tensor]], Captured],
    ) -> None:
        """Start without graphs. `run` returns the logits of a pass; `capture` runs some work and captures it."""
        self._run, self._storage, self._capture = run, storage, capture
        self._rows = Rows.of(storage, longest, attend)
        self._captured: dict[Kind, Captured] = {}
        self._works = True

    @torch.inference_mode()
    def capture(self, running: int) -> None:
        """Capture the graphs of passes in which up to so many sequences decode, and of pieces of prompts. Slot 0 of the
        storage must not be in use yet.
        """
        most = next((size for size in ROWS if size >= running), ROWS[-1])
        apart = [(size, False) for size in ROWS if size <= most]
        together = [(size, True) for size in ROWS if size >= TOGETHER]
        for kind in sorted(apart + together, reverse=True):  # the largest first: the others find its memory
            if not self._works or not self._add(kind):
                return

    def replay(self, batch: Batch) -> Tensor | None:
        """Return the logits of the rows that need them. None if the batch is too large or over another storage, or this
        model cannot be captured; then running the pass normally is safe.
        """
        kind, wanted = kind_of(batch), len(batch.logits_rows)
        if kind is None or wanted > WITH_LOGITS or batch.storage is not self._storage or not self._works:
            return None
        self._rows.first(kind[0]).fill(batch)
        if kind not in self._captured and not self._add(kind):
            return None
        launch, logits = self._captured[kind]
        launch()
        return logits[:wanted].clone()  # the next replay overwrites it

    def _add(self, kind: Kind) -> bool:
        size, together = kind
        rows = self._rows.first(size, together=together)
        try:
            self._captured[kind] = self._capture(lambda: self._run(rows))
        except Exception as error:  # a model that reads its own results on the way, a kernel too large for the GPU
            logger.warning("passes of few tokens run without CUDA graphs: %s", error)
            self._works = False
        return self._works


class CudaCapture:
    """A capture of work as CUDA graphs that share memory: a result is valid until the next replay of any of them."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        with torch.cuda.device(self._device):
            # Before, on a stream of its own, as PyTorch requires, so that one-time initialisation is not captured.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARMUPS):
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls are captured: the copier goes on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        return graph.replay, result


def on_gpu(run: Callable[[ForwardBatch], Tensor], storage: PagedStorage, longest: int) -> StepGraphs | None:
    """Return graphs for passes over `storage`; None if it has no kernels, has latents, or keys do not fill it in all
    layers.
    """
    if not storage.has_kernels or any(keys.shape != storage.keys.shape[1:] for keys, _ in storage.pools):
        return None
    from kedge.kv.attention_kernel import attend

    return StepGraphs(run, storage, longest, attend, CudaCapture(storage.keys.device))
