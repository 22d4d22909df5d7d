"""What vLLM calls in each of its processes where Kedge is installed (entry point `vllm.general_plugins`).

It makes the connector known by its name, so that the flag

    --kv-transfer-config '{"kv_connector": "KedgeConnector", "kv_role": "kv_both"}'

is all that the plug-in needs.
"""

import logging
import re
from contextlib import suppress
from typing import Any

from kedge.errors import EngineClosed

NAME, MODULE = "KedgeConnector", "kedge.integrations.vllm.plugin.connector"
FORCED = "kedge_forced"
"""Key of a request's `extra_args` with the token ids of its answer"""
FIRST_LOGPROBS = "kedge_first_logprobs"
"""Key of the number of an answer's first tokens that have log-probabilities, where it asks for any"""
UTILITY = "kedge"
"""The method of vLLM's engine core by which its clients reach the plug-in"""
COMPARABLE = "raw_logprobs"
"""vLLM's `logprobs_mode` in which nothing that changes what is drawn changes what is compared"""
OLDEST, NEWEST = (0, 31), (0, 33)
"""The minors of vLLM that Kedge is tested with, both inclusive"""


def register() -> None:
    """Make `KedgeConnector` known to vLLM, whose log Kedge writes to; nothing is imported before a server uses it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # vLLM may call this more than once
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    # Kedge's logger gets vLLM's handlers, unless the application has configured it
    own, vllm = logging.getLogger("kedge"), logging.getLogger("vllm")
    if vllm.handlers and not own.handlers and own.level == logging.NOTSET:
        own.handlers, own.propagate = list(vllm.handlers), False
        own.setLevel(vllm.level)


def is_plugged(config: Any) -> bool:
    """Return whether a `VllmConfig` names Kedge's connector, and no other beside it."""
    return config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector == NAME


def version_refusal(version: str) -> str | None:
    """Return the reason why no part of the plug-in runs on a version of vLLM, or None."""
    found = re.match(r"(\d+)\.(\d+)(?!\.dev)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    return f"vLLM {version} is not one of 0.{OLDEST[1]} to 0.{NEWEST[1]}, whose insides this Kedge knows"


def died() -> EngineClosed:
    """Return the error that vLLM's engine core has ended."""
    return EngineClosed("engine", "vllm", "its engine core has died; vLLM's log says why")
