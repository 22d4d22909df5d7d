"""Log-probabilities of an answer's first tokens only: the guard compares no more of it, and vLLM itself can only be
asked for those of a whole answer.

While one request wants any, vLLM computes them for all rows of a batch. Each of its model runners finds out in one
place whether a step needs any, and these two are wrapped here.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as OfSecondRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from kedge.integrations.vllm.entry_point import FIRST_LOGPROBS


class FirstLogprobs(LogitsProcessor, OfSecondRunner):
    """Knows how many first tokens' log-probabilities are wanted: `extra_args["kedge_first_logprobs"]`, or else all."""

    def __init__(self) -> None:
        self.wanted: dict[int, tuple[int | None, list[int]]] = {}
        """Of requests with log-probabilities, by row: how many tokens have any (None: all), and what is drawn; on the
        second runner by place of the request, also of those that have ended, without the latter"""

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.wanted, batch_update, _wanted)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.wanted.pop(req_idx, None)
        if wanted := _wanted(sampling_params, None, []):
            self.wanted[req_idx] = wanted
        return False


def _wanted(params: SamplingParams, _: Any, drawn: list[int]) -> tuple[int | None, list[int]] | None:
    first = (params.extra_args or {}).get(FIRST_LOGPROBS)
    return None if params.logprobs is None else (first if type(first) is int and first > 0 else None, drawn)


_sample, _count = Sampler.forward, SecondSampler.get_logprobs_dims


def _sample_first(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
    """Sample without log-probabilities where no row of the batch wants any more."""
    if sampling_metadata.max_num_logprobs not in (None, -1):  # -1 is for vLLM's own use, beside drafts
        known = next((one for one in sampling_metadata.logitsprocs.all if isinstance(one, FirstLogprobs)), None)
        if known and all(first and len(drawn) >= first for first, drawn in known.wanted.values()):
            sampling_metadata = replace(sampling_metadata, max_num_logprobs=None)  # its own serves many steps
    return _sample(self, logits, sampling_metadata, *args, **more)


def _count_first(self: Any, *args: Any, **more: Any) -> Any:
    """Count what requests want, on the second runner, once those with enough want none."""
    computed, prompts = self.req_states.num_computed_tokens_np, self.req_states.prompt_len.np
    for known in (one for one in self.logits_processors if isinstance(one, FirstLogprobs)):
        for slot, (first, _) in known.wanted.items():
            if first and computed[slot] >= prompts[slot] + first - 1:
                self.sampling_states.num_logprobs[slot] = NO_LOGPROBS
    return _count(self, *args, **more)


Sampler.forward, SecondSampler.get_logprobs_dims = _sample_first, _count_first
