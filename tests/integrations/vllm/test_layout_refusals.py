"""vLLM with an op whose layout cannot be found: what needs the layout is off, and answers are stock's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import BLOCK, SMALL, Driver, driver, receipt
from tests.integrations.vllm.test_translation import VALUES, hints, tokens

Write = Callable[..., None]


def raising(_: Write, *__: Any) -> None:
    raise RuntimeError("no such kernel")


def into_one_place(write: Write, impl: Any, layer: Any, keys: Any, values: Any, pages: Any, slots: Any) -> None:
    """Two tokens each."""
    write(impl, layer, keys, values, pages, slots - slots % 2)


def into_another_block(write: Write, impl: Any, layer: Any, keys: Any, values: Any, pages: Any, slots: Any) -> None:
    write(impl, layer, keys, values, pages, (slots + BLOCK) % (len(pages) * BLOCK))


@pytest.fixture(scope="module")
def stock(tiny_llama: Path) -> list[list[int]]:
    with driver(tiny_llama, plugged=False) as plain:
        return [*plain.cycle(), plain.answer(tokens(VALUES[0]), count=12)]


def probed_with(model: Path, fault: Callable[..., None]) -> Any:
    """An engine in which the op has a fault while vLLM registers its pages."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write = CPUAttentionBackendImpl.do_kv_cache_update
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", lambda *given: fault(write, *given))
        extra = {"tiers": {"host_memory": "40 blocks"}}
        starting = driver(model, extra=extra, scheduler_cls=SCHEDULER, **SMALL)
        built = starting.__enter__()
    return starting, built


@pytest.mark.parametrize(
    ("fault", "reason", "has_host"),
    [
        (raising, "failed: RuntimeError('no such kernel')", False),
        (into_another_block, "not in one block", False),
        (into_one_place, "does not keep keys and values as given", True),
    ],
)
def test_what_needs_the_layout_is_off_and_answers_are_stocks(
    tiny_llama: Path, stock: list[list[int]], fault: Callable[..., None], reason: str, has_host: bool
) -> None:
    starting, built = probed_with(tiny_llama, fault)
    try:
        check(built, stock, reason, has_host)
    finally:
        starting.__exit__(None, None, None)


def check(built: Driver, stock: list[list[int]], reason: str, has_host: bool) -> None:
    assert built.cycle() == stock[:-1]
    output = built.ask(tokens(VALUES[0]), count=12, kedge=hints(VALUES[0]))
    assert list(output.outputs[0].token_ids) == stock[-1]
    assert any(reason in miss["reason"] for miss in receipt(output)["misses"])
    totals = built.side.totals()
    assert bool(totals.get("blocks_loaded")) is has_host and bool(totals.get("failed_copies")) is not has_host
    built.side.queue.check_integrity()
    assert built.pool.get_num_free_blocks() == built.pool.num_gpu_blocks - 1
