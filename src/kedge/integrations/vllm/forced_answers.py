"""Answers that are forced on vLLM, and log-probabilities of an answer's first tokens only: the guard compares no more
of it, and vLLM itself can only be asked for those of a whole answer. vLLM loads this wherever it samples (entry point
`vllm.logits_processors`).

vLLM takes log-probabilities from the model's own logits; then logits processors change what is drawn. Its two model
runners load the same group, each with an interface of its own: the class has both, as either refuses other classes.

While one request wants any log-probabilities, vLLM computes them for all rows of a batch. Each of its model runners
finds out in one place whether a step needs any, and these two are wrapped here.
"""

from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as OfSecondRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from kedge.integrations.vllm.entry_point import COMPARABLE, FIRST_LOGPROBS, FORCED, is_plugged


class WantedAnswer(NamedTuple):
    """What a request asks for of its answer."""

    first: float
    """How many first tokens' log-probabilities are wanted; infinite: all"""
    forced: list[int]
    """The answer's token ids; none: it is drawn"""
    drawn: list[int]
    """What is drawn of it; on the second runner nothing"""


class ForcedAnswers(LogitsProcessor, OfSecondRunner):
    """Forces answers to the token ids in `extra_args["kedge_forced"]`, and knows how many first tokens have
    log-probabilities: `extra_args["kedge_first_logprobs"]`, or else all. A client's value that is neither is ignored.

    Nothing is forced without Kedge's connector, beside drafts, and where log-probabilities would be those of the force.
    """

    def __init__(self, vllm_config: VllmConfig, *state: Any) -> None:
        """`state` begins with a device; on the second runner, it is what that one knows of its requests."""
        model = vllm_config.model_config
        is_on = is_plugged(vllm_config) and model.logprobs_mode == COMPARABLE
        self._longest = model.max_model_len if is_on and vllm_config.speculative_config is None else 0
        self._vocab_size, self._requests = model.get_vocab_size(), state[0]
        self.asked: dict[int, WantedAnswer] = {}
        """By row; on the second runner by place of the request, also of those that have ended"""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.asked, batch_update, self._read)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.asked.pop(req_idx, None)
        if asked := self._read(sampling_params, None, []):
            self.asked[req_idx] = asked
        return bool(asked and asked.forced)

    def _read(self, params: SamplingParams, _: Any, drawn: list[int]) -> WantedAnswer | None:
        """Return what a request asks for, None for one that asks for nothing."""
        given = params.extra_args or {}
        forced, first = given.get(FORCED), given.get(FIRST_LOGPROBS)
        if not isinstance(forced, list) or not 0 < len(forced) <= self._longest or params.structured_outputs:
            forced = []  # a grammar would have to allow each token
        if not all(type(one) is int and 0 <= one < self._vocab_size for one in forced):
            forced = []
        wanted = first if type(first) is int and first > 0 else inf
        asked = WantedAnswer(0 if params.logprobs is None else wanted, forced, drawn)
        return asked if asked.first or forced else None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Leave forced requests a single token. `ctx` says which rows there are, on the second runner."""
        if ctx is None:
            rows = [(row, one.forced, len(one.drawn)) for row, one in self.asked.items()]
        else:
            lengths, prompts = ctx.seq_lens_upper_bound_np, self._requests.prompt_len.np
            seen = [(row, slot) for row, slot in enumerate(ctx.idx_mapping_np) if slot in self.asked]
            rows = [(row, self.asked[slot].forced, lengths[row] - prompts[slot]) for row, slot in seen]
        for row, forced, drawn in rows:
            if 0 <= drawn < len(forced) and forced[drawn] < logits.shape[1]:  # there may be fewer logits than tokens
                logits[row].fill_(float("-inf"))
                logits[row, forced[drawn]] = 0.0
        return logits


_sample, _count = Sampler.forward, SecondSampler.get_logprobs_dims


def _sample_first(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
    """Sample without log-probabilities where no row of the batch wants any more."""
    if sampling_metadata.max_num_logprobs not in (None, -1):  # -1 is for vLLM's own use, beside drafts
        known = next((one for one in sampling_metadata.logitsprocs.all if isinstance(one, ForcedAnswers)), None)
        if known and all(len(one.drawn) >= one.first for one in known.asked.values()):
            sampling_metadata = replace(sampling_metadata, max_num_logprobs=None)  # its own serves many steps
    return _sample(self, logits, sampling_metadata, *args, **more)


def _count_first(self: Any, *args: Any, **more: Any) -> Any:
    """Count what requests want, on the second runner, once those with enough want none."""
    computed, prompts = self.req_states.num_computed_tokens_np, self.req_states.prompt_len.np
    for known in (one for one in self.logits_processors if isinstance(one, ForcedAnswers)):
        for slot, one in known.asked.items():
            if one.first and computed[slot] >= prompts[slot] + one.first - 1:
                self.sampling_states.num_logprobs[slot] = NO_LOGPROBS
    return _count(self, *args, **more)


Sampler.forward, SecondSampler.get_logprobs_dims = _sample_first, _count_first
