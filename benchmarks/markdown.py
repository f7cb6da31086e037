"""results.json as Markdown: one table per benchmark, for README. Formats, computes nothing but units and ratios."""

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
MIB = 2**20


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; numbers stand to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def markdown(results: Result) -> str:
    """Return all tables, each with the machine's load when it was measured."""
    facts = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    lines = [
        f"Made by `make bench` on {facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB, "
        f"{gpus}; Python {facts['python']}, {packages}. CPU seconds are those of all threads; wall times also hold "
        "what other work on the machine took, so each table names the load average at its start.\n"
    ]
    for name, entry in results["benchmarks"].items():
        title, body = SECTIONS[name](entry["result"])
        lines.append(f"**{title}** (load average {entry['load_average']:.1f}, {entry['started'][:10]})\n\n{body}")
    return "\n".join(lines)


def startup(result: Result) -> tuple[str, str]:
    """A new process each."""
    rows = [
        (row["what"], f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}", f"{row['limit_s'] or ''}")
        for row in result["rows"]
    ]
    return "Start-up", table(("a new Python process", "wall s", "CPU s", "limit, s"), rows)


def trace_reader(result: Result) -> tuple[str, str]:
    """Readers on one file, and what the peers lose."""
    whole = next(row["busy_us"] for row in result["rows"] if row["reader"] == "workbench")
    rows = []
    for row in result["rows"]:
        if "table_s" not in row:
            rows.append((row["reader"], row.get("missing") or row.get("failed", ""), "", "", "", "", ""))
            continue
        lost = 1 - row["busy_us"] / whole if row.get("busy_us") and "ranks" not in row["reader"] else None
        rows.append(
            (
                row["reader"],
                f"{row['load_s']:.1f}",
                f"{row['table_s']:.1f}",
                f"{row['table_cpu_s']:.1f}",
                f"{row['events_per_cpu_s_table'] / 1e3:,.0f}",
                f"{row['peak_bytes'] / MIB:,.0f}",
                "" if lost is None else f"{lost:.1%}",
            )
        )
    heads = ("reader", "loaded, s", "first table, s", "CPU s", "thousand events/CPU s", "peak MiB", "busy time lost")
    body = table(heads, rows)
    found = result["comparison"]
    if found:
        body += (
            f"\nAgainst HolisticTraceAnalysis: {found['rate_over_hta']:.0f} times its rate by wall time, "
            f"{found['cpu_rate_over_hta']:.0f} times by CPU time, {1 / found['memory_under_hta']:.2f} of its memory. "
            f"It rounds times down to whole microseconds and so loses {found['busy_lost_by_hta']:.0%} of the busy time "
            "on this trace of short kernels.\n"
        )
    title = f"Trace reading: {result['source']} repeated to {result['events']:,} events, {result['bytes'] / 1e9:.2f} GB"
    return title, body


def planner(result: Result) -> tuple[str, str]:
    """Items per second by items in a call."""
    rows = [
        (
            f"{row['items_per_call']:,}",
            *(f"{row[name]['items_per_second'] / 1e6:.1f}" for name in ("ledger", "totals")),
            f"{row['vllm']['items_per_second'] / 1e6:.2f}",
            f"{row['ledger_over_vllm']:.0f}x",
        )
        for row in result["rows"]
    ]
    heads = ("items in a call", "every batch", "totals only", "vLLM's own loop", "every batch against vLLM")
    return f"Planner: million items per CPU second, {result['rows'][0]['items']:,} items", table(heads, rows)


def sweep(result: Result) -> tuple[str, str]:
    """Seconds of a whole sweep by workers."""
    work = result["items"] * result["configurations"]
    rows = [
        (
            str(row["workers"]),
            f"{row['wall_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{work / row['cpu_s'] / 1e6:.0f}",
            f"{row['peak_bytes'] / MIB:,.0f}",
        )
        for row in result["rows"]
    ]
    heads = ("cores", "wall s", "CPU s", "million items per CPU second", "peak MiB")
    title = f"Sweep of the planner: {result['items']:,} items, {result['configurations']} configurations"
    return title, table(heads, rows)


def figures(result: Result) -> tuple[str, str]:
    """The large timeline."""
    row = (
        f"{result['spans']:,}",
        f"{result['drawn']:,}",
        f"{result['wall_s']:.1f}",
        f"{result['cpu_s']:.1f}",
        f"{result['html_bytes'] / 1e6:.1f}",
    )
    heads = ("spans", "drawn", "wall s", "CPU s", "HTML with plotly.js, MB")
    return "Timeline as a figure", table(heads, [row])


def widgets(result: Result) -> tuple[str, str]:
    """What a person waits for."""
    rows = [
        (row["what"], row["missing"], "", "", "")
        if "missing" in row
        else (row["what"], *(f"{row[name]:.0f}" for name in ("least_ms", "median_ms", "most_ms")), limit)
        for row, limit in zip(result["rows"], (f"{result['limit_ms']:.0f}", ""), strict=True)
    ]
    heads = ("a slider's move to the new figure", "least ms", "median ms", "most ms", "limit, ms")
    return f"Budget widgets: {result['items']:,} items", table(heads, rows)


def advisor(result: Result) -> tuple[str, str]:
    """Seconds per answer."""
    rows = [
        (
            f"{row['items_per_call']}, {row['objective']}",
            f"{row['wall_seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
            f"{row['configurations']:,}",
            "" if row["above_bound"] is None else f"{row['above_bound']:.1%}",
        )
        for row in result["rows"]
    ]
    heads = ("items in a call, objective", "wall s", "CPU s", "configurations priced", "above the bound")
    return f"Advisor: {result['items']:,} items, up to {result['max_graphs']} graphs", table(heads, rows)


def ledger(result: Result) -> tuple[str, str]:
    """What recording adds."""
    rows = [(str(row["items"]), str(row["batches"]), f"{row['overhead_us']:.0f}") for row in result["rows"]]
    return "Ledger plugin: CPU time that recording adds to a call", table(("images", "batches", "us"), rows)


SECTIONS: dict[str, Callable[[Result], tuple[str, str]]] = {
    "startup": startup,
    "trace_reader": trace_reader,
    "trace_reader_full": trace_reader,
    "planner": planner,
    "sweep": sweep,
    "sweep_full": sweep,
    "advisor": advisor,
    "advisor_full": advisor,
    "figures": figures,
    "widgets": widgets,
    "ledger": ledger,
}
