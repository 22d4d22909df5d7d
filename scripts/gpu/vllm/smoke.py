"""Stock vLLM, and the same with Kedge's connector, on random weights and on the bundled model, on one GPU.

    python smoke.py --step ops|stock|exact|translate|server [--size tiny|8b]

ops        every compiled op that a dense Llama needs, against the same in PyTorch: seconds, and the first thing to run
stock      five prompts on stock vLLM, twice: the second time they are found in its prefix cache
exact      the bundled model: the same prompts on stock vLLM and with the connector and a host tier that has to be used;
           prints whether all tokens agree
translate  five agents who read one question and all answers before theirs (random weights of --size): time to the first
           token computed whole, on stock vLLM, and translated by Kedge
server     vLLM's own API server with the connector named by a flag, the bundled model and one request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # flashinfer is not installed
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def ops() -> None:
    """Run every compiled op once and compare it."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    print(
        vllm.__version__,
        torch.__version__,
        current_platform.get_device_name(),
        current_platform.get_device_capability(),
    )
    import vllm._custom_ops as compiled
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    compiled.rms_norm(out, x, weight, 1e-5)
    _same("rms_norm", out, torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-5))
    gate = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, gate)
    _same("silu_and_mul", out, torch.nn.functional.silu(gate[:, :4096].float()) * gate[:, 4096:].float())

    heads, groups, size, block, length = 8, 4, 128, 32, 300
    keys, values = (torch.randn(length, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache = torch.zeros(2, 64, block, heads, size, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(64, device="cuda", dtype=torch.int32)[: -(-length // block)]
    places = torch.arange(length, device="cuda")
    slots = table[places // block].long() * block + places % block
    one = torch.ones((), device="cuda")
    compiled.reshape_and_cache_flash(keys, values, cache[0], cache[1], slots, "auto", one, one)
    _same("reshape_and_cache_flash", cache[0].flatten(0, 1)[slots], keys)
    queries = torch.randn(length, heads * groups, size, device="cuda", dtype=torch.bfloat16)
    given = flash_attn_varlen_func(
        q=queries, k=cache[0], v=cache[1], max_seqlen_q=length, max_seqlen_k=length, causal=True,
        cu_seqlens_q=torch.tensor([0, length], device="cuda", dtype=torch.int32),
        seqused_k=torch.tensor([length], device="cuda", dtype=torch.int32), block_table=table[None], fa_version=3,
    )  # fmt: skip
    wide = [one.transpose(0, 1).float() for one in (queries, keys, values)]
    wide[1:] = [one.repeat_interleave(groups, 0) for one in wide[1:]]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).transpose(0, 1)
    _same("FlashAttention 3", given, expected)


def _same(name: str, given: Any, expected: Any) -> None:
    error = ((given.float() - expected.float()).norm() / expected.float().norm()).item()
    print(f"{name}: {error:.2e}", "ok" if error < 1e-2 else "WRONG", flush=True)
    if not error < 1e-2:
        raise SystemExit(f"{name} is wrong")


def stock(size: str) -> None:
    """Answer five prompts twice in one process."""
    from vllm import LLM, SamplingParams

    from kedge.bench.vllm import machine_arguments, save_random_llama

    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(size, Path(folder))
        began = time.perf_counter()
        room = {"max_model_len": 4096, "num_gpu_blocks_override": 4096}
        llm = LLM(model=folder, skip_tokenizer_init=True, **room, **machine_arguments(Path(folder)))
        print(f"started in {time.perf_counter() - began:.0f} s", flush=True)
        prompts = [
            {"prompt_token_ids": [7 + (31 * i * i + n) % 900 for i in range(40 * n if size == "tiny" else 400 * n)]}
            for n in range(1, 6)
        ]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        answers = [[tuple(one.outputs[0].token_ids) for one in outputs] for outputs in rounds]
        print("found in the prefix cache:", [one.num_cached_tokens for one in rounds[1]])
        print("the same tokens again:", answers[0] == answers[1], answers[0][0][:8], flush=True)


async def exact(size: str) -> None:
    """Serve ten fixed prompts with room for four, with the connector and without; compare the tokens."""
    from kedge.bench.flows import Sizes, single_flow
    from kedge.bench.vllm import QUICK_SIZES, KvRoom, VllmClients, VllmLane, longest_call, plugin
    from kedge.engine.common.model_folder import model_path

    small = Sizes(96, 16, 4) if size == "tiny" else QUICK_SIZES
    work = single_flow(small, 256, 0)
    room = KvRoom(work.room, longest_call(work))
    answers, model = {}, Path(model_path(None))
    for name, settings in (("stock", None), ("kedge", plugin(work, 0.0))):
        with VllmLane(model, room, settings) as lane:
            clients = VllmClients(lane, work)
            await clients.warm()
            trials = [await clients.trial() for _ in range(3)]
            calls = [call for trial in trials for call in trial.calls]
            answers[name] = [call.tokens for call in calls]
            found = sum(call.cached for call in calls) / sum(len(call.prompt) for call in calls)
            seconds = sum(trial.seconds for trial in trials)
            print(f"exact, {name}: {seconds:.2f} s, {found:.0%} of the prompts found", flush=True)
    pairs = list(zip(answers["stock"], answers["kedge"], strict=True))
    print(f"exact: {sum(one == two for one, two in pairs)} of {len(pairs)} answers have the same tokens", flush=True)


async def translate(size: str, quick: bool) -> None:
    """Measure the team of `kedge bench vllm --case team`."""
    from benchmarks.vllm import team
    from kedge.bench.shapes import SHAPES
    from kedge.bench.vllm import save_random_llama

    settings = team.QUICK_TEAM if quick else team.TeamSettings(samples=3, repeats=2)
    if size == "tiny":  # a rehearsal without a GPU
        settings = team.TeamSettings(agents=3, question=96, prefix=64, output=24, samples=2, repeats=1)
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(size, Path(folder))
        found = await team.measure_team(
            settings, Path(folder), SHAPES[size]["vocab_size"], lambda text: print(text, flush=True)
        )
    for agent in found["agents"]:
        print(json.dumps({name: value for name, value in agent.items() if not name.startswith("all_")}), flush=True)


def server() -> None:
    """Start the API server, ask it once, and end it."""
    import subprocess
    import sys
    import urllib.request

    from kedge.bench.vllm import machine_arguments
    from kedge.engine.common.model_folder import model_path

    given, port = machine_arguments(None), 8123
    transfer = json.dumps({"kv_connector": "KedgeConnector", "kv_role": "kv_both"})
    model = str(model_path(None))
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port),
        "--dtype", given["dtype"], "--compilation-config", json.dumps(given["compilation_config"]),
        "--gpu-memory-utilization", str(given["gpu_memory_utilization"]),
        "--max-num-seqs", "16", "--num-gpu-blocks-override", "2048", "--kv-transfer-config", transfer,
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        hints = {"kedge": {"workflow": "w", "run": "r", "agent": "a"}}
        body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "kv_transfer_params": hints}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the server has ended") from None
                time.sleep(1)
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        print("server:", answer["choices"][0]["text"], answer.get("kv_transfer_params"), flush=True)
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", required=True, choices=["ops", "stock", "exact", "translate", "server"])
    parser.add_argument("--size", default="8b")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.step == "ops":
        ops()
    elif args.step == "stock":
        stock(args.size)
    elif args.step == "server":
        server()
    else:
        asyncio.run(exact(args.size) if args.step == "exact" else translate(args.size, args.quick))
    print(f"{args.step}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
