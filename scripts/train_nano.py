"""Train the bundled model on the miniature tasks and record the run beside the weights.

    python scripts/train_nano.py --minutes 60 --out src/kedge/models/nano
    python scripts/train_nano.py --size small --minutes 60 --stop-after 500 --resume --out small   # again and again

A sample is one agent's whole prompt with its answer. The loss is on that answer and on the answers of the other
agents inside the prompt (those that were not corrupted): they are the same skill, met once more for free.

What `--resume` goes on from is the folder of the model itself. AdamW's memory is as short as the new warm-up here (20
steps of its second moments, 100 of warm-up), and weights in bf16 are what is kept in the end: nothing else is stored.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kedge.workloads.base import Question
from kedge.workloads.miniature import TASKS
from kedge.workloads.miniature.base import Role, Task

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL = [BOS, END, PAD, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IGNORED = -100
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
    "nano": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
    "small": {"hidden_size": 320, "intermediate_size": 880, "num_hidden_layers": 6, "num_attention_heads": 10},
    "medium": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 16},
}  # fmt: skip
"""Shapes to train: for tests, the bundled one (4.7 million parameters), and larger ones (7.3 and 25.6 million)"""
RECORD = "training.json"
Point = dict[str, float]
Segment = tuple[str, bool]
"""A piece of text, tokenized by itself, and whether it is learned."""


def sample(
    rng: random.Random, streams: dict[str, Iterator[Question]], shares: dict[str, float], alone: float
) -> list[Segment]:  # fmt: skip
    """Return one prompt with its answer, of a task drawn by its share."""
    task = TASKS[rng.choices(list(shares), list(shares.values()))[0]]
    question = next(streams[task.name])
    role, heard = _cast(rng, task, alone)
    read = {"user_question": question.text}
    real = {}
    for other in heard:
        answer = other.reference(question)
        wrong = task.corrupt(rng, answer) if rng.random() < 0.08 else answer
        real[f"agent_{other.id}_current"] = wrong == answer
        read[f"agent_{other.id}_current"] = wrong
        if other.tool_reference:
            odd = rng.choice([str(rng.randint(0, 30)), "failed", "SyntaxError"])
            read[f"condition_{other.id}_current"] = other.tool_reference(question) if wrong == answer else odd
    pieces = re.split(r"\{(\w+)\}", _chat(task, role, heard))
    segments = [(read[piece], real.get(piece, False)) if i % 2 else (piece, False) for i, piece in enumerate(pieces)]
    return [*segments, (role.reference(question), True), (END, True)]


def _chat(task: Task, role: Role, heard: list[Role]) -> str:
    """Return the text of a prompt with placeholders in it."""
    return f"{BOS}<|system|>{role.system}{END}<|user|>{task.prompt(role, heard)}{END}<|assistant|>"


def _cast(rng: random.Random, task: Task, alone: float) -> tuple[Role, list[Role]]:
    """Return a speaker and the agents that it hears: those of the fully connected order, any subset, or none.

    A model that can copy from others learns a skill late or never, so many speakers hear no one.
    """
    if rng.random() < alone:
        return rng.choice(task.roles[:-1]), []
    if rng.random() < 0.65:
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


def build_model(vocab: int, size: str) -> LlamaForCausalLM:
    """Return a model of one of `SIZES` with random weights; two heads share their keys and values."""
    shape = SIZES[size]
    config = LlamaConfig(
        **shape, vocab_size=vocab, num_key_value_heads=shape["num_attention_heads"] // 2, head_dim=32,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def attention(_module, query, key, value, _mask, scaling=None, **_):
    """Compute causal attention of right-padded rows, in fp32 on a CPU: its bf16 backward pass is slower than the fp32
    one.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast(query.device.type, enabled=False):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class Batches:
    """Batches of samples of like length, tokenized segment by segment (prefix segments from a cache)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, rng: random.Random, args: argparse.Namespace, seed: int
    ) -> None:
        """Start empty; `seed` is that of the questions."""
        self._encode, self._cache = tokenizer.backend_tokenizer.encode, {}
        self._rng, self._size = rng, args.batch
        streams = {name: task.questions("train", seed) for name, task in TASKS.items()}
        self._sample = partial(sample, rng, streams, args.shares, args.alone)
        self._ready: list[list[tuple[list[int], list[int]]]] = []

    def _ids(self, text: str) -> list[int]:
        if text not in self._cache:
            if len(self._cache) > 20_000:
                self._cache.clear()
            self._cache[text] = self._encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _row(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        labels: list[int] = []
        for text, learned in self._sample():
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
    """Return the learning rate: warm-up over 100 steps, then a cosine over the run's time down to 3 %."""
    return peak * min(1.0, (step + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass
class Progress:
    """The progress of a training, over all of its parts."""

    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    curve: list[Point] = field(default_factory=list)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Progress:
        """Return the progress of the training in `--out`, where `--resume` goes on with it. Raises `SystemExit`."""
        file = args.out / RECORD
        if not (args.resume and file.is_file()):
            return cls()
        record = json.loads(file.read_text())
        if record.get("size") != args.size:
            raise SystemExit(f"--resume: {file} is of size {record.get('size')}, not {args.size}")
        return cls(record["steps"], record["tokens"], record["trained_minutes"], record["loss_curve"])


def start(
    args: argparse.Namespace, rng: random.Random, resumed: bool
) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """Return tokenizer and model of the checkpoint to continue, or new ones."""
    if checkpoint := args.out if resumed else args.warm_start:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer) if args.tokenizer else learned(args, rng)
        model = build_model(len(tokenizer), args.size)
    ALL_ATTENTION_FUNCTIONS.register("training", attention)
    model.config._attn_implementation = "training"
    return tokenizer, model.to(args.device)


def learned(args: argparse.Namespace, rng: random.Random) -> PreTrainedTokenizerFast:
    """Return a tokenizer learned from samples of the tasks."""
    streams = {name: task.questions("train", args.seed + 1) for name, task in TASKS.items()}
    texts = [text for _ in range(6000) for text, _ in sample(rng, streams, args.shares, args.alone)]
    texts += [spelled for n in range(100) for spelled in (str(n), f" {n}") for _ in range(200)]  # a number, a token
    return build_tokenizer(texts)


def train(args: argparse.Namespace) -> None:
    """Train until all minutes are spent, or this part's seconds."""
    progress = Progress.of(args)
    if progress.minutes >= args.minutes:
        print(f"all {args.minutes:g} minutes are spent")
        return
    torch.manual_seed(args.seed)
    # Another part of a training is to meet other questions.
    rng = random.Random(args.seed + progress.steps)
    tokenizer, model = start(args, rng, resumed=progress.steps > 0)
    body = torch.compile(model.model, dynamic=True) if args.compile else model.model
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    batches = Batches(tokenizer, rng, args, args.seed + progress.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    begun, before, first = time.monotonic(), progress.minutes, progress.steps
    last = min(args.minutes, before + args.stop_after / 60)
    while progress.minutes < last:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress.minutes / args.minutes, args.lr, progress.steps - first)
        x, y = (t.to(args.device) for t in next(batches))
        mask = y[:, 1:] != IGNORED
        with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
            hidden = body(input_ids=x, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[:, :-1][mask]).float()
        loss = torch.nn.functional.cross_entropy(logits, y[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.steps, progress.tokens = progress.steps + 1, progress.tokens + x.numel()
        progress.minutes = before + (time.monotonic() - begun) / 60
        if progress.steps % 50 == 0:
            note(progress, loss.item(), (logits.argmax(-1) == y[:, 1:][mask]).float().mean().item())
        if progress.steps % 300 == 0:
            save(model, args, progress)
    save(model, args, progress)


def note(progress: Progress, loss: float, accuracy: float) -> None:
    """Add a point to the curve, and print it."""
    minutes, tokens = progress.minutes, progress.tokens
    progress.curve.append({"step": progress.steps, "minutes": round(minutes, 2), "tokens": tokens,
                           "loss": round(loss, 5), "token_accuracy": round(accuracy, 5)})  # fmt: skip
    print(f"{minutes:6.1f} min  step {progress.steps}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
          f"{tokens / 60 / minutes:,.0f} tokens/s", flush=True)  # fmt: skip


def save(model: LlamaForCausalLM, args: argparse.Namespace, progress: Progress) -> None:
    """Write a bf16 copy (the model in training stays fp32) and the record of the run so far."""
    state = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.save_pretrained(args.out)
    record = {
        "script": "scripts/train_nano.py",
        "size": args.size,
        "seed": args.seed,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "batch": args.batch,
        "peak_lr": args.lr,
        "minutes": args.minutes,
        "trained_minutes": round(progress.minutes, 4),
        "shares": args.shares,
        "alone": args.alone,
        "warm_start": args.warm_start and args.warm_start.name,
        "precision": args.precision,
        "device": args.device,
        "machine": machine(args.device),
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
        "loss_curve": progress.curve,
    }
    if args.warm_start and (before := args.warm_start / RECORD).is_file():
        record["before"] = json.loads(before.read_text())
    (args.out / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def machine(device: str) -> str:
    """Return the name of the machine or GPU that computes."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("src/kedge/models/nano"))
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds of this part of the training")
    parser.add_argument("--resume", action="store_true", help="go on with the training in --out, if there is one")
    parser.add_argument("--tokenizer", type=Path, help="of the model in this folder, instead of a new one")
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
        "--shares",
        type=json.loads,
        default={"math": 0.27, "choice": 0.4, "code": 0.33},
        help="share of the samples by task, as JSON",
    )
    parser.add_argument("--alone", type=float, default=0.3, help="share of the agents that hear no one")
    parser.add_argument("--compile", action="store_true", help="through torch.compile (needs a C++ compiler)")
    parser.add_argument("--warm-start", type=Path, help="begin with the weights in this folder")
    return parser


def main() -> None:
    train(arguments().parse_args())


if __name__ == "__main__":
    main()
