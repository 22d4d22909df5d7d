"""Answers that are forced on vLLM, which loads this wherever it samples (entry point `vllm.logits_processors`).

vLLM takes log-probabilities from the model's own logits; then logits processors change what is drawn. Its two model
runners load the same group, each with an interface of its own: the class has both, as either refuses other classes.
"""

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import process_dict_updates

from kedge.integrations.vllm.entry_point import COMPARABLE, FORCED, is_plugged
from kedge.integrations.vllm.first_logprobs import FirstLogprobs


class ForcedAnswers(FirstLogprobs):
    """Forces answers to the token ids in `extra_args["kedge_forced"]`; a client's list that is none is ignored.

    Nothing is forced without Kedge's connector, beside drafts, and where log-probabilities would be those of the force.
    """

    def __init__(self, vllm_config: VllmConfig, *state: Any) -> None:
        """`state` begins with a device; on the second runner, it is what that one knows of its requests."""
        super().__init__()
        model = vllm_config.model_config
        is_on = is_plugged(vllm_config) and model.logprobs_mode == COMPARABLE
        self._longest = model.max_model_len if is_on and vllm_config.speculative_config is None else 0
        self._vocab_size, self._requests = model.get_vocab_size(), state[0]
        # the answer and what is drawn of it, by row; on the second runner by place of the request, without the latter
        self._forced: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        super().update_state(batch_update)
        process_dict_updates(self._forced, batch_update, self._read)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        super().add_request(req_idx, sampling_params)
        self._forced.pop(req_idx, None)
        if forced := self._read(sampling_params, None, []):
            self._forced[req_idx] = forced
        return forced is not None

    def _read(self, params: SamplingParams, _: Any, drawn: list[int]) -> tuple[list[int], list[int]] | None:
        forced = (params.extra_args or {}).get(FORCED)
        if not isinstance(forced, list) or not 0 < len(forced) <= self._longest or params.structured_outputs:
            return None  # a grammar would have to allow each token
        return (forced, drawn) if all(type(one) is int and 0 <= one < self._vocab_size for one in forced) else None

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """Leave forced requests a single token. `ctx` says which rows there are, on the second runner."""
        if ctx is None:
            rows = [(row, forced, len(drawn)) for row, (forced, drawn) in self._forced.items()]
        else:
            lengths, prompts = ctx.seq_lens_upper_bound_np, self._requests.prompt_len.np
            seen = [(row, slot) for row, slot in enumerate(ctx.idx_mapping_np) if slot in self._forced]
            rows = [(row, self._forced[slot][0], lengths[row] - prompts[slot]) for row, slot in seen]
        for row, forced, drawn in rows:
            if 0 <= drawn < len(forced) and forced[drawn] < logits.shape[1]:  # there may be fewer logits than tokens
                logits[row].fill_(float("-inf"))
                logits[row, forced[drawn]] = 0.0
        return logits
