"""What is off beside another connector, or with an op whose layout cannot be found: answers are stock's."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import SMALL, Driver, driver, receipt
from tests.integrations.vllm.test_translation import EXTRA, VALUES, hints, tokens

HOST = {"tiers": {"host_memory": "40 blocks"}}
KEDGE = {
    "kv_connector": "KedgeConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kedge.integrations.vllm.plugin.connector",
    "kv_connector_extra_config": {**EXTRA, **HOST},
}
Write = Callable[..., None]


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> list[list[int]]:
    """Answers to the cycle, and to prompts with values."""
    with driver(tiny_llama, plugged=False, **SMALL) as plain:
        return [*plain.cycle(), *(plain.answer(tokens(value), count=8) for value in VALUES)]


def check(built: Driver, stock: list[list[int]], reason: str) -> None:
    """Check that nothing is translated, for this reason, also where all has been asked before."""
    assert built.cycle() == stock[: -len(VALUES)]
    for value, expected in zip(VALUES, stock[-len(VALUES) :], strict=True):
        for _ in range(2):
            output = built.ask(tokens(value), count=8, kedge=hints(value))
            assert list(output.outputs[0].token_ids) == expected
        found = receipt(output)
        assert found["tokens"]["translated"] == 0
        assert any(reason in miss["reason"] for miss in found["misses"])
    assert built.pool.get_num_free_blocks() == built.pool.num_gpu_blocks - 1


# another connector in vLLM's `MultiConnector` -------------------------------------------------------------------------


def example(folder: Path) -> dict[str, Any]:
    """It saves the blocks of every request by its tokens, and loads them for the next one with these."""
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


class PlainWorker(OffloadingWorker):
    """A worker of vLLM's `OffloadingConnector` that copies with PyTorch: vLLM's own needs a GPU. All else is vLLM's."""

    stored = 0
    """Blocks that all workers have stored"""

    def __init__(self, pages: list[Any], num_chunks: int) -> None:
        self._pairs = [(one.tensor, torch.zeros_like(one.tensor[:1]).repeat(num_chunks, 1)) for one in pages]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        PlainWorker.stored += len(src_spec.block_ids)
        for device, host in self._pairs:
            host[dst_spec.block_ids] = device[src_spec.block_ids]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs:
            device[dst_spec.block_ids] = host[src_spec.block_ids]
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class PlainOffloading(CPUOffloadingSpec):
    """vLLM's offloading to the CPU's memory with this worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            self._worker = PlainWorker(kv_caches.tensors, self.num_chunks)
        return self._worker


def offloading(_: Path) -> dict[str, Any]:
    """vLLM's own host tier, with copies by PyTorch."""
    worker = {"spec_name": "PlainOffloading", "spec_module_path": __name__}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24, **worker}}


def has_worked(other: Any, folder: Path) -> bool:
    """Whether another connector has done something."""
    return any(folder.iterdir()) if other is example else PlainWorker.stored > 0


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("other", [example, offloading])
def test_beside_another_connector_kv_is_cached_and_not_translated(
    tiny_llama: Path, stock: list[list[int]], other: Callable[[Path], dict[str, Any]], is_first: bool, tmp_path: Path
) -> None:
    from vllm.config import KVTransferConfig

    company = {"kv_role": "kv_both", **other(tmp_path)}
    both = {"connectors": [KEDGE, company] if is_first else [company, KEDGE]}
    config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=both)
    with driver(tiny_llama, plugged=False, kv_transfer_config=config, scheduler_cls=SCHEDULER, **SMALL) as built:
        check(built, stock, "another KV connector")
        connector = built.connector._connectors[0 if is_first else 1]
        assert connector.totals()["blocks_loaded"] > 0, "the host tier goes on"
        assert has_worked(other, tmp_path), "and so does the other connector"


# an op with a fault while vLLM registers its pages --------------------------------------------------------------------


def raising(_: Write, *__: Any) -> None:
    raise RuntimeError("no such kernel")


def into_one_place(write: Write, impl: Any, layer: Any, keys: Any, values: Any, pages: Any, slots: Any) -> None:
    """Two tokens each."""
    write(impl, layer, keys, values, pages, slots - slots % 2)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(raising, "failed: RuntimeError('no such kernel')"), (into_one_place, "does not keep keys and values as given")],
)
def test_what_needs_the_layout_is_off(
    tiny_llama: Path, stock: list[list[int]], fault: Callable[..., None], reason: str
) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write = CPUAttentionBackendImpl.do_kv_cache_update
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", lambda *given: fault(write, *given))
            built = stack.enter_context(driver(tiny_llama, extra=HOST, scheduler_cls=SCHEDULER, **SMALL))
        check(built, stock, reason)
        totals = built.side.totals()
        assert totals["blocks_loaded"] and not totals.get("failed_copies"), "the host tier needs none"
        built.check_rest()
