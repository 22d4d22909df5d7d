"""Which adapter a version of vLLM gets, and what the adapter for the installed one says of it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from kedge.integrations.vllm.plugin import adapters
from kedge.integrations.vllm.plugin.adapters import ADAPTERS, adapter_for, minor_of, missing_attributes, parameters
from kedge.integrations.vllm.plugin.lanes import SCHEDULER_ATTRIBUTES


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.28.0", (0, 28)), ("0.32.1+cpu", (0, 32)), ("0.33.0rc1", (0, 33)), ("1.0", (1, 0)), ("0.100.2", (0, 100))],
)
def test_the_minor_of_a_version(version: str, minor: tuple[int, int]) -> None:
    assert minor_of(version) == minor


def test_each_minor_has_the_last_adapter_that_is_not_newer() -> None:
    assert list(ADAPTERS) == sorted(ADAPTERS, key=lambda one: one.since)
    since = {version: adapter_for(version).since for version in ("0.28.1", "0.29.0", "0.30.2", "0.31.0", "0.33.0")}
    assert since == {"0.28.1": (0, 28), "0.29.0": (0, 28), "0.30.2": (0, 30), "0.31.0": (0, 31), "0.33.0": (0, 31)}
    for newer in ("0.34.0", "0.34.0.dev12+g1234", "7.0", "dev"):
        assert adapter_for(newer) is ADAPTERS[-1]
        assert adapters.untested(newer) and adapters.version_refusal(newer) is None
    assert adapters.untested("0.33.2") is None
    assert adapters.version_refusal("0.27.9") == "vLLM 0.27.9 is too old; must be 0.28 or newer"


def test_the_adapter_is_right_about_the_installed_vllm() -> None:
    found = adapters.installed()
    assert found.binds_manager == hasattr(KVConnectorBase_V1, "bind_kv_cache_manager")
    assert found.watches_reuse == hasattr(BlockPool(1, True, 1), "_reuse_watchers")
    apart = missing_attributes(Scheduler, ["max_num_active_reqs"])
    assert found.admission_limit == ("max_num_running_reqs" if apart else "max_num_active_reqs")
    assert found.skips_apart == (not missing_attributes(Scheduler, ["skipped_waiting"]))
    assert not missing_attributes(Scheduler, SCHEDULER_ATTRIBUTES)


def test_attributes_are_those_of_the_class_and_those_that_init_sets() -> None:
    class One:
        shared = 1

        def __init__(self, other: One | None) -> None:
            self.own = other and other.foreign  # type: ignore[attr-defined]

    assert missing_attributes(One, ["own", "shared", "foreign", "absent"]) == ["absent", "foreign"]
    assert parameters(One.__init__) == ["self", "other"]
