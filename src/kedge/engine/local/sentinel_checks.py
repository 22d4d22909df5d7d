"""The comparison of sentinel tokens before a request's first token: translated KV against computed KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kedge.engine.common.logprobs import Logprobs
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import RequestSequence, Sequence
from kedge.types import GenerateRequest, Miss

logger = logging.getLogger(__name__)
REFUTED = Miss("*", "the guard computed it: some of its translated KV was far from what the model computes")
Judge = Callable[[GenerateRequest, Mapping[int, float]], tuple[GenerateRequest, bool]]
"""(request, relative error by position) -> the request, and whether its prompt has to be computed"""


class SentinelChecks:
    """The checks of one engine. Called by its owner thread only."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self.judge: Judge = lambda request, _: (request, False)

    def refute(self, sequence: Sequence) -> bool:
        """Compare a sequence's sentinel tokens, once all of its tokens are computed. Where they refute what was
        translated, all of that has to be computed; returns whether it does.
        """
        if not isinstance(sequence, RequestSequence) or not sequence.sentinels or sequence.table is None:
            return False
        errors: dict[int, float] = {}
        for rows in sequence.sentinels:
            errors.update(zip(rows.positions, self._sentinels.errors(sequence.table, rows), strict=True))
        sequence.sentinels = []
        request, refuted = self.judge(sequence.request, errors)
        if request is not sequence.request:
            sequence.request, sequence.logprobs = request, Logprobs(request)
        if refuted:
            self._compute(sequence)
        return refuted

    @staticmethod
    def _compute(sequence: RequestSequence) -> None:
        assert sequence.plan is not None
        sequence.plan = sequence.plan.without_translation(REFUTED)
        behind = sequence.plan.spans[-1]
        sequence.todo = list(range(behind.start, behind.stop))
        sequence.preassembled = min(sequence.preassembled, sequence.todo[0])
        logger.warning("request %s is computed: translated KV was far from computed KV", sequence.request.request_id)
