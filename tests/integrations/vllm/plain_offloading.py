"""A worker for vLLM's `OffloadingConnector` that copies with PyTorch: vLLM's own needs a GPU. All else is vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class PlainWorker(OffloadingWorker):
    """Copies of whole blocks, each done when it is ordered."""

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
