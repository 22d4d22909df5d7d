"""lm-eval's `local-completions` against the bundled model: the numbers that Transformers gives. No download."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kedge.engine.common.model_folder import model_path
from kedge.engine.local.engine import LocalEngine
from kedge.settings import EngineSettings
from tests.server.conftest import Served, serving

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

QUESTIONS = [
    {"context": "Tom has 3 apples and buys 5 more. He has", "choices": [" 8", " 9 apples now", " no idea"], "gold": 0},
    {"context": "Mia has 12 pears and loses 4.\nShe has", "choices": [" eight", " 8 pears", " \u00fc"], "gold": 1},
    {"context": "A", "choices": ["defdef", " b", " c d e f g"], "gold": 2},
]
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{context}}",
}
CHOICES = {
    **TASK,
    "task": "choices",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
ANSWERS = {
    **TASK,
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
FOLDER = model_path(None)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with LocalEngine(config=EngineSettings(device="cpu")) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="module")
def oracle() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


def evaluate(served: Served, folder: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of a run of `task` over the questions, in their order."""
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    place = {"dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}}
    (folder / "task.yaml").write_text(json.dumps({**task, **place}))
    arguments = {
        "base_url": f"{served.url}/v1/completions", "model": "kedge-nano", "tokenizer": str(FOLDER),
        "tokenizer_backend": "huggingface", "num_concurrent": 1, "max_retries": 1, "batch_size": 2,
    }  # fmt: skip
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task["task"]],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples: list[dict[str, Any]] = results["samples"][task["task"]]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def score(oracle: tuple[PreTrainedModel, PreTrainedTokenizerBase], context: str, choice: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is the greedy one."""
    model, tokenizer = oracle
    tokens = tokenizer.encode(context + choice, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)[start - 1 : -1]
    said = torch.tensor(tokens[start:], dtype=torch.int64)
    return rows.gather(1, said[:, None]).sum().item(), bool((rows.argmax(-1) == said).all())


def test_log_likelihoods_are_those_of_transformers(served: Served, tmp_path: Path, oracle: Any) -> None:
    samples = evaluate(served, tmp_path, CHOICES)
    assert len(samples) == len(QUESTIONS)
    greedies = set()
    for sample, question in zip(samples, QUESTIONS, strict=True):
        told = [response[0] for response in sample["resps"]]
        for (logprob, is_greedy), choice in zip(told, question["choices"], strict=True):
            expected, greedy = score(oracle, question["context"], choice)
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(greedy)
            greedies.add(greedy)
    assert greedies == {True, False}, "both kinds were asked for"


def test_generation_until_a_stop_string(served: Served, tmp_path: Path, oracle: Any) -> None:
    model, tokenizer = oracle
    samples = evaluate(served, tmp_path, ANSWERS)
    for sample, question in zip(samples, QUESTIONS, strict=True):
        ids = torch.tensor([tokenizer.encode(question["context"], add_special_tokens=False)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == text.partition(".")[0]
