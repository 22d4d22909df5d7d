"""Print what a choice between experts adds to the error of translated prompts, on small random mixtures, and whether
computing the tokens whose choice is close is worth it. Takes some minutes: `python -m scripts.expert_choice`.
"""

from __future__ import annotations

import torch

from tests.engine.local.model.expert_choice import Findings, Study
from tests.engine.local.model.test_architectures import LIKE_LLAMA
from tests.engine.local.model.test_expert_choice import MIXTURES

MODELS = 16
LLAMA = {"num_key_value_heads": 4}


def studies() -> dict[str, Study]:
    """Return what is compared, by what is printed of it."""
    found = {"Llama": Study("Llama", LLAMA)}
    for name in MIXTURES:
        found |= {name: Study(name), f"{name}, experts of dense prefill": Study(name, forced=True)}
    for name in MIXTURES[:3]:
        changes = {key: list(v) if isinstance(v, tuple) else v for key, v in LIKE_LLAMA[name].items()}
        found[f"{name}, without experts"] = Study(name, changes)
        for order in ("thin", "random"):
            found[f"{name}, a quarter computed, {order}"] = Study(name, share=0.25, order=order)
    return found


def line(label: str, found: Findings) -> str:
    """Return a line of figures."""
    flips = (
        f"{sum(found.computed)} of {len(found.computed)} choices, {sum(found.last)} of {len(found.last)} last tokens"
    )
    return f"{label}: {found.mean:.2f} +- {found.deviation:.2f}; other experts: {flips}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for label, study in studies().items():
        print(line(label, study.run(MODELS)), flush=True)
