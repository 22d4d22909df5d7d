"""A server under load, measured from outside: errors, throughput against the engine's own, and memory.

    python scripts/soak.py --engine echo --minutes 5
    python scripts/soak.py --engine nano --minutes 1 --json soak.json
    python scripts/soak.py --engine nano --minutes 0.6 --rounds 5 --no-engine-process

The load comes from `locust` (`pip install locust`) and `scripts/locustfile.py`, in a process of its own. The engine's
own throughput is what as many threads get from `Engine.submit` without a server, for prompts as long, in a process of
its own as well; rounds measure both, one after the other. Nothing is left out of the clock: the load generator and the
start of its clients run on the same cores. Memory is the resident set of the server's process and of the engine's,
read every second; processor time is given per token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
TOKENS = 32
NANO_KV = "96MiB"
STEP = 0.02
"""Seconds of a step of the echo engine: with 64 clients it gives 3,200 tokens a second."""


def make_engine(name: str) -> Any:
    """Return the echo engine, or the bundled model on one thread."""
    if name == "echo":
        from kedge.engine.echo import EchoEngine

        engine = EchoEngine(delay_s=STEP)
        engine.requests = deque(maxlen=0)  # else it remembers every request, which would be all that is measured
        return engine
    import torch

    from kedge.engine.local.engine import LocalEngine
    from kedge.settings import EngineSettings

    torch.set_num_threads(1)
    # Pages of the KV pool count as memory once they are written to: a small one is soon full.
    return LocalEngine(config=EngineSettings(max_running=64, kv_memory=NANO_KV))


def open_engine(name: str, *, apart: bool) -> Any:
    """Return the engine, in a process of its own where it is to be apart."""
    if not apart:
        return make_engine(name)
    from kedge.engine.process.engine import ProcessEngine
    from kedge.engine.process.local import LocalProcessEngine

    kind = ProcessEngine if name == "echo" else LocalProcessEngine
    return kind(partial(import_module(Path(__file__).stem).make_engine, name))


def serve(name: str, port: int, apart: bool) -> None:
    """Run a server in this process until it is stopped."""
    from kedge.server.app import GracefulServer, create_app

    with open_engine(name, apart=apart) as engine:
        GracefulServer(create_app(engine), port=port, access_log=False, log_level="warning").run()


def alone(name: str, clients: int, seconds: float, answer: Any) -> None:
    """Measure the engine without a server, and put tokens a second and processor time into the queue `answer`."""
    from kedge.server.openai import prompts
    from kedge.server.openai.protocol import ChatMessage
    from kedge.types import GenerateRequest, ReuseMode, SamplingParams

    counts = [0] * clients
    with make_engine(name) as engine:
        began, started = time.monotonic(), cpu_seconds(os.getpid())

        def client(at: int) -> None:
            number = 0
            while time.monotonic() - began < seconds:
                messages = [
                    ChatMessage(role="system", content="You are a patient assistant who answers in a few words. " * 4),
                    ChatMessage(role="user", content=f"Say {at * 10**6 + number}."),
                ]
                segments = tuple(prompts.of_conversation(engine.tokenizer, messages))
                sampling = SamplingParams(TOKENS, temperature=1.0, ignore_eos=True)
                for delta in engine.submit(GenerateRequest(segments, sampling, ReuseMode.EXACT)):
                    counts[at] += len(delta.tokens)
                number += 1

        threads = [threading.Thread(target=client, args=(at,)) for at in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        per_token = (cpu_seconds(os.getpid()) - started) / sum(counts)
        answer.put({"tokens_per_second": sum(counts) / (time.monotonic() - began), "cpu_ms_per_token": per_token * 1e3})


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in started for one in family(int(child)))]


def resident(pid: int) -> float:
    """Return the memory of a process and all that it has started, in MiB."""
    pages = sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Return the time for which a process has had a core, by itself and for the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(name: str, port: int, apart: bool = True) -> Any:
    """Run a server in a process of its own."""
    import httpx

    process = get_context("spawn").Process(target=serve, args=(name, port, apart))
    process.start()
    try:
        for _ in range(1200):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.join(30)


def load(port: int, clients: int, minutes: float) -> subprocess.Popen[str]:
    """Start locust's clients."""
    command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless", "--json"]
    command += ["--users", str(clients), "--spawn-rate", str(clients), "--run-time", f"{round(minutes * 60)}s"]
    command += ["--host", f"http://127.0.0.1:{port}", "--loglevel", "ERROR", "--stop-timeout", "30"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KEDGE_LOAD_TOKENS": str(TOKENS)}
    )


def measured(name: str, port: int, clients: int, minutes: float, apart: bool) -> dict[str, Any]:
    """Return locust's figures, tokens a second, memory once a second, and the processor time of each process."""
    import httpx

    with server(name, port, apart) as process:
        began, memory, pids = time.monotonic(), [], family(process.pid)
        started = {pid: cpu_seconds(pid) for pid in pids}
        clients_process = load(port, clients, minutes)
        while clients_process.poll() is None:
            memory.append(resident(process.pid))
            clients_cpu = cpu_seconds(clients_process.pid)
            time.sleep(1)
        needed = [cpu_seconds(pid) - started[pid] for pid in pids] + [clients_cpu]
        took = min(time.monotonic() - began, minutes * 60)
        output = clients_process.stdout.read() if clients_process.stdout else ""
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("kedge:generation_tokens_total")]
    generated = sum(float(line.split()[-1]) for line in counted)
    seen = {one["name"]: one for one in json.loads(output)}
    whole, first = seen["/v1/chat/completions"], seen["first token"]
    return {
        "streams": whole["num_requests"],
        "errors": whole["num_failures"],
        "tokens_per_second": generated / took,
        "mean_first_token_ms": first["total_response_time"] / max(1, first["num_requests"]),
        "memory_mib": spread(memory),
        "cpu_ms_per_token": dict(zip(names(apart), (one / generated * 1e3 for one in needed), strict=True)),
    }


def names(apart: bool) -> list[str]:
    """Return the names of the processes that are measured."""
    return ["server", "engine", "clients"] if apart else ["server", "clients"]


def spread(memory: list[float]) -> dict[str, float]:
    """Return the memory after a tenth of the time, in the middle, and at the end: means of a tenth each."""
    tenth = max(1, len(memory) // 10)
    begins = {"after_a_tenth": tenth, "middle": len(memory) // 2, "end": len(memory) - tenth}
    return {name: sum(memory[at : at + tenth]) / tenth for name, at in begins.items()} | {"most": max(memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description="A server under load: errors, throughput, memory.")
    parser.add_argument("--engine", choices=["echo", "nano"], default="echo")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--port", type=int, default=8713)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engine-process", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if find_spec("locust") is None:
        parser.error("the load comes from locust: pip install locust")
    rounds = [one_round(given) for _ in range(given.rounds)]
    shares = [one["share_of_engine"] for one in rounds]
    result = rounds[0] if given.rounds == 1 else {"share_of_engine": median(shares), "rounds": rounds}
    result |= {"engine": given.engine, "clients": given.clients, "minutes": given.minutes}
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def one_round(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the engine by itself, then the server."""
    context = get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=alone, args=(given.engine, given.clients, min(30.0, given.minutes * 60), answer))
    process.start()
    own = answer.get()
    process.join()
    served = measured(given.engine, given.port, given.clients, given.minutes, given.engine_process)
    return served | {
        "engine_tokens_per_second": own["tokens_per_second"],
        "engine_cpu_ms_per_token": own["cpu_ms_per_token"],
        "share_of_engine": served["tokens_per_second"] / own["tokens_per_second"],
    }


if __name__ == "__main__":
    main()
