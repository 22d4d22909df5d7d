"""KVCOMM, Table 1: accuracy, cost and speed by number of agents. Pools fill as they do in use."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.studies.study import Note, Plot, Row, Study, StudySettings, compared, picked, team_sizes

METHODS = ("dense", "role-last", "epic", "cacheblend", "relay", "kvcomm", "token", "kedge")
_TEAMS, _QUICK_TEAMS = (2, 3, 4, 5), (2, 3)
_COLUMNS = (
    "accuracy",
    "same_final_answer",
    "flips",
    "judge_consistency",
    "computed_tokens",
    "reuse_rate",
    "ttft_ms",
    "teams_per_minute",
)
_NOTES = (
    "–: not comparable. CacheBlend and RelayCaching run tokens through the first layers twice here, as an experiment.",
    "computed tokens: of the prompts, in all layers; not what CacheBlend and RelayCaching compute to choose them.",
    "teams per minute: one team at a time, learning and base prefills behind its answers included.",
    "role-last: other prompts; what it differs in from dense prefill is the prompts' effect. With it, and on the task "
    "tools, all methods run on the bundled model nano-both unless --model names another.",
    "flips: share of calls that begin with another function than by dense prefill, or with prose in place of one.",
)


def measure(settings: StudySettings, seed: int, note: Note) -> list[Row]:
    """Return a row for every method and number of agents; `dense` repeats dense prefill, the ceiling."""
    rows: list[Row] = []
    for agents in team_sizes(settings, _QUICK_TEAMS if settings.quick else _TEAMS):

        def note_team(what: str, agents: int = agents) -> None:
            note(f"{agents} agents, {what}")

        team = replace(settings, agents=agents)
        summaries = compared(team, seed, settings.methods or METHODS, note_team, forced=False, judged=True, timed=True)
        rows += [
            {"agents": agents, "method": name, "accuracy_dense": one.accuracy_dense, **picked(one, *_COLUMNS)}
            for name, one in summaries.items()
        ]
    return rows


STUDY = Study(
    "accuracy",
    "Accuracy, cost and speed by number of agents",
    "Table 1, 2 to 5 agents. MMLU: dense 47.1, 66.7, 68.0, 69.9 %, CacheBlend 65.4, 65.4, 65.4, 67.3 %, KVCOMM 64.7, "
    "68.6, 68.0, 69.9 % (reuse 74.5, 69.9, 70.1, 67.6 %). GSM8K: dense 81.1, 82.4, 82.1, 81.7 %, CacheBlend 82.0, "
    "75.1, 65.1, 57.1 %, KVCOMM 81.5, 81.7, 80.6, 79.6 % (reuse 79.6, 77.0, 73.4, 71.0 %). HumanEval: dense 86.3, "
    "83.9, 84.5, 85.1 %, CacheBlend 31.1, 21.1, 30.4, 32.9 %, KVCOMM 81.4, 83.2, 83.2, 83.2 % (reuse 87.6, 84.7, "
    "81.1, 77.8 %).",
    measure,
    Plot("agents", ("accuracy", "same_final_answer", "judge_consistency", "computed_tokens"), "method"),
    default={"agents": 0},
    quick={"agents": 0, "questions": 8},
    notes=_NOTES,
)
