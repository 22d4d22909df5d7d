"""Which versions of vLLM are known, and whether the installed one has what is read of it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

from kedge.integrations.vllm.plugin import adapters
from kedge.integrations.vllm.plugin.adapters import minor_of, missing_attributes, parameters
from kedge.integrations.vllm.plugin.lanes import SCHEDULER_ATTRIBUTES


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.28.0", (0, 28)), ("0.32.1+cpu", (0, 32)), ("0.33.0rc1", (0, 33)), ("1.0", (1, 0)), ("0.100.2", (0, 100))],
)
def test_the_minor_of_a_version(version: str, minor: tuple[int, int]) -> None:
    assert minor_of(version) == minor


def test_a_version_is_too_old_known_or_untested() -> None:
    for newer in ("0.34.0", "0.34.0.dev12+g1234", "7.0", "dev"):
        assert adapters.untested(newer) and adapters.version_refusal(newer) is None
    assert adapters.untested("0.33.2") is adapters.version_refusal("0.31.0") is None
    assert adapters.version_refusal("0.30.9") == "vLLM 0.30.9 is too old; must be 0.31 or newer"


def test_the_installed_vllm_has_what_is_read_of_it() -> None:
    assert hasattr(KVConnectorBase_V1, "bind_kv_cache_manager") and hasattr(BlockPool(1, True, 1), "_reuse_watchers")
    assert not missing_attributes(Scheduler, SCHEDULER_ATTRIBUTES)


def test_attributes_are_those_of_the_class_and_those_that_init_sets() -> None:
    class One:
        shared = 1

        def __init__(self, other: One | None) -> None:
            self.own = other and other.foreign  # type: ignore[attr-defined]

    assert missing_attributes(One, ["own", "shared", "foreign", "absent"]) == ["absent", "foreign"]
    assert parameters(One.__init__) == ["self", "other"]
