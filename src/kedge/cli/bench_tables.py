"""The tables of `kedge bench`, made of the same data that `--json` writes."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from kedge.cli.output import Columns, Row, cells, table_of

FIDELITY: Columns = {
    "top-1": ("top1", ".1%"),
    "same": ("same", ".0%"),
    "computed": ("computed", ".0%"),
    "moved": ("translated", ".0%"),
    "TTFT ms": ("ttft_ms", ".0f"),
}
LOAD: Columns = {
    "teams per min": ("teams_per_min", ".1f"),
    "TTFT p50": ("ttft_p50_ms", ".0f"),
    "TTFT p99": ("ttft_p99_ms", ".0f"),
    "run p50": ("latency_p50_s", ".1f"),
    "run p99": ("latency_p99_s", ".1f"),
    "reused": ("translated_share", ".0%"),
    "computed": ("computed_share", ".0%"),
    "KL": ("kl", ".4f"),
    "proof": ("proof_share", ".0%"),
    "errors": ("errors", "d"),
}
FLOW: Columns = {
    "hits": ("hit_rate", ".3f"),
    "waited for": ("waited_rate", ".3f"),
    "TTFT p50 ms": ("ttft_p50_ms", ".1f"),
    "TTFT p90 ms": ("ttft_p90_ms", ".1f"),
    "tokens per s": ("tokens_per_s", ".1f"),
}
SESSION_COLUMNS = {"belady": "Belady", "lru": "LRU", "kedge": "Kedge", "kedge_host3": "host x3"}
"""Figure -> heading."""


def fidelity(data: Row) -> Group:
    """Return the table of yardsticks and methods: KL with its interval, and beside that of fp8 KV."""
    rows = {**data["yardsticks"], **data["methods"]}
    title = f"nats a token from dense prefill, readers of {next(iter(rows.values()))['questions']} questions"
    shown = []
    for name, row in rows.items():
        (low, high), ratio = row["ci95"]["kl"], row["kl"] / data["yardsticks"]["fp8 e4m3"]["kl"]
        kl = [f"{row['kl']:.4f}", f"{low:.4f}-{high:.4f}", f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"]
        shown.append([name, *kl, *cells(row, FIDELITY)])
    return table_of(title, ("prompt KV", "KL", "95 %", "fp8's", *FIDELITY), shown, left={"prompt KV"})


def fidelity_notes(data: Row) -> str:
    """Return how to read the table."""
    dense = data["dense"]["ttft_ms"]
    timed = "" if dense is None else f" TTFT: the median of calls served alone; by dense prefill {dense:.0f} ms."
    return (
        "Above: the prompt's KV rounded, nothing else changed; fp8 e4m3 is vLLM's --kv-cache-dtype fp8. Below: "
        f"methods. Answers are forced to those of dense prefill; same: the share of which no token changes.{timed}"
    )


def load(case: str, seconds: float, clients: Mapping[str, Mapping[str, Row]], by: str = "mode") -> Group:
    """Return the table of a case's figures by number of clients and reuse mode, or what else `by` names."""
    rows = [[count, name, *cells(row, LOAD)] for count, found in clients.items() for name, row in found.items()]
    return table_of(f"{case}, {seconds:g} s each; TTFT in ms, runs in s", ("at once", by, *LOAD), rows, left={by})


def vllm_flow(case: Row) -> Iterator[RenderableType]:
    """Yield the table of both engines' figures in a case of workflows."""
    rows = []
    for name, row in case["engines"].items():
        gain = f"{case['speedup']['median']:.2f}" if name == "kedge" else ""
        rows.append([name, f"{row['seconds']['median']:.2f}", gain, *cells(row, FLOW)])
    headings = ("engine", "s", "times stock", *FLOW)
    yield table_of(f"{case['case']}: {case['workload']}", headings, rows, left={"engine"})
    if not case["tokens_identical"]:
        yield Text("the engines did not give the same tokens", style="red")


def vllm_load(seconds: float, models: Mapping[str, Mapping[str, Mapping[str, Row]]]) -> Iterator[RenderableType]:
    """Yield the tables of teams at once."""
    for name, by_clients in models.items():
        yield load(name, seconds, by_clients, "engine")
        for clients, engines in by_clients.items():
            yield f"{clients} at once, times stock in each pair: {engines['kedge']['times_stock']}"


def sessions(data: Row) -> Iterator[RenderableType]:
    """Yield the tables of every trace: hit rates by capacity."""
    for name, trace in data["traces"].items():
        for live, shares in trace["open"].items():
            ceiling = f"an infinite cache: {trace['ceiling'][live]:.3f}"
            columns = {SESSION_COLUMNS[column]: (column, ".3f") for column in next(iter(shares.values()))}
            rows = [[share, *cells(row, columns)] for share, row in shares.items()]
            title = f"{name}, {live} live: hit rate by cache over working set; {ceiling}"
            yield table_of(title, ("cache", *columns), rows)
