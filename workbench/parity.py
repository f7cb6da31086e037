"""What the parity lab found: the stored form, readable without torch.

    RUN/parity.json   this schema, beside or without a run.json

The lab itself is `workbench.encoder.parity`; figures are in `workbench.views.parity`.
"""

from pathlib import Path
from typing import Literal

import msgspec

from workbench.decision import ProxyFlips
from workbench.errors import WorkbenchError
from workbench.files import read_versioned
from workbench.run import RECORDINGS, ConfigRecord, Environment, ModelRecord, Record, Replay

SCHEMA_VERSION = 1
PARITY_FILE = "parity.json"
MANY = 3  # scenarios that a table of faults still names one by one

# Worst first. `hazard`: outputs agree, but something was seen that another input or kernel turns into a mismatch.
Status = Literal["error", "mismatch", "hazard", "within_noise", "equal", "not_tested"]
STATUSES: tuple[Status, ...] = ("error", "mismatch", "hazard", "within_noise", "equal", "not_tested")
Severity = Literal["mismatch", "hazard"]

# The part of the encoder or its manager that a finding points at, in the order in which data passes through them.
# When one fault shows in several, the first is the suspect.
SUSPECTS: dict[str, str] = {
    "inputs": "the arms were given different inputs",
    "weights": "the weights changed between the arms",
    "budget": "choice of the token budget, or graphs never used",
    "selection": "choice and order of the items of one replay",
    "pixel_values": "copy of the pixel rows into the replay buffer",
    "positions": "rotary or position embeddings in the replay buffer",
    "frame_pairs": "rows that a resampler inside the graph merges in time, in the replay buffer",
    "cu_seqlens": "sequence offsets in the replay buffer, padding included",
    "max_seqlen": "longest sequence baked into the graph at capture",
    "padding": "rows behind the valid ones in an input buffer are not zero",
    "patch_embed": "patch embedding and what precedes the first block",
    "attention": "attention of a block",
    "mlp": "MLP of a block",
    "blocks": "residual path or output of a block",
    "head": "what follows the last block inside the graph",
    "replay": "the graph's replay: baked values, captured addresses, memory written by others",
    "postprocess": "splitting, resampling and ordering of a replay's rows",
    "variant": "a variant that promises the bits of vLLM's graph gives others",
    "output": "an output that a later call overwrites",
    "fallback": "the eager fallback of an item above the largest budget",
}


class Difference(Record, frozen=True):
    """One item's output against its reference, both (tokens, width).

    Attributes:
        relative_rms: RMS of the difference over the RMS of the reference.
        worst_row: the largest row RMS of the difference over the RMS of the whole reference.
        min_cosine: smallest cosine between two rows; informative only, no verdict rests on it.
        None where a value is not finite.
    """

    tokens: int
    bit_equal: bool
    finite: bool
    max_abs: float | None
    relative_rms: float | None
    worst_row: float | None
    min_cosine: float | None


class Noise(Record, frozen=True):
    """What rounding alone does to these inputs: the yardstick of every verdict.

    Attributes:
        composition_rms, composition_worst_row: eager as served, items together against each alone; worst item.
        reference_rms, reference_worst_row: eager as served against the same encoder in float32; worst item.
        graph_reference_rms: graph against float32; worst item. As far from the truth as eager, if all is well.
        limit_rms, limit_worst_row: `factor` times the larger floor; beyond it is a mismatch.
        stages: the larger floor (relative RMS, worst row) at the output of each module inside the encoder.
    """

    items: int
    composition_rms: float
    composition_worst_row: float
    reference_rms: float
    reference_worst_row: float
    graph_reference_rms: float | None
    factor: float
    limit_rms: float
    limit_worst_row: float
    stages: dict[str, tuple[float, float]] = {}


class Visibility(Record, frozen=True):
    """Whether these weights can show a fault: relative RMS of two grave faults, and over the noise floor."""

    attention_removed: float
    rotary_swapped: float
    attention_ratio: float
    rotary_ratio: float


class Finding(Record, frozen=True):
    """One thing that is not as it must be. `suspect` is a key of `SUSPECTS`."""

    suspect: str
    severity: Severity
    scenario: str
    budget: int | None
    message: str
    defect: str | None = None  # a defect of docs/defects.md such as "D6"


class ItemResult(Record, frozen=True):
    """One item of one call in one scenario: graph against eager as served, and eager on the padded buffers."""

    scenario: str
    budget: int | None
    call: int
    item: int
    modality: Literal["image", "video"]
    grid: tuple[int, int, int]
    status: Status
    graph: Difference
    padded: Difference | None


class Cell(Record, frozen=True):
    """One scenario at one budget; `budget` None is a scenario that spans budgets.

    Attributes:
        ratio: worst relative RMS or worst row over its limit; above 1 is a mismatch. None when nothing is finite.
        reason: why it was not tested, or the error.
        graph_items, graph_equal: with variants, the items that vLLM's own graph replays in the same budget too, and how
            many have its bits.
    """

    scenario: str
    budget: int | None
    status: Status
    calls: int = 0
    items: int = 0
    bit_equal: int = 0
    ratio: float | None = None
    worst: Difference | None = None
    reason: str = ""
    graph_items: int = 0
    graph_equal: int = 0


class Stage(Record, frozen=True):
    """Output of one module, graph path against eager as served.

    Attributes:
        relative_rms, worst_row, finite: on the valid rows.
        padded_max_abs, padded_finite: on the rows behind them, None when there are none.
    """

    name: str
    relative_rms: float | None
    worst_row: float | None
    finite: bool
    padded_max_abs: float | None
    padded_finite: bool | None


class Bisection(Record, frozen=True):
    """Where two arms part.

    Attributes:
        arms: "padded" (eager on the padded buffers, by hooks) or "graph" (by capturing prefixes of the blocks).
        first: first stage beyond the limit, None when there is none.
        rows: where it starts.
    """

    scenario: str
    budget: int
    arms: Literal["padded", "graph"]
    first: str | None
    rows: Literal["valid", "padded"] | None
    stages: list[Stage]


class FaultResult(Record, frozen=True):
    """One planted fault.

    Attributes:
        needs: "cpu" (any machine) or "cuda".
        expected: suspects of which one must be named.
        status: "caught" needs a finding and the right suspect; "misnamed" is a finding with another one.
        scenarios: which found it.
        ratio: worst output over its limit; below 1 the fault was seen in the buffers, not in the outputs. None when an
            output was not finite or of another shape, or a call failed.
    """

    fault: str
    title: str
    model: str
    needs: Literal["cpu", "cuda"]
    expected: list[str]
    status: Literal["caught", "misnamed", "missed", "not_tested"]
    suspect: str | None = None
    severity: Severity | None = None
    scenarios: list[str] = []
    ratio: float | None = None
    message: str = ""


class CleanRuns(Record, frozen=True):
    """Random workloads on the unchanged code: a finding there is a false alarm."""

    workloads: int
    items: int
    false_alarms: int
    worst_ratio: float
    seed: int


class Parity(Record, frozen=True):
    """A whole session of the lab.

    Attributes:
        inputs_fingerprint: SHA-256 over all inputs in order, without those of a modality that only a variant has graphs
            for. The fingerprint in `model` is over all weights.
        variants: of the encoder whose graphs were observed (`workbench.encoder.variants`); eager is always vLLM's.
        exact: the variants promise the bits of vLLM's graph; where one does not, "within_noise" is all that is asked.
    """

    schema_version: int
    workbench: str
    created: str  # ISO 8601, UTC
    name: str
    replay: Replay
    environment: Environment
    model: ModelRecord
    config: ConfigRecord
    inputs_fingerprint: str
    seed: int
    noise: Noise
    visibility: Visibility
    cells: list[Cell]
    items: list[ItemResult]
    findings: list[Finding]
    bisections: list[Bisection]
    proxy: ProxyFlips | None  # graph against eager as served; None when the graph failed
    proxy_noise: ProxyFlips | None  # eager as served, items together against each alone
    faults: list[FaultResult]
    clean: CleanRuns | None
    not_tested: list[str]
    seconds: float
    notes: list[str] = []
    variants: list[str] = []
    exact: bool = True

    @property
    def promise_broken(self) -> bool:
        """The variants promise the bits of vLLM's graph, and some outputs have others."""
        return self.exact and any(cell.graph_equal < cell.graph_items for cell in self.cells)

    @property
    def mismatched(self) -> bool:
        """The graph changes what the model sees, or fails."""
        return any(cell.status in ("error", "mismatch") for cell in self.cells)


class Campaign(Record, frozen=True):
    """Planted faults and clean random workloads on several encoders; `clean` by model key."""

    replay: Replay
    results: list[FaultResult]
    clean: dict[str, CleanRuns]

    @property
    def passed(self) -> bool:
        """Every fault that can be tested here is caught under the right name, without a false alarm."""
        return all(result.status in ("caught", "not_tested") for result in self.results) and not any(
            runs.false_alarms for runs in self.clean.values()
        )


def suspect_of(findings: list[Finding]) -> Finding | None:
    """Return the finding to look at first: mismatches before hazards, then the order of `SUSPECTS`."""
    order = list(SUSPECTS)
    return min(findings, key=lambda f: (f.severity != "mismatch", order.index(f.suspect)), default=None)


def worst_status(statuses: list[Status]) -> Status:
    """Return the worst of `statuses`, "not_tested" for none; what was not tested never hides what was."""
    tested = [status for status in statuses if status != "not_tested"]
    return min(tested, key=STATUSES.index, default="not_tested")


def read_parity(folder: Path) -> Parity:
    """Read `folder/parity.json`.

    Raises:
        WorkbenchError: none there, or one of another schema version.
    """
    path = folder / PARITY_FILE
    if not path.is_file():
        raise WorkbenchError(f"{folder} holds no {PARITY_FILE}; make one with `workbench parity --out {folder}`")
    return read_versioned(path, Parity, SCHEMA_VERSION, "so measure again")


class Change(Record, frozen=True):
    """A cell whose status is not what it was in an earlier session.

    Attributes:
        noise_expected: the later session has a variant that rounds differently by design.
    """

    scenario: str
    budget: int | None
    before: Status
    after: Status
    noise_expected: bool = False

    @property
    def worse(self) -> bool:
        """The graph is further from eager than it was; or it fails in what was not tested before."""
        if self.before == "not_tested" or (self.noise_expected and self.before == "equal"):
            return STATUSES.index(self.after) < STATUSES.index("within_noise")
        return STATUSES.index(self.after) < STATUSES.index(self.before)


def changes(before: Parity, after: Parity) -> list[Change]:
    """Compare two sessions of the same weights and inputs cell by cell.

    One may have other variants than the other: what these change is then what is compared.

    Raises:
        WorkbenchError: another model, weights, inputs (scenarios, budgets) or seed: then a change says nothing.
    """
    for name, left, right in (
        ("model", before.model.key, after.model.key),
        ("weights", before.model.weights_fingerprint, after.model.weights_fingerprint),
        ("seed", before.seed, after.seed),
        ("inputs", before.inputs_fingerprint, after.inputs_fingerprint),
    ):
        if left != right:
            raise WorkbenchError(
                f"{before.name} and {after.name} have another {name} ({left!r} and {right!r}); run both with the same"
            )
    old = {(cell.scenario, cell.budget): cell.status for cell in before.cells}
    return [
        Change(
            scenario=cell.scenario,
            budget=cell.budget,
            before=old[cell.scenario, cell.budget],
            after=cell.status,
            noise_expected=before.exact and not after.exact,
        )
        for cell in after.cells
        if old.get((cell.scenario, cell.budget), cell.status) != cell.status
    ]


def compared_variants(before: Parity, after: Parity) -> str:
    """Say which variants two compared sessions have, "" where they have the same."""
    if set(before.variants) == set(after.variants):
        return ""
    with_or_without = [
        f"with {', '.join(one.variants)}" if one.variants else "without variants" for one in (before, after)
    ]
    return f"{before.name} was made {with_or_without[0]}, {after.name} {with_or_without[1]}"


def verdict(parity: Parity) -> str:
    """Return one sentence: whether the graph changes what the model sees, and where."""
    tested = [cell for cell in parity.cells if cell.status != "not_tested"]
    bad = [cell for cell in tested if cell.status in ("error", "mismatch")]
    how = "CUDA graphs" if parity.replay == "cuda_graph" else "static replays on the CPU"
    named = f", variant{'s' * (len(parity.variants) > 1)} {', '.join(parity.variants)}" if parity.variants else ""
    base = f"{parity.model.architecture} with {parity.model.attention_backend}{named}, {how}"
    if not tested:
        return f"{base}: nothing was tested."
    same = sum(cell.bit_equal for cell in tested)
    items = sum(cell.items for cell in tested)
    rest = f"{same} of {items} compared items are bit-equal to eager as served" if items else "no item was compared"
    graph_items = sum(cell.graph_items for cell in tested)
    if graph_items:
        rest += f", {sum(cell.graph_equal for cell in tested)} of {graph_items} to vLLM's own graph at the same budget"
    hazards = sum(cell.status == "hazard" for cell in tested)
    note = f", {hazards} of them with a hazard" if hazards else ""
    if not bad:
        return f"{base}: graph and eager agree in all {len(tested)} conditions{note}; {rest}."
    names = list(dict.fromkeys(cell.scenario for cell in bad))
    defects = sorted({finding.defect for finding in parity.findings if finding.defect and finding.scenario in names})
    known = f" (known defect{'s' * (len(defects) > 1)} {', '.join(defects)})" if defects else ""
    others = len(tested) - len(bad)
    agree = f"in the {others} others they agree{note}; " if others else ""
    return (
        f"{base}: graph and eager part in {len(bad)} of {len(tested)} conditions, in {', '.join(names)}{known}; "
        f"{agree}{rest}."
    )


STATUS_WORDS: dict[Status, str] = {
    "error": "error",
    "mismatch": "MISMATCH",
    "hazard": "hazard",
    "within_noise": "noise",
    "equal": "equal",
    "not_tested": "-",
}


def matrix_rows(parity: Parity) -> list[dict[str, str]]:
    """Return the matrix as rows of text: one per scenario, one column per budget, and one for what spans budgets.

    A cell is its status, and where outputs are not bit-equal the worst distance over its limit.
    """
    budgets = sorted({cell.budget for cell in parity.cells if cell.budget is not None})
    rows: dict[str, dict[str, str]] = {}
    for cell in parity.cells:
        row = rows.setdefault(
            cell.scenario, {"scenario": cell.scenario} | {str(budget): "" for budget in budgets} | {"all": ""}
        )
        ratio = f" {cell.ratio:.2g}" if cell.ratio and cell.status != "equal" else ""
        row[str(cell.budget) if cell.budget is not None else "all"] = f"{STATUS_WORDS[cell.status]}{ratio}"
    return list(rows.values())


def campaign_sentence(campaign: Campaign) -> str:
    """Say how many faults were caught and how often the lab cried wolf."""
    return _counts(campaign.results, list(campaign.clean.values()))


def recorded_sentence(parity: Parity) -> str:
    """Say the same of a recorded session."""
    where = ", ".join([_gpu(parity), parity.model.architecture, parity.model.attention_backend, *parity.variants])
    return f"{where}: {_counts(parity.faults, [parity.clean] if parity.clean else [])}"


def _counts(results: list[FaultResult], clean: list[CleanRuns]) -> str:
    tested = [result for result in results if result.status != "not_tested"]
    caught = sum(result.status == "caught" for result in tested)
    alarms, workloads = sum(runs.false_alarms for runs in clean), sum(runs.workloads for runs in clean)
    kinds = len({result.fault for result in tested})
    said = f"{caught} of {len(tested)} planted faults caught under the right name ({kinds} different ones)"
    return (
        f"{said if tested else 'no faults planted'}; {alarms} false alarms in {workloads} random workloads without one."
    )


def recorded(model: str | None = None) -> list[Parity]:
    """Return the parity sessions that ship with the package, by folder name; of `model` alone where it is given."""
    found = [read_parity(path.parent) for path in sorted(RECORDINGS.glob(f"*/{PARITY_FILE}"))]
    return [session for session in found if model in (None, session.model.key)]


def without_variants(session: Parity, others: list[Parity]) -> Parity | None:
    """Return the session of `others` that differs from `session` in having no variants, for `changes`; None: none."""
    if not session.variants:
        return None
    return next((other for other in others if not other.variants and _alike(other) == _alike(session)), None)


def _alike(session: Parity) -> tuple[str | int, ...]:
    model = session.model
    return (model.weights_fingerprint, model.attention_backend, session.inputs_fingerprint, session.seed)


def changes_sentence(before: Parity, after: Parity) -> str:
    """Say how many conditions are better and worse in `after` than in `before`, and which known defects are gone.

    Raises:
        WorkbenchError: see `changes`.
    """
    moved = changes(before, after)
    worse = sum(change.worse for change in moved)
    gone = sorted({f.defect for f in before.findings if f.defect} - {f.defect for f in after.findings})
    tested = sum(cell.status != "not_tested" for cell in after.cells)
    text = f"**{after.name}** beside *{before.name}*: of {tested} conditions {len(moved)} changed"
    text += f", {worse or 'none'} for the worse"
    return f"{text}; {' and '.join(gone)} {'are' if len(gone) > 1 else 'is'} gone." if gone else f"{text}."


def fault_rows(campaign: Campaign, recordings: list[Parity]) -> list[dict[str, str]]:
    """Return one row per fault: where and by what it was caught, live and in the shipped recordings.

    A recording speaks where the live machine could not test, and where it did not catch what that one did.
    """
    rows: dict[str, dict[str, str]] = {}
    models = list(dict.fromkeys(result.model for result in campaign.results))
    results = [(result, "") for result in campaign.results]
    results += [
        (result, f"{_gpu(parity)} ")
        for parity in recordings
        if parity.replay == "cuda_graph"
        for result in parity.faults
        if result.status != "not_tested"
    ]
    for result, place in results:
        row = rows.setdefault(
            result.fault,
            {"fault": result.title, "needs": result.needs, "suspect": ""} | dict.fromkeys(models, "") | {"seen in": ""},
        )
        if result.model not in row:
            continue
        if place and row[result.model] not in ("", "-"):
            if result.status != "caught":
                row[result.model] += f", {place}{result.status}"
            continue
        row[result.model] = f"{place}{result.status}" if result.status != "not_tested" else "-"
        row["suspect"] = row["suspect"] or (result.suspect or "")
        row["seen in"] = row["seen in"] or ", ".join(result.scenarios)
    return [row | {model: row[model] or "-" for model in models} for row in rows.values()]


def _gpu(parity: Parity) -> str:
    return parity.environment.gpus[0].name if parity.environment.gpus else "GPU"


def coverage_rows(campaign: Campaign, recordings: list[Parity]) -> list[dict[str, str]]:
    """Return one row per scenario: how many of the planted faults it sees, and which no other scenario sees."""
    seen: dict[str, set[str]] = {}
    titles: dict[str, str] = {}
    recorded_results = [result for parity in recordings for result in parity.faults]
    for result in [*campaign.results, *recorded_results]:
        if result.status != "not_tested":
            titles[result.fault] = result.title
            seen.setdefault(result.fault, set()).update(result.scenarios)
    rows = []
    for name in sorted({name for names in seen.values() for name in names}):
        alone = [titles[fault] for fault, names in seen.items() if names == {name}]
        count = sum(name in names for names in seen.values())
        rows.append(
            {"scenario": name, "faults it sees": f"{count} of {len(seen)}", "seen by it alone": "; ".join(alone)}
        )
    return rows


DETAILS = "## Every fault"


def fault_document(campaign: Campaign, recordings: list[Parity]) -> str:
    """Return the Markdown file of `make faults`: a sentence, the coverage by scenario, then every fault."""
    faults = fault_rows(campaign, recordings)
    scenarios = len(coverage_rows(campaign, recordings))
    counts = "\n".join(
        [
            f"* CPU: {campaign_sentence(campaign)}",
            *(f"* {recorded_sentence(parity)}" for parity in recordings if parity.faults),
        ]
    )
    for row in faults:
        names = row["seen in"].split(", ")
        row["seen in"] = row["seen in"] if len(names) <= MANY else f"{len(names)} of {scenarios} scenarios"
    return (
        "# Planted faults\n\n"
        "Made by `make faults` on the CPU, with static replays. Recordings speak where those cannot show a fault, and "
        "where a GPU did not catch what the CPU did.\n\n"
        f"{counts}\n\n{_markdown(coverage_rows(campaign, recordings))}\n\n"
        f"{DETAILS}\n\n{_markdown(faults)}\n"
    )


def _markdown(rows: list[dict[str, str]]) -> str:
    heads = list(rows[0]) if rows else []
    lines = [heads, ["---"] * len(heads), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def encode(parity: Parity) -> bytes:
    """Return the JSON of `parity`, indented."""
    return msgspec.json.format(msgspec.json.encode(parity), indent=1) + b"\n"
