"""The comparison of sentinel tokens before a request's first token: translated KV against computed KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from kedge.engine.common.logprobs import Logprobs
from kedge.engine.local.sentinels import Sentinels
from kedge.engine.local.sequence import RequestSequence, Sequence
from kedge.reuse.plan import Sentinel
from kedge.types import GenerateRequest, Miss, Source

logger = logging.getLogger(__name__)
REFUTED = Miss("*", "the guard computed it: some of its translated KV was far from what the model computes")
Judge = Callable[[GenerateRequest, Mapping[Sentinel, float]], tuple[GenerateRequest, bool]]
"""(request, relative error of each sentinel) -> the request, and whether its prompt has to be computed"""


class SentinelChecks:
    """The checks of one engine. Called by its owner thread only."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self.judge: Judge = lambda request, _: (request, False)

    def refuted(self, sequences: Iterable[Sequence]) -> list[RequestSequence]:
        """Compare the sentinel tokens of sequences of which all tokens are computed. Returns those where they refute
        what was translated: the plan is to compute all of that now, in blocks that no other request reads.
        """
        watched = [one for one in sequences if isinstance(one, RequestSequence) and one.sentinels]
        if not watched:
            return []
        errors = iter(self._sentinels.errors([rows for one in watched for rows in one.sentinels]))
        return [one for one in watched if self._is_refuted(one, errors)]

    def _is_refuted(self, sequence: RequestSequence, errors: Iterable[float]) -> bool:
        """Take the errors of one sequence, the next ones. Returns whether its prompt has to be computed."""
        sentinels = [one for rows in sequence.sentinels for one in rows.sentinels]
        sequence.sentinels = []
        found = dict(zip(sentinels, islice(errors, len(sentinels)), strict=True))
        request, refuted = self.judge(sequence.request, found)
        if request is not sequence.request:
            sequence.request, sequence.logprobs = request, Logprobs(request)
        if refuted:
            self._compute(sequence)
        return refuted

    @staticmethod
    def _compute(sequence: RequestSequence) -> None:
        assert sequence.plan is not None
        sequence.plan = sequence.plan.without_translation(REFUTED)
        first = next(span.start for span in sequence.plan.spans if span.source is Source.COMPUTED)
        sequence.preassembled = min(sequence.preassembled, first)
        logger.warning("request %s is computed: translated KV was far from computed KV", sequence.request.request_id)
