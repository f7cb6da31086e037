"""What the report says first: a sentence for each question that brings a reader, computed from the notebooks' data.

Each notebook publishes its sentence with `views.report.note_answer`; the report shows it at its top.
"""

from collections.abc import Sequence

import pandas as pd

from workbench import ladder, outcomes
from workbench.advisor import AUTO, Advice
from workbench.capturable import ALL, Ladder
from workbench.models import model_facts
from workbench.outcomes import Measured
from workbench.parity import Cell, Parity
from workbench.run import Environment


def machine(environment: Environment) -> str:
    """Return the GPUs' name, or the CPU's where there is none."""
    return " and ".join(sorted({gpu.name for gpu in environment.gpus})) or environment.cpu


def speed(model: str, call: str, where: str, timed: pd.DataFrame, parts: pd.DataFrame, climbed: Ladder | None) -> str:
    """Say where the time of a call goes, and what graphs and the variants win.

    Args:
        model: its title.
        call: its title, as "one image of 224 x 224".
        where: the machine.
        timed: `explain.speed` of the call, by arm.
        parts: `explain.where_time_goes`: eager as served first.
        climbed: the variants' ladder, where there is one.
    """
    eager, served = parts.iloc[0], timed.loc["eager as served"]
    graph = timed.loc["graph"]
    text = (
        f"Eager {model} leaves the GPU ({where}) idle for {1 - eager['busy us'] / eager['window us']:.0%} of a call "
        f"({call}, traced); vLLM's graph takes {graph['median ms']:.2f} ms instead of {served['median ms']:.1f}, "
        f"{graph['vs served']:.1f} times as fast as eager as served (medians)"
    )
    case = None if climbed is None or climbed.replay != "cuda_graph" else ladder.one_image(climbed)
    rows = [] if case is None else ladder.steps(case).to_dict("records")
    last = ladder.last_step(row["step"] for row in rows)
    whole = next((row for row in rows if row["step"] == last and pd.notna(row["vs vLLM's graph"])), None)
    if whole is None:
        return f"{text}; what the variants win is not recorded."
    gain = whole["vs vLLM's graph"]
    together = last == ladder.title(ALL)
    who = "all variants together take" if together else f"with variant {last} it takes"
    return (
        f"{text}, and {who} {whole['median ms']:.2f} ms, {gain:.2f} times as fast as the graph measured beside "
        f"{'them' if together else 'it'}."
    )


def budgets(workload: str, model: str, advice: Advice, measured: Measured) -> str:
    """Say which budgets to set for a workload, and what they win: measured where exactly these were, else predicted."""
    chosen = advice.answer
    where = machine(measured.model.profile.environment)
    frames = f" and {chosen.max_frames} frames" if chosen.configuration.max_frames is not None else ""
    text = (
        f"For {model} and the {workload} workload on {where}, set budgets "
        f"{', '.join(map(str, chosen.budgets))} with at most {chosen.max_items} items{frames} a batch: "
    )
    ours = chosen.objective_us
    auto = next((one.objective_us for one in advice.baselines if one.name == AUTO), None)
    predicted = "no time of a call is predicted"
    if ours and auto:
        predicted = (
            f"predicted, a call takes {ours / 1e3:.1f} ms instead of {auto / 1e3:.1f}, "
            f"{auto / ours:.3f} times as fast as {AUTO}"
        )
    gain = _measured_gain(workload, measured)
    if gain is None:
        return f"{text}{predicted}."
    won = f"{gain['faster']:.3f} times ({gain['low']:.3f} to {gain['high']:.3f}) as fast as {gain['best other']}"
    if (gain["budgets"], gain["max items"]) == (outcomes.listed(chosen.budgets), chosen.max_items):
        return (
            f"{text}measured, a call takes {gain['advised ms']:.1f} ms instead of {gain['best other ms']:.1f}, {won}."
        )
    return f"{text}{predicted}; measured, the {gain['graphs']:.0f} budgets advised before are {won}."


def _measured_gain(workload: str, measured: Measured) -> pd.Series | None:
    """Return the advised configuration that was measured on a workload: `outcomes.won`, its budgets and max items."""
    if measured.validation is None:
        return None
    table = outcomes.validation(measured.model, measured.validation)
    gains = outcomes.won(measured.validation, table)
    advised = table[table["configuration"] == "advised"][["workload", "max items", "budgets"]]
    rows = gains.merge(advised, on="workload") if len(gains) else gains
    rows = rows[rows["workload"] == workload] if len(rows) else rows
    return rows.iloc[0] if len(rows) else None


def safety(sessions: Sequence[Parity]) -> str:
    """Say in how many conditions graph and eager differ, what known defects explain, and what planted faults say.

    Sessions with variants are counted apart: they are another encoder than vLLM's.
    """
    if not sessions:
        return "No parity session with CUDA graphs is recorded here."
    where = " and ".join(sorted({machine(session.environment) for session in sessions}))
    titles = " and ".join(dict.fromkeys(model_facts(session.model.key).title for session in sessions))
    plain = [session for session in sessions if not session.variants]
    changed = [session for session in sessions if session.variants]
    parts = [f"in {_explained(plain)}"] if plain else []
    parts += [f"with variants in {_explained(changed)}"] if changed else []
    text = f"On {where} graph and eager of {titles} differ {', and '.join(parts)}"
    faults = [result for session in sessions for result in session.faults if result.status != "not_tested"]
    if faults:
        text += f"; {sum(one.status == 'caught' for one in faults)} of {len(faults)} planted faults were caught"
    clean = [session.clean for session in sessions if session.clean is not None]
    if clean:
        alarms = sum(runs.false_alarms for runs in clean)
        runs = sum(runs.workloads for runs in clean)
        text += f"; {runs} random workloads without one raised {alarms or 'no'} false alarm{'s' * (alarms != 1)}"
    return f"{text}."


def _explained(sessions: Sequence[Parity]) -> str:
    """Return how many of the tested conditions differ, and by which known defects, with their scenarios."""
    tested = sum(cell.status != "not_tested" for session in sessions for cell in session.cells)
    scenarios: dict[str, set[str]] = {}
    known = unknown = 0
    for session in sessions:
        for cell in differing(session):
            defect = defect_of(session, cell)
            known, unknown = known + (defect is not None), unknown + (defect is None)
            scenarios.setdefault(defect or "no known defect", set()).add(cell.scenario)
    if not scenarios:
        return f"none of {tested} conditions"
    named = ", ".join(f"{why} in {' and '.join(sorted(names))}" for why, names in sorted(scenarios.items()))
    share = f"{unknown} of them unexplained" if unknown else "all explained by known defects"
    return f"{known + unknown} of {tested} conditions, {share} ({named})"


def differing(session: Parity) -> list[Cell]:
    """Return the conditions in which graph and eager differ, or the graph failed."""
    return [cell for cell in session.cells if cell.status in ("error", "mismatch")]


def defect_of(session: Parity, cell: Cell) -> str | None:
    """Return the known defect that explains a condition, as "D1"; None where no finding names one."""
    for finding in session.findings:
        same = finding.scenario == cell.scenario and (
            finding.budget == cell.budget or None in (finding.budget, cell.budget)
        )
        if same and finding.defect and finding.severity == "mismatch":
            return finding.defect
    return None


def parity_numbers(session: Parity) -> dict[str, float]:
    """Return a session's headline numbers for `note_source`: conditions that differ, known defects by name."""
    tested = sum(cell.status != "not_tested" for cell in session.cells)
    counts: dict[str, float] = {}
    for cell in differing(session):
        defect = defect_of(session, cell)
        why = f", known defect {defect}" if defect else ", no known defect"
        name = f"conditions that differ, of {tested}{why}"
        counts[name] = counts.get(name, 0) + 1
    return counts or {f"conditions that differ, of {tested}": 0}
