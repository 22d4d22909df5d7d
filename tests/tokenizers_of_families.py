"""Small tokenizers that treat blanks, bytes and special tokens as those of well-known families do."""

import json
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kedge.engine.common.tokenizer import HFTokenizer

TEXTS = [
    "[INST] Hello there, how are you today? [/INST] I am fine. <<SYS>> Be brief. <</SYS>> \n\n",
    "user assistant system tool call the weather in town rains and rains, \n well: 1 2 3",
    "The model reads what the tool has said. " * 3,
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set said = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set said = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (said if loop.first else '') + m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
QWEN_3 = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n{{ content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FAMILIES = ("prepend", "first", "always", "never", "unigram", "byte level", "byte level, prefixed")


@lru_cache
def raw_of(family: str) -> str:
    """The tokenizer as JSON."""
    if family.startswith("byte level"):
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=family.endswith("prefixed"))
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        raw.train_from_iterator(TEXTS, trainer)
        return raw.to_str()
    known = [*SPECIALS[:3], *BYTES, *SPECIALS[3:]]
    if family == "unigram":
        raw = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=420, special_tokens=known, unk_token="<unk>", show_progress=False)
    else:
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=known, show_progress=False)
    if family == "prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        raw.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if family == "unigram" else family)
    raw.train_from_iterator(TEXTS, trainer)
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    data = json.loads(raw.to_str())
    data["added_tokens"] = [one for one in data["added_tokens"] if one["content"] in SPECIALS]
    if family == "unigram":
        data["model"]["byte_fallback"] = True
    elif family == "prepend":
        data["pre_tokenizer"] = None  # as Llama's own: the whole text is one word
    return json.dumps(data)


def tokenizer_of(family: str, template: str | None = None) -> HFTokenizer:
    """A tokenizer of a family, with a chat template."""
    raw = Tokenizer.from_str(raw_of(family))
    inner = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    inner.chat_template = template
    return HFTokenizer(inner)
