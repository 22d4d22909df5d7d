"""What a watched pass sees is the same whether latents are kept or the keys and values of all heads."""

from __future__ import annotations

import torch

from benchmarks.lab.methods import ReadOnlyStorage, WatchedBatch
from kedge.engine.local.batch import flatten
from kedge.engine.local.scheduler import Work
from kedge.engine.local.sequence import Sequence
from kedge.types import Namespace, RequestId, TenantId
from tests.engine.local.model.test_latent_cache import MANY_HEADS, Twin, both
from tests.engine.local.test_engine import prompt


@torch.inference_mode()
def test_a_watched_pass_over_latents_has_the_attention_of_all_heads() -> None:
    found = []
    for runner in both(MANY_HEADS.name):
        twin = Twin(runner)
        twin.run(list(range(45)))
        sequence = Sequence(RequestId("x"), Namespace(TenantId("")), list(prompt(3, 45)), twin.table)
        batch = flatten([Work(sequence, [*range(20, 25), *range(40, 45)])], twin.storage)
        before = twin.storage.keys.clone(), twin.storage.values.clone()
        batch.storage = ReadOnlyStorage(twin.storage)
        watched = WatchedBatch.of(batch)
        runner.run(watched)
        assert torch.equal(before[0], twin.storage.keys)
        assert torch.equal(before[1], twin.storage.values)
        assert watched.distances(torch.arange(10)).max() < 1e-5
        found.append(watched.attention(torch.arange(5, 10)))
    assert found[0].shape == (45,)
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-3)
