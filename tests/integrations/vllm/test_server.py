"""The plug-in under vLLM's own server, by its flag and with the middleware, on two tensor- or data-parallel ranks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import kedge.models.nano
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import BLOCK, driver, prompt, turn_of

MODEL = kedge.models.nano.__path__[0]
HOST = {"tiers": {"host_memory": "100 blocks"}}
FIXED = 8 * BLOCK


class Server:
    """vLLM's OpenAI server in a process of its own."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def get(self, path: str) -> str:
        return self.http.get(path).raise_for_status().text

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return self.http.post(path, json=body, headers=headers).raise_for_status().json()

    def complete(
        self, prompt: list[int], kedge: dict[str, Any], count: int = 4, rank: int | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """A greedy answer, by the data-parallel rank if there are several, and its receipt."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "kv_transfer_params": {"kedge": kedge},
        }  # fmt: skip
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        data = self.post("/v1/completions", body, headers)
        return data["choices"][0]["token_ids"], data["kv_transfer_params"]["kedge"]

    def wait(self, process: subprocess.Popen[bytes], seconds: float = 480.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert process.poll() is None, "the server has ended"
            try:
                self.get("/health")
            except httpx.HTTPError:
                time.sleep(1)
            else:
                return
        raise AssertionError("the server did not start")


@contextmanager
def serving(*more: str, extra: dict[str, Any] | None = HOST) -> Iterator[Server]:
    """vLLM's server with these arguments, and the plug-in with these settings; as it is where they are None."""
    connector: dict[str, Any] = {"kv_connector": "KedgeConnector", "kv_role": "kv_both"}
    if extra:
        connector["kv_connector_extra_config"] = extra
    plugged = (
        *("--kv-transfer-config", json.dumps(connector), "--scheduler-cls", SCHEDULER),
        *("--middleware", "kedge.integrations.vllm.middleware.KedgeMiddleware"),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--dtype", "float32"),
        *("--max-model-len", "1024", "--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", "48"),
        *("--host", "127.0.0.1", "--port", str(port), "--gpu-memory-utilization", "0.3"),
        *(plugged if extra is not None else ()),
        *more,
    ]
    paths = os.pathsep.join([str(Path(kedge.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        built = Server(port)
        built.wait(process)
        yield built
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a server to end, and ends its engines too if it has not in a minute."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def cycle(agent: int) -> list[int]:
    return prompt(FIXED, agent) + prompt(40, 99)


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    """Answers to six agents of vLLM without the plug-in."""
    with driver(Path(MODEL), plugged=False) as plain:
        return [plain.answer(cycle(agent)) for agent in range(6)]


@pytest.fixture(scope="module")
def server(stock: object) -> Iterator[Server]:  # noqa: ARG001 - one engine at a time: stock goes first
    with serving("-tp", "2") as built:
        yield built


def test_a_cycle_hits_on_all_ranks(server: Server, stock: list[list[int]]) -> None:
    for turn in range(3):
        for agent in range(6):
            answer, found = server.complete(cycle(agent), turn_of(agent, FIXED))
            assert answer == stock[agent]
            computed = found["tokens"]["computed"]
            assert computed <= 40 if turn else computed == FIXED + 40, "the whole prompt may be kept as a session's"
    assert 'vllm:kedge_prefetches_completed_total{engine="0"' in server.get("/metrics")


CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", CALLS)
def test_the_middleware_passes_headers_of_clients_on(server: Server, path: str) -> None:
    body = {"model": MODEL, **CALLS[path]}
    assert not server.post(path, body).get("kv_transfer_params")
    found = server.post(path, body, {"x-claude-code-session-id": "s"})
    assert found["kv_transfer_params"]["kedge"]["tokens"]


# two data-parallel ranks: each has a scheduler, a cache and a host tier of its own -----------------------------------


@pytest.fixture(scope="module")
def two_ranks(stock: object) -> Iterator[Server]:  # noqa: ARG001 - one engine at a time: stock goes first
    with ExitStack() as stack:
        try:
            built = stack.enter_context(serving("-dp", "2"))
        except AssertionError:
            with pytest.raises(AssertionError), serving("-dp", "2", extra=None):
                """vLLM itself does not start either."""
            pytest.skip("vLLM does not start two ranks here: 0.33's CPU worker wants a memory node for each")
        yield built


@pytest.mark.slow
def test_ranks_do_not_share_kv(two_ranks: Server, stock: list[list[int]]) -> None:
    """A run that stays on its rank finds everything again; one that changes ranks computes it once more."""
    for turn in range(2):
        for rank in range(2):
            for agent in range(6):
                answer, found = two_ranks.complete(cycle(agent), turn_of(agent, FIXED), rank=rank)
                assert answer == stock[agent]
                assert found["tokens"]["computed"] == (40 if turn else FIXED + 40), (turn, rank, agent)
