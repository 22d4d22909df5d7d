"""Trains the bundled model on the three miniature tasks and records the run beside the weights.

    python scripts/train_nano.py --minutes 60 --out src/kedge/models/nano

A sample is one agent's whole prompt with its answer. The loss is on that answer and on the answers of the other
agents inside the prompt (those that were not corrupted): they are the same skill, met once more for free.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kedge.workloads.miniature import TASKS, agent_prompt
from kedge.workloads.miniature.base import Question, Role, Task

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL = [BOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100
SHARES = {"math": 0.27, "choice": 0.4, "code": 0.33}
"""Share of the samples by task: the two-step look-up of the second one takes the longest to learn."""
Segment = tuple[str, bool]
"""A piece of text, tokenized by itself, and whether it is learned."""


def sample(rng: random.Random, streams: dict[str, Iterator[Question]], *, look_up: bool = False) -> list[Segment]:
    """One prompt with its answer; with `look_up` an agent of the second task that hears nobody."""
    task = TASKS["choice" if look_up else rng.choices(list(SHARES), list(SHARES.values()))[0]]
    question = next(streams[task.name])
    role, heard = (rng.choice(task.roles[:-1]), []) if look_up else _cast(rng, task)
    filled: dict[str, Segment] = {"user_question": (question.text, False)}
    for other in heard:
        answer = other.reference(question)
        wrong = task.corrupt(rng, answer) if rng.random() < 0.08 else answer
        filled[f"agent_{other.id}_current"] = (wrong, wrong == answer)
        if other.tool_reference:
            odd = rng.choice([str(rng.randint(0, 30)), "failed", "SyntaxError"])
            result = other.tool_reference(question) if wrong == answer else odd
            filled[f"condition_{other.id}_current"] = (result, False)
    chat = f"{BOS}<|system|>{role.system}{END}<|user|>{agent_prompt(role, heard)}{END}<|assistant|>"
    pieces = re.split(r"\{(\w+)\}", chat)
    segments = [filled[piece] if i % 2 else (piece, False) for i, piece in enumerate(pieces)]
    return [*segments, (role.reference(question), True), (END, True)]


def _cast(rng: random.Random, task: Task) -> tuple[Role, list[Role]]:
    """A speaker and whom it hears: mostly the fully connected order, sometimes any subset."""
    if rng.random() < 0.75:
        turn = rng.randrange(len(task.roles))
        return task.roles[turn], list(task.roles[:turn])
    heard = [role for role in task.roles[:-1] if rng.random() < 0.5]
    return rng.choice([role for role in task.roles if role not in heard]), heard


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1152, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=5)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=BOS, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model(vocab: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Takes the layers of another checkpoint of this shape, and its embedding of every token both vocabularies have."""
    old = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, theirs = tokenizer.get_vocab(), PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    shared = [(ours[token], theirs[token]) for token in ours if token in theirs]
    table = model.get_input_embeddings().weight.data
    rows, columns = (torch.tensor(ids) for ids in zip(*shared, strict=True))
    table[rows] = old.get_input_embeddings().weight.data[columns].to(table)
    layers = {key: value for key, value in old.state_dict().items() if "embed" not in key and "lm_head" not in key}
    model.load_state_dict(layers, strict=False)
    print(f"warm start: {len(layers)} tensors, {len(shared)} of {len(ours)} embeddings", flush=True)


class Batches:
    """Batches of samples of like length, tokenized segment by segment (prefix segments from a cache)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random, seed: int, size: int) -> None:
        self._encode, self._cache = tokenizer.backend_tokenizer.encode, {}
        self._rng, self._size = rng, size
        self._streams = {name: task.questions("train", seed) for name, task in TASKS.items()}
        self._ready: list[list[tuple[list[int], list[int]]]] = []
        self.look_up = False

    def _ids(self, text: str) -> list[int]:
        if text not in self._cache:
            if len(self._cache) > 20_000:
                self._cache.clear()
            self._cache[text] = self._encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        labels: list[int] = []
        for text, learned in sample(self._rng, self._streams, look_up=self.look_up):
            ids = self._ids(text)
            tokens += ids
            labels += ids if learned else [IGNORED] * len(ids)
        return tokens, labels

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._ready:
            rows = sorted((self._row() for _ in range(8 * self._size)), key=lambda row: len(row[0]))
            self._ready = [rows[i : i + self._size] for i in range(0, len(rows), self._size)]
            self._rng.shuffle(self._ready)
        rows = self._ready.pop()
        width = max(len(tokens) for tokens, _ in rows)
        x = torch.full((len(rows), width), 2)
        y = torch.full((len(rows), width), IGNORED)
        for i, (tokens, labels) in enumerate(rows):
            x[i, : len(tokens)] = torch.tensor(tokens)
            y[i, : len(labels)] = torch.tensor(labels)
        return x, y


def learning_rate(done: float, peak: float, step: int) -> float:
    """Warm-up over 100 steps, then a cosine over the run's time down to 3 %."""
    return peak * min(1.0, (step + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    streams = {name: task.questions("train", args.seed + 1) for name, task in TASKS.items()}
    texts = [text for _ in range(6000) for text, _ in sample(rng, streams)]
    texts += [spelled for n in range(100) for spelled in (str(n), f" {n}") for _ in range(200)]  # one token a number
    tokenizer = build_tokenizer(texts)
    model = build_model(len(tokenizer)).to(args.device)
    if args.warm_start:
        warm_start(model, tokenizer, args.warm_start)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    batches = Batches(tokenizer, rng, args.seed, args.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    curve: list[dict[str, float]] = []
    start, step, tokens = time.monotonic(), 0, 0
    while (done := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, args.lr, step)
        batches.look_up = done * args.minutes < args.look_up_minutes
        x, y = (t.to(args.device) for t in next(batches))
        mask = y[:, 1:] != IGNORED
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            hidden = model.model(input_ids=x).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][mask]).float()
        loss = torch.nn.functional.cross_entropy(logits, y[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + x.numel()
        if step % 50 == 0:
            accuracy = (logits.argmax(-1) == y[:, 1:][mask]).float().mean().item()
            minutes = (time.monotonic() - start) / 60
            curve.append({"step": step, "minutes": round(minutes, 2), "tokens": tokens,
                          "loss": round(loss.item(), 5), "token_accuracy": round(accuracy, 5)})  # fmt: skip
            print(f"{minutes:6.1f} min  step {step}  loss {loss.item():.4f}  accuracy {accuracy:.4f}  "
                  f"{tokens / 60 / minutes:,.0f} tokens/s", flush=True)  # fmt: skip
        if step % 300 == 0:
            save(model, args.out)
    save(model, args.out)
    record = {
        "script": "scripts/train_nano.py",
        "seed": args.seed,
        "steps": step,
        "tokens": tokens,
        "batch": args.batch,
        "peak_lr": args.lr,
        "minutes": args.minutes,
        "look_up_minutes": args.look_up_minutes,
        "warm_start": args.warm_start and args.warm_start.name,
        "precision": args.precision,
        "device": args.device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
        "loss_curve": curve,
    }
    if args.warm_start and (before := args.warm_start / "training.json").is_file():
        record["before"] = json.loads(before.read_text())
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Writes a bf16 copy; the model in training stays fp32."""
    state = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("src/kedge/models/nano"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        default="bf16" if torch.cuda.is_available() else "fp32",
        help="bf16 is faster on a GPU and on a CPU with AVX512-bf16, far slower elsewhere",
    )
    parser.add_argument(
        "--look-up-minutes",
        type=float,
        default=0,
        help="begin with the second task alone: among the others its look-up is learned late or never",
    )
    parser.add_argument("--warm-start", type=Path, help="take the layers of the checkpoint in this folder")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
