"""Replayed passes against passes as they are run: with CUDA graphs on a GPU, elsewhere with a stand-in for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kedge.engine.local.model.graphs import (
    ROWS,
    TOGETHER,
    WITH_LOGITS,
    Attend,
    Captured,
    CudaCapture,
    StepGraphs,
    kind_of,
    on_gpu,
)
from kedge.engine.local.model.loading import checked_runner
from kedge.engine.local.model.runner import ModelRunner
from kedge.engine.local.sequence import Sequence, Work, flatten
from kedge.kv.storage import PagedStorage, SlotTable
from kedge.types import Namespace
from tests.engine.local.conftest import DEVICE, FAMILIES, tiny_model
from tests.engine.local.model.test_architectures import model_of
from tests.kv import row_by_row

BLOCK = 16


def stand_in(work: Callable[[], Tensor]) -> Captured:
    """Captures as CUDA does: the work is done before, and every replay leaves its result in the same tensor."""
    result = work().clone()
    return lambda: result.copy_(work()), result


class Graphs:
    """Captures on this machine's device, and counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self._capture = CudaCapture(DEVICE) if DEVICE.type == "cuda" else stand_in

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        self.captures += 1
        launch, result = self._capture(work)

        def replay() -> None:
            self.replays += 1
            launch()

        return replay, result


attend: Attend = row_by_row.attend
if DEVICE.type != "cpu":
    from kedge.kv.attention_kernel import attend


def runner_of(name: str) -> ModelRunner:
    return checked_runner((tiny_model(name) if name in FAMILIES else model_of(name)).to(DEVICE))


def storage_of(runner: ModelRunner, blocks: int = 32) -> PagedStorage:
    storage = PagedStorage(runner.spec, blocks, BLOCK, runner.device, runner.rotary)
    storage.keys.zero_()
    storage.values.zero_()
    return storage


def work(blocks: list[int], length: int, positions: list[int]) -> Work:
    tokens = [(7 * position + blocks[0]) % 256 for position in range(length)]
    return Work(Sequence(str(blocks[0]), Namespace(""), tokens, SlotTable.of(blocks, BLOCK)), positions)


class Whole(Work):
    """Work of which all logits are needed, as for a prompt's log probabilities."""

    @property
    def logit_rows(self) -> int:
        return len(self.positions)


def before(runner: ModelRunner, storage: PagedStorage, step: Step) -> None:
    """Compute what the sequences of a pass have before it."""
    for blocks, length, positions in step:
        if others := [at for at in range(length) if at not in positions]:
            runner.forward(flatten([work(blocks, length, others)], storage))


Step = list[tuple[list[int], int, list[int]]]
"""Blocks, length and positions of each sequence in a pass"""
TWO: Step = [([3, 9, 1], 38, [37]), ([20, 21, 6], 41, [40])]
STEPS: dict[str, Step] = {
    "one": TWO[:1],
    "two": TWO,
    "33 that decode": [([number, 33 + number], 1 + number % 30, [number % 30]) for number in range(33)],
    "some of a prompt beside a decode": [([3, 9, 1], 37, [0, 1, 20, 35, 36]), ([20, 21, 6], 41, [40])],
    "a chunk that fills no graph": [([5, 2], 19, list(range(19)))],
    "many": [([5, 2, 11, 4], 64, list(range(64)))],
    "more, beside a decode": [([3, 9, 1], 38, [37]), ([5, 2, 11, 4, 7, 8, 12], 110, list(range(110)))],
}


EXPERTS = "gpt-oss, attention sinks"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-sliding", "gemma2", "Gemma 3", EXPERTS])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_replayed_pass_is_the_pass(name: str, step: Step) -> None:
    if DEVICE.type == "cuda" and name == EXPERTS:
        pytest.skip("PyTorch's loop over experts reads which of them are chosen: such a pass cannot be captured")
    runner = runner_of(name)
    plain, replayed = storage_of(runner, 66), storage_of(runner, 66)
    for storage in (plain, replayed):
        before(runner, storage, step)
    wanted = runner.forward(flatten([work(*one) for one in step], plain))

    capture = Graphs()
    runner.graphs = StepGraphs(runner.run, replayed, 200, attend, capture)
    for _ in range(2):
        got = runner.forward(flatten([work(*one) for one in step], replayed))
        torch.testing.assert_close(got, wanted, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(replayed.keys, plain.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(replayed.values, plain.values, atol=1e-4, rtol=1e-4)
    assert (capture.captures, capture.replays) == (1, 2)


def test_each_number_of_rows_is_captured_once() -> None:
    runner = runner_of("llama")
    storage, capture = storage_of(runner), Graphs()
    graphs = StepGraphs(runner.run, storage, 200, attend, capture)
    with torch.inference_mode():
        for count in (1, 2, 3, 4, 3, 5, 8, 1):
            batch = flatten([work([5, 2], count, list(range(count)))], storage)
            assert graphs.replay(batch).shape == (1, runner.vocab_size)
    assert (capture.captures, capture.replays) == (4, 8)  # 1, 2, 4 and 8


def test_what_no_graph_holds_is_left_to_the_model() -> None:
    runner = runner_of("llama")
    storage, capture = storage_of(runner), Graphs()
    graphs = StepGraphs(runner.run, storage, 400, attend, capture)
    count, most = ROWS[-1] + 1, WITH_LOGITS + 1
    large = flatten([work(list(range(17)), count, list(range(count)))], storage)
    all_logits = flatten([Whole(work([5, 2, 11, 4, 7], most, list(range(most))).sequence, list(range(most)))], storage)
    elsewhere = flatten([work([5], 1, [0])], storage_of(runner))
    assert graphs.replay(large) is None
    assert graphs.replay(all_logits) is None
    assert graphs.replay(elsewhere) is None
    assert not capture.captures


def test_logits_outlive_the_next_replay() -> None:
    runner = runner_of("llama")
    storage = storage_of(runner)
    before(runner, storage, TWO)
    graphs = StepGraphs(runner.run, storage, 200, attend, Graphs())
    with torch.inference_mode():
        first = graphs.replay(flatten([work([3, 9, 1], 38, [37])], storage))
        kept = first.clone()
        graphs.replay(flatten([work([20, 21, 6], 41, [40])], storage))
    assert torch.equal(first, kept)


def test_rows_of_prompts_attend_together_and_decodes_apart() -> None:
    storage = storage_of(runner_of("llama"))
    decodes = [work([i], 5, [4]) for i in range(20)]
    tail = [work([21, 22], 30, list(range(6, 30)))]
    assert kind_of(flatten(decodes, storage)) == (24, False)
    assert kind_of(flatten(tail, storage)) == (24, True)
    assert kind_of(flatten(decodes[:7] + tail, storage)) == (32, True)
    assert kind_of(flatten([work([21], 9, list(range(9)))], storage)) == (16, True)
    assert kind_of(flatten([work([21], 8, list(range(8)))], storage)) == (8, False)


def test_what_is_captured_before_the_first_pass_is_not_captured_again() -> None:
    runner = runner_of("llama")
    storage, capture = storage_of(runner), Graphs()
    before(runner, storage, TWO)
    kept = storage.keys[:, BLOCK:].clone()
    graphs = StepGraphs(runner.run, storage, 400, attend, capture)
    graphs.capture(running=9)
    assert torch.equal(storage.keys[:, BLOCK:], kept), "only slots of block 0 are written to"
    captured = capture.captures
    assert captured == len([size for size in ROWS if size <= 16]) + len([size for size in ROWS if size >= TOGETHER])
    with torch.inference_mode():
        for count in (1, 30, 200):
            batch = flatten([work(list(range(20, 20 - -(-count // BLOCK), -1)), count, list(range(count)))], storage)
            got, wanted = graphs.replay(batch), runner.run(batch)
            torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)
    assert (capture.captures, capture.replays) == (captured, 3)


@pytest.mark.parametrize("error", [RuntimeError, Exception])  # PyTorch's, and Triton's
def test_a_model_that_cannot_be_captured_goes_without(error: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of("llama")
    storage, tries = storage_of(runner), []

    def capture(_: Callable[[], Tensor]) -> Captured:
        tries.append(1)
        raise error("not permitted when stream is capturing, or required more shared memory than there is")

    runner.graphs = StepGraphs(runner.run, storage, 200, attend, capture)
    batch = flatten([work([5], 3, [0, 1, 2])], storage)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(runner.forward(batch), runner.run(batch))
    assert len(tries) == 1
    assert "not permitted" in caplog.text


def test_a_gpu_has_graphs_and_a_cpu_none() -> None:
    runner = runner_of("llama")
    assert (on_gpu(runner.run, storage_of(runner), 200) is not None) == (DEVICE.type == "cuda")


@pytest.mark.parametrize("name", ["Gemma 4", "DeepSeek-V2, MLA"])
def test_keys_of_several_shapes_and_latents_have_no_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedStorage, "has_kernels", True)
    runner = runner_of(name)
    assert on_gpu(runner.run, storage_of(runner), 200) is None
