"""One flag: where Kedge is installed, vLLM knows its connector by name."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kedge.integrations.vllm.entry_point import NAME, register
from kedge.integrations.vllm.plugin.connector import KedgeConnector


def test_vllm_finds_the_entry_point() -> None:
    found = entry_points(group="vllm.general_plugins")
    assert [one.load() for one in found if one.name == "kedge"] == [register]


def test_the_connector_is_known_by_its_name_however_often_it_is_registered() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KedgeConnector
