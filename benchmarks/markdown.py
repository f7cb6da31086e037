"""results.json as Markdown: headlines, for README, and one table per benchmark. Formats; computes units and ratios."""

from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
MIB = 2**20
DETAILS = "## All of it"  # README quotes what stands above


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a Markdown table; with `numbers`, all columns but the first stand to the right."""
    lines = [heads, ["---", *["---:" if numbers else "---"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def markdown(results: Result) -> str:
    """Return the headlines, then all tables, each with the machine's load when it was measured."""
    facts = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    done = {name: entry["result"] for name, entry in results["benchmarks"].items()}
    rows = [row for name, headline in HEADLINES.items() if name in done for row in headline(done[name])]
    lines = [
        f"Made by `make bench` on {facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB, "
        f"{gpus}.\n",
        table(("what", "measured"), rows, numbers=False),
        f"{DETAILS}\n",
        f"Python {facts['python']}, {packages}. CPU seconds are those of all threads; wall times also hold what other "
        "work on the machine took, so each table names the load average at its start.\n",
    ]
    for name, entry in results["benchmarks"].items():
        title, body = SECTIONS[name](entry["result"])
        lines.append(f"**{title}** (load average {entry['load_average']:.1f}, {entry['started'][:10]})\n\n{body}")
    return "\n".join(lines)


# Headlines ------------------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]


def _startup_headline(result: Result) -> Rows:
    limited = [row for row in result["rows"] if row["limit_s"] is not None]
    return [(f"{row['what']}, in a new process", f"{row['wall_s']:.2f} s (limit {row['limit_s']})") for row in limited]


def _trace_headline(result: Result) -> Rows:
    ours = next(row for row in result["rows"] if row["reader"] == "workbench")
    told = (
        f"{ours['table_cpu_s']:.1f} CPU s to the first table, {ours['events_per_cpu_s_table'] / 1e6:.1f} million "
        f"events a CPU second, {ours['peak_bytes'] / 1e9:.2f} GB at most"
    )
    rows = [(f"trace of {result['events'] / 1e6:.0f} million events, {result['bytes'] / 1e9:.2f} GB", told)]
    if found := result["comparison"]:
        told = (
            f"{found['cpu_rate_over_hta']:.0f} times its rate by CPU time, {1 / found['memory_under_hta']:.2f} of its "
            f"memory; it loses {found['busy_lost_by_hta']:.0%} of the busy time by cutting to whole microseconds"
        )
        rows.append(("the same file, against HolisticTraceAnalysis", told))
    return rows


def _planner_headline(result: Result) -> Rows:
    ratios = [row["ledger_over_vllm"] for row in result["rows"]]
    return [
        ("planner, against vLLM's own packing loop", f"{min(ratios):.0f} to {max(ratios):.0f} times its items a second")
    ]


def _sweep_headline(result: Result) -> Rows:
    work, least = result["items"] * result["configurations"], min(row["cpu_s"] for row in result["rows"])
    title = f"{result['items'] / 1e6:.0f} million items under {result['configurations']} configurations"
    return [(title, f"{least:.1f} CPU s, {work / least / 1e6:.0f} million items a CPU second")]


def _advisor_headline(result: Result) -> Rows:
    taken = [row["cpu_seconds"] for row in result["rows"]]
    return [(f"advice on {result['items']:,} items", f"{min(taken):.1f} to {max(taken):.1f} CPU s an answer")]


def _figures_headline(result: Result) -> Rows:
    return [
        (
            f"timeline of {result['spans']:,} spans as HTML",
            f"{result['cpu_s']:.1f} CPU s, {result['html_bytes'] / 1e6:.1f} MB",
        ),
        (
            f"first figure of a trace of {result['first_bytes'] / 1e9:.2f} GB",
            f"{result['first_cpu_s']:.1f} CPU s, {result['first_wall_s']:.1f} s (limit {result['first_limit_s']:.0f})",
        ),
    ]


def _widgets_headline(result: Result) -> Rows:
    told = [row for row in result["rows"] if "median_ms" in row]
    title = f"budget widgets on {result['items'] / 1e6:.0f} million items"
    return [
        (
            f"{title}, {row['what']}",
            f"new figure {row['median_ms']:.0f} ms after a slider's move (median; limit {result['limit_ms']:.0f})",
        )
        for row in told[:1]
    ]


def _ledger_headline(result: Result) -> Rows:
    first = result["rows"][0]
    return [
        (
            "ledger plugin in a live server",
            f"{first['overhead_us']:.0f} us of CPU time a call of {first['items']} image",
        )
    ]


HEADLINES: dict[str, Callable[[Result], Rows]] = {
    "startup": _startup_headline,
    "trace_reader": _trace_headline,
    "trace_reader_full": _trace_headline,
    "planner": _planner_headline,
    "sweep_full": _sweep_headline,
    "advisor": _advisor_headline,
    "figures": _figures_headline,
    "widgets": _widgets_headline,
    "ledger": _ledger_headline,
}


# Tables ---------------------------------------------------------------------------------------------------------------


def startup(result: Result) -> tuple[str, str]:
    """A new process each."""
    rows = [
        (
            row["what"],
            *(f"{row[name]:.2f}" for name in ("wall_s", "median_s", "cpu_s")),
            "" if row["limit_s"] is None else f"{row['limit_s']}",
        )
        for row in result["rows"]
    ]
    return "Start-up", table(("a new Python process", "least wall s", "median wall s", "least CPU s", "limit, s"), rows)


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
    """The large timeline, and the first figure of a large trace."""
    rows = [
        (
            f"timeline of {result['spans']:,} spans, {result['drawn']:,} drawn",
            f"{result['wall_s']:.1f}",
            f"{result['cpu_s']:.1f}",
            f"{result['html_bytes'] / 1e6:.1f}",
        ),
        (
            f"first call of a trace of {result['first_events']:,} events, {result['first_bytes'] / 1e9:.2f} GB, from "
            "its file",
            f"{result['first_wall_s']:.1f}",
            f"{result['first_cpu_s']:.1f}",
            "",
        ),
    ]
    return "Figures", table(("figure", "wall s", "CPU s", "HTML with plotly.js, MB"), rows)


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
