"""The flags in `deploy/`, read by the parser of `vllm serve` itself; what vLLM finds; and the guide's example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

from kedge.integrations.vllm import entry_point
from kedge.integrations.vllm.entry_point import NAME, register
from kedge.integrations.vllm.plugin.connector import KedgeConnector
from kedge.integrations.vllm.plugin.settings import SCHEDULER, PluginSettings

DEPLOY = Path(__file__).parents[3] / "deploy"
STACK = yaml.safe_load((DEPLOY / "production-stack.yaml").read_text(encoding="utf-8"))
RECORDER = "#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def started(folder: Path, *given: str, **env: str) -> list[str]:
    """The command line that `vllm_serve.sh` starts vLLM with."""
    vllm = folder / "vllm"
    vllm.write_text(RECORDER)
    vllm.chmod(0o755)
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(DEPLOY / "vllm_serve.sh"), *given]
    done = subprocess.run(command, env={**os.environ, **path, **env}, capture_output=True, check=True, timeout=60)
    return list(json.loads(done.stdout))


def parsed(words: list[str]) -> Any:
    assert words[0] == "serve"
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words[1:])


def check(flags: Any, memory: str) -> None:
    """Check that everything that the flags name is there."""
    config: Any = flags.kv_transfer_config
    given = config if isinstance(config, dict) else vars(config)
    assert (given["kv_connector"], given["kv_role"]) == (entry_point.NAME, "kv_both")
    extra = given["kv_connector_extra_config"]
    assert extra == {"tiers": {"host_memory": memory}}
    assert PluginSettings.model_validate(extra).tiers.host_pool_size(1 << 20) > 0
    assert flags.scheduler_cls == SCHEDULER and callable(resolve_obj_by_qualname(SCHEDULER))
    assert [resolve_obj_by_qualname(one).__name__ for one in flags.middleware] == ["KedgeMiddleware"]


def test_the_image_starts_vllm_with_all_of_the_plug_in(tmp_path: Path) -> None:
    flags = parsed(started(tmp_path, "MODEL", "--max-model-len", "4096", KEDGE_HOST_MEMORY="3GiB"))
    check(flags, "3GiB")
    assert (flags.model_tag, flags.max_model_len) == ("MODEL", 4096)


def test_a_flag_that_is_given_again_replaces_the_images(tmp_path: Path) -> None:
    other = "vllm.v1.core.sched.scheduler.Scheduler"
    assert parsed(started(tmp_path, "MODEL", "--scheduler-cls", other)).scheduler_cls == other


def test_the_values_for_the_production_stack_are_flags_of_vllm() -> None:
    for model in STACK["servingEngineSpec"]["modelSpec"]:
        check(parsed(["serve", model["modelURL"], *model["vllmConfig"]["extraArgs"]]), "16GiB")


def test_the_session_header_is_the_one_that_vllm_reads() -> None:
    import vllm.entrypoints

    key, folder = STACK["routerSpec"]["sessionKey"], Path(vllm.entrypoints.__path__[0])
    files = (file.read_text(encoding="utf-8").lower() for file in folder.rglob("*.py"))
    assert any(f'"{key}"' in text for text in files)


def test_the_connector_is_known_by_its_name_however_often_it_is_registered() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KedgeConnector


@pytest.mark.slow
def test_the_cycle_is_found_from_the_second_turn_on() -> None:
    command = [sys.executable, str(DEPLOY.parent / "examples" / "vllm_cycle.py")]
    found = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    turns = re.findall(r"^turn \d: (\d+) of 2590 prompt tokens found$", found.stdout, re.MULTILINE)
    assert turns[0] == "0" and len(turns) == 3
    assert all(int(tokens) > 1280 for tokens in turns[1:]), "vLLM alone finds none: the cycle does not fit"
