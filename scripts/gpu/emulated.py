"""Teams on stock vLLM and with Kedge's plug-in where passes take as long as those of an 8B model on an H200.

    python scripts/gpu/emulated.py [--clients 8 32] [--seconds 20] [--json FILE]        in .venv-vllm, without a GPU

Shows what the host costs: vLLM's scheduler and Kedge's are the real ones, asynchronous as on a GPU, in one process with
the worker. The device is a clock. A pass takes `PASS`, and `TOKEN` for each token beyond a graph, and goes on while the
host is at the next step. The model is not computed: its answers are random, and KV says nothing. So nothing follows
about quality, kernels or attention over long contexts. Stock vLLM gives 98 and 213 teams a minute on an Intel Xeon,
where the H200 gave 107 and 210. Times are this machine's: leave it two free cores.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PASS, TOKEN, GRAPH, LAUNCH = 5.5e-3, 24.5e-6, 16, 50e-6
"""Seconds of a pass, of each token beyond those of a small graph, and of the host for a kernel of Kedge's"""
MODEL = "tiny"


class Device:
    """A device that does one pass after the other, beside the host."""

    def __init__(self) -> None:
        self.begun = self.ended = self.waited = 0.0
        """Of the last pass that was started; the last one, how long the device had nothing to do before it"""

    def start(self, seconds: float) -> None:
        """Start a pass."""
        self.begun = max(self.ended, time.monotonic())
        self.waited = self.begun - self.ended if self.ended else 0.0
        self.ended = self.begun + seconds

    def wait(self, until: float | None = None) -> None:
        """Wait for a pass that ends then, or for all."""
        time.sleep(max(0.0, (self.ended if until is None else until) - time.monotonic()))


device = Device()


class Passes:
    """The passes that were started, as `PassEvents` has them."""

    def __init__(self) -> None:
        self._started: list[tuple[int, int, float, float, float]] = []

    def begin(self) -> None:
        """Do nothing: a pass begins when it is started."""

    def end(self, tokens: int, rows: int) -> None:
        """Note that a pass has been started."""
        self._started.append((tokens, rows, device.begun, device.ended, device.waited))

    def take_ended(self) -> list[tuple[int, int, float, float]]:
        """Return tokens, requests, seconds and the gap before it, of each that has ended since the last call."""
        ended = [one for one in self._started if one[3] <= time.monotonic()]
        self._started = [one for one in self._started if one not in ended]
        return [(tokens, rows, end - begin, waited) for tokens, rows, begin, end, waited in ended]


def emulate_runner(module: Any) -> None:
    """Let a pass take the device's time, and its tokens be there when it has ended."""
    import torch

    runner, output = module.GPUModelRunner, module.AsyncGPUModelRunnerOutput
    sample, read = runner.sample_tokens, output.get_output

    def forward(self: Any, input_ids: Any = None, *_: Any, **__: Any) -> Any:
        device.start(PASS + TOKEN * max(0, len(input_ids) - GRAPH))
        return torch.randn(len(input_ids), self.model_config.get_hidden_size())

    def sample_tokens(self: Any, grammar: Any) -> Any:
        found = sample(self, grammar)
        found.ends = device.ended
        return found

    def get_output(self: Any) -> Any:
        device.wait(self.ends)
        return read(self)

    runner._model_forward, runner.sample_tokens, output.get_output = forward, sample_tokens, get_output


def emulate_cuda(_: Any) -> None:
    """Give the runner streams and events that do nothing: it has those of a GPU where it runs ahead of one."""
    import torch

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.record = self.synchronize = self.wait_stream = self.wait = lambda *_: None

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    torch.cuda.Event = torch.cuda.Stream = torch.cuda.stream = torch.Event = Nothing
    torch.cuda.current_stream = lambda *_: Nothing()
    torch.accelerator.synchronize = lambda *_: None


def run_ahead(module: Any) -> None:
    """Keep asynchronous scheduling, which vLLM turns off on a CPU."""
    check = module.CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    module.CpuPlatform.check_and_update_config = classmethod(checked)


def emulate_pages(module: Any) -> None:
    """Let reading and writing KV take the host as long as the launch of a kernel, and trust how keys are rotated."""
    import torch

    def launch() -> None:
        until = time.perf_counter() + LAUNCH
        while time.perf_counter() < until:
            pass

    def read(self: Any, _: Any, start: int, stop: int) -> Any:
        launch()
        keys = self.empty.keys.new_empty(self.empty.layers, stop - start, *self.empty.keys.shape[2:])
        return module.KVSegment(keys, torch.empty_like(keys))

    module.Pages.read, module.Pages.write = read, lambda *_: launch()
    module.Pages.synchronize = lambda _: device.wait()
    module.RotationCheck.check = lambda self, *_: self.trust()


def emulate_worker(module: Any) -> None:
    """Let a worker learn what passes cost by the device's time."""
    begin = module.WorkerSide.begin_step

    def begin_step(self: Any) -> None:
        self._passes, self._room = self._passes or Passes(), 0
        begin(self)

    module.WorkerSide.begin_step = begin_step


EMULATED: dict[str, Callable[[Any], None]] = {
    "vllm.v1.worker.gpu_model_runner": emulate_runner,
    "vllm.v1.worker.cpu_model_runner": emulate_cuda,
    "vllm.platforms.cpu": run_ahead,
    "kedge.integrations.vllm.plugin.pages": emulate_pages,
    "kedge.integrations.vllm.plugin.worker_side": emulate_worker,
}


class Emulation(importlib.abc.MetaPathFinder):
    """Changes each of the `EMULATED` modules once it is imported: in vLLM's process too, which imports this file."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        emulate = EMULATED.pop(name, None)
        if emulate is None or (spec := importlib.util.find_spec(name)) is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            emulate(module)

        spec.loader = SimpleNamespace(create_module=loader.create_module, exec_module=exec_module)
        return spec


sys.meta_path.insert(0, Emulation())


def measure(clients: int, seconds: float) -> dict[str, Any]:
    """Return the figures of either engine under the load of `under_load.py`."""
    from kedge.bench.load import TeamSizes, drive, random_team, warm, word_tokenizer
    from kedge.bench.shapes import SHAPES
    from kedge.bench.vllm import BLOCK, KEDGE, MODES, ROWS, KvRoom, save_random_llama
    from kedge.integrations.vllm.engine.engine import VLLMEngine
    from kedge.settings import EngineSettings

    vocabulary, room, found = SHAPES[MODEL]["vocab_size"], KvRoom(131_072, 4096), dict[str, Any]()
    team = random_team(vocabulary, TeamSizes(1000, 128), 0)
    arguments = {
        "max_model_len": room.longest, "num_gpu_blocks_override": room.blocks, "block_size": BLOCK,
        "max_num_seqs": ROWS, "max_num_batched_tokens": 8192, "async_scheduling": True,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    }  # fmt: skip
    anchors = {**team.anchors, "max_bytes": 1 << 30, "max_base_bytes": 1 << 30}
    settings = EngineSettings(backend="vllm", anchors=anchors, guard=dict(team.guard), vllm=arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(MODEL, Path(folder))
        word_tokenizer(vocabulary).inner.save_pretrained(folder)
        for kind, mode in MODES.items():
            with VLLMEngine(Path(folder), settings, plugged=kind == KEDGE) as engine:
                warm(engine, team)
                found[kind] = drive(engine, team, seconds, clients, mode).as_json()
            print(f"{clients} clients, {kind}: {json.dumps(found[kind])}", flush=True)
    return found


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {str(clients): measure(clients, args.seconds) for clients in args.clients}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
