"""What ranks have learned comes back after a restart of vLLM, and only to the engine that it is of."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kedge.engine.common.state.files import MANIFEST, SUFFIX
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import Driver, driver, receipt
from tests.integrations.vllm.test_translation import EXTRA, VALUES, hints, teach, tokens


@contextmanager
def engine(model: Path, state: Path, **more: Any) -> Iterator[Driver]:
    with driver(model, extra={**EXTRA, "state": str(state)}, scheduler_cls=SCHEDULER, **more) as built:
        yield built


def call(built: Driver, value: list[int]) -> tuple[int, list[int]]:
    """Return how many tokens of a call were translated, and its answer."""
    output = built.ask(tokens(value), count=12, kedge=hints(value))
    return receipt(output)["tokens"]["translated"], list(output.outputs[0].token_ids)


def rank_folders(state: Path) -> list[Path]:
    return [state / "replica-0" / f"rank-{rank}" for rank in range(2)]


def test_two_ranks_keep_their_own_parts(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What one of them has lost is translated by none of them, and a part is no other number of ranks'."""
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(tiny_llama, tmp_path, **parallel) as built:
        for value in VALUES[:-1]:
            teach(built, value)
        built.reset()
        before = call(built, VALUES[0])
        assert before[0] == 170
    one, other = (json.loads((folder / MANIFEST).read_bytes()) for folder in rank_folders(tmp_path))
    assert [entry["name"] for entry in one["entries"]] == [entry["name"] for entry in other["entries"]]
    assert one["entries"] != other["entries"], "each has the KV of its own heads"
    with engine(tiny_llama, tmp_path, **parallel) as built:
        assert call(built, VALUES[0]) == before
    for path in rank_folders(tmp_path)[1].glob(f"*{SUFFIX}"):
        path.write_bytes(b"")
    with engine(tiny_llama, tmp_path, **parallel) as built:
        assert call(built, VALUES[0])[0] == 0
    with engine(tiny_llama, tmp_path) as built:
        assert call(built, VALUES[0])[0] == 0 and "the saved state is refused" in caplog.text


def test_a_tenant_keeps_to_its_anchors_after_a_restart_too(tiny_llama: Path, tmp_path: Path) -> None:
    quotas = {"acme": {"anchor_bytes": "192KiB"}, "*": {"anchor_bytes": "384KiB"}}
    for turn in range(2):
        more = {**EXTRA, "state": str(tmp_path), "quotas": quotas}
        with driver(tiny_llama, extra=more, scheduler_cls=SCHEDULER) as built:
            for value in VALUES if turn == 0 else ():
                for salt in ("acme", "acme/part", "else"):
                    built.ask(tokens(value), kedge=hints(value), salt=salt)
            held: dict[str, int] = {}
            for key, pool in built.worker._learner.anchors.pools.items():
                held[key.namespace.tenant] = held.get(key.namespace.tenant, 0) + pool.nbytes
            assert 0 < held["acme"] <= 192 << 10 < held["else"] <= 384 << 10
