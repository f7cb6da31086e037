"""The stored form of a parity session, its sentences and tables; no engine."""

from pathlib import Path

import msgspec
import pytest

from workbench.environment import environment
from workbench.errors import WorkbenchError
from workbench.models import MODELS
from workbench.parity import (
    PARITY_FILE,
    SCHEMA_VERSION,
    SUSPECTS,
    Campaign,
    Cell,
    CleanRuns,
    Difference,
    FaultResult,
    Finding,
    Noise,
    Parity,
    Status,
    Visibility,
    changes,
    changes_sentence,
    compared_variants,
    coverage_rows,
    encode,
    fault_document,
    fault_rows,
    matrix_rows,
    read_parity,
    recorded,
    suspect_of,
    verdict,
    without_variants,
    worst_status,
)
from workbench.run import ConfigRecord, ModelRecord

NOISE = Noise(
    items=9,
    composition_rms=0.001,
    composition_worst_row=0.001,
    reference_rms=0.008,
    reference_worst_row=0.01,
    graph_reference_rms=0.008,
    factor=3.0,
    limit_rms=0.024,
    limit_worst_row=0.03,
)


def finding(suspect: str, severity: str = "mismatch", defect: str | None = None) -> Finding:
    return Finding(
        suspect=suspect,
        severity=severity,  # type: ignore[arg-type]
        scenario="oversize",
        budget=None,
        message="seen",
        defect=defect,
    )


def session(cells: list[Cell], findings: list[Finding] | None = None) -> Parity:
    return Parity(
        schema_version=SCHEMA_VERSION,
        workbench="0",
        created="2026-11-29T00:00:00+00:00",
        name="made up",
        replay="static_replay",
        environment=environment(),
        model=ModelRecord(
            key="ernie45_vl",
            architecture="Ernie",
            depth=2,
            width=160,
            dtype="bfloat16",
            attention_backend="TORCH_SDPA",
            weights="dummy seed 0",
            weights_fingerprint="a",
            out_width=320,
        ),
        config=ConfigRecord(
            requested_budgets=[16],
            requested_max_items=4,
            requested_max_frames=None,
            budgets=[16],
            max_items=4,
            max_frames=0,
        ),
        inputs_fingerprint="b",
        seed=0,
        noise=NOISE,
        visibility=Visibility(attention_removed=0.3, rotary_swapped=0.2, attention_ratio=32, rotary_ratio=27),
        cells=cells,
        items=[],
        findings=findings or [],
        bisections=[],
        proxy=None,
        proxy_noise=None,
        faults=[],
        clean=None,
        not_tested=[],
        seconds=1.0,
    )


def fault(name: str, status: str, model: str = "ernie45_vl", needs: str = "cpu") -> FaultResult:
    return FaultResult(
        fault=name,
        title=name,
        model=model,
        needs=needs,  # type: ignore[arg-type]
        expected=["replay"],
        status=status,  # type: ignore[arg-type]
        suspect="replay" if status == "caught" else None,
        scenarios=["fills", "mixed"] if status == "caught" else [],
    )


def test_round_trip(tmp_path: Path) -> None:
    made = session([Cell(scenario="fills", budget=16, status="equal", calls=5, items=6, bit_equal=6, ratio=0.0)])
    (tmp_path / PARITY_FILE).write_bytes(encode(made))
    assert read_parity(tmp_path) == made
    assert b"NaN" not in encode(made)


def test_other_schema_and_no_session_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=r"holds no parity\.json"):
        read_parity(tmp_path)
    (tmp_path / PARITY_FILE).write_bytes(encode(msgspec.structs.replace(session([]), schema_version=99)))
    with pytest.raises(WorkbenchError, match="schema version 99"):
        read_parity(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"inputs_fingerprint": "c"}, "inputs"), ({"seed": 1}, "seed"), ({"model": "weights"}, "weights")],
)
def test_sessions_with_other_inputs_or_weights_are_refused(change: dict[str, object], reason: str) -> None:
    a = session([])
    if "model" in change:
        change = {"model": msgspec.structs.replace(a.model, weights_fingerprint="other")}
    assert changes(a, a) == []
    with pytest.raises(WorkbenchError, match=f"another {reason}"):
        changes(a, msgspec.structs.replace(a, **change))


def test_changes_name_what_got_worse_and_better() -> None:
    before = session(
        [
            Cell(scenario="fills", budget=16, status="equal"),
            Cell(scenario="oversize", budget=None, status="error"),
            Cell(scenario="mixed", budget=None, status="equal"),
        ]
    )
    after = session(
        [
            Cell(scenario="fills", budget=16, status="mismatch"),
            Cell(scenario="oversize", budget=None, status="equal"),
            Cell(scenario="mixed", budget=None, status="equal"),
        ]
    )
    worse, better = changes(before, after)
    assert (worse.scenario, worse.before, worse.after, worse.worse) == ("fills", "equal", "mismatch", True)
    assert (better.scenario, better.worse) == ("oversize", False)


def test_a_session_with_variants_is_compared_with_one_without() -> None:
    """What was not tested before is worse only where it fails; rounding is, unless a variant rounds by design."""

    def cells(*statuses: Status) -> list[Cell]:
        names = ("fills", "mixed", "video", "oversize")
        return [Cell(scenario=name, budget=None, status=each) for name, each in zip(names, statuses, strict=True)]

    before = session(cells("equal", "equal", "not_tested", "not_tested"))
    after = msgspec.structs.replace(
        before,
        name="changed",
        cells=cells("within_noise", "hazard", "equal", "error"),
        variants=["fused"],
        exact=False,
    )
    assert [change.worse for change in changes(before, after)] == [False, True, False, True]
    exact = msgspec.structs.replace(after, exact=True)
    assert [change.worse for change in changes(before, exact)] == [True, True, False, True]
    assert [change.worse for change in changes(after, exact)] == []
    assert compared_variants(before, after) == "made up was made without variants, changed with fused"
    assert compared_variants(after, exact) == ""


def test_verdict_names_the_variants_and_what_has_the_bits_of_the_graph() -> None:
    cell = Cell(scenario="fills", budget=16, status="equal", items=6, bit_equal=6, graph_items=5, graph_equal=4)
    one = msgspec.structs.replace(session([cell]), variants=["resampler"])
    assert "with TORCH_SDPA, variant resampler, static" in verdict(one)
    assert verdict(one).endswith("4 of 5 to vLLM's own graph at the same budget.")
    assert one.promise_broken
    assert not msgspec.structs.replace(one, exact=False).promise_broken
    assert "variants resampler, fused, static" in verdict(msgspec.structs.replace(one, variants=["resampler", "fused"]))


def test_a_session_of_before_there_were_variants_is_read(tmp_path: Path) -> None:
    stored = msgspec.json.decode(encode(session([Cell(scenario="fills", budget=16, status="equal")])))
    for name in ("variants", "exact"):
        del stored[name]
    for name in ("graph_items", "graph_equal"):
        del stored["cells"][0][name]
    (tmp_path / PARITY_FILE).write_bytes(msgspec.json.encode(stored))
    read = read_parity(tmp_path)
    assert (read.variants, read.exact, read.promise_broken) == ([], True, False)


def test_verdict_counts_conditions_and_names_the_defect() -> None:
    good = Cell(scenario="fills", budget=16, status="equal", items=6, bit_equal=6)
    bad = Cell(scenario="oversize", budget=None, status="error", reason="RuntimeError")
    skipped = Cell(scenario="video", budget=16, status="not_tested")
    agree = session([good, skipped])
    assert not agree.mismatched
    assert "agree in all 1 conditions" in verdict(agree)
    part = session([good, bad, skipped], [finding("fallback", defect="D1")])
    assert part.mismatched
    assert "part in 1 of 2 conditions, in oversize (known defect D1)" in verdict(part)
    assert "nothing was tested" in verdict(session([skipped]))


def test_matrix_rows_show_how_far_a_mismatch_is() -> None:
    worst = Difference(
        tokens=4, bit_equal=False, finite=True, max_abs=1.0, relative_rms=0.1, worst_row=0.2, min_cosine=0.99
    )
    rows = matrix_rows(
        session(
            [
                Cell(scenario="fills", budget=16, status="mismatch", ratio=4.2, worst=worst),
                Cell(scenario="mixed", budget=None, status="equal", ratio=0.0),
            ]
        )
    )
    assert rows == [
        {"scenario": "fills", "16": "MISMATCH 4.2", "all": ""},
        {"scenario": "mixed", "16": "", "all": "equal"},
    ]


def test_the_first_suspect_is_a_mismatch_early_in_the_data_flow() -> None:
    assert suspect_of([]) is None
    found = suspect_of([finding("replay"), finding("cu_seqlens"), finding("budget", "hazard")])
    assert found is not None
    assert found.suspect == "cu_seqlens"
    assert list(SUSPECTS).index("cu_seqlens") < list(SUSPECTS).index("attention") < list(SUSPECTS).index("output")


def test_worst_status_ignores_what_was_not_tested() -> None:
    assert worst_status(["equal", "not_tested", "hazard"]) == "hazard"
    assert worst_status(["not_tested"]) == "not_tested"
    assert worst_status(["mismatch", "error"]) == "error"


def test_fault_table_takes_recordings_where_the_live_machine_cannot_test() -> None:
    campaign = Campaign(
        replay="static_replay",
        results=[fault("order", "caught"), fault("baked", "not_tested", needs="cuda")],
        clean={"ernie45_vl": CleanRuns(workloads=5, items=20, false_alarms=0, worst_ratio=0.1, seed=0)},
    )
    assert campaign.passed
    recording = msgspec.structs.replace(
        session([]), replay="cuda_graph", faults=[fault("order", "missed"), fault("baked", "caught", needs="cuda")]
    )
    order, baked = fault_rows(campaign, [recording])
    assert order["ernie45_vl"] == "caught, GPU missed"
    assert baked["ernie45_vl"] == "GPU caught"
    assert (baked["suspect"], baked["seen in"]) == ("replay", "fills, mixed")
    document = fault_document(campaign, [recording])
    assert "* CPU: 1 of 1 planted faults caught" in document
    assert ": 1 of 2 planted faults caught" in document
    assert document.count("| baked |") == 1


def test_a_missed_fault_or_a_false_alarm_fails_the_campaign() -> None:
    clean = {"ernie45_vl": CleanRuns(workloads=5, items=20, false_alarms=1, worst_ratio=2.0, seed=0)}
    assert not Campaign(replay="static_replay", results=[fault("a", "missed")], clean={}).passed
    assert not Campaign(replay="static_replay", results=[fault("a", "misnamed")], clean={}).passed
    assert not Campaign(replay="static_replay", results=[fault("a", "caught")], clean=clean).passed


def test_coverage_counts_faults_per_scenario() -> None:
    alone = msgspec.structs.replace(fault("held result", "caught"), scenarios=["retained"])
    campaign = Campaign(
        replay="static_replay", results=[fault("order", "caught"), alone, fault("baked", "not_tested")], clean={}
    )
    rows = {row["scenario"]: row for row in coverage_rows(campaign, [])}
    assert rows["fills"]["faults it sees"] == "1 of 2"
    assert rows["retained"]["seen by it alone"] == "held result"
    assert rows["fills"]["seen by it alone"] == ""


def test_shipped_recordings_are_readable() -> None:
    for parity in recorded():
        assert parity.replay == "cuda_graph"
        assert parity.cells


def test_a_session_with_variants_is_shown_beside_the_one_without() -> None:
    d6 = finding("cu_seqlens", defect="D6")
    cells = [Cell(scenario="fills", budget=16, status="equal"), Cell(scenario="image", budget=16, status="mismatch")]
    plain = session(cells, [d6])
    fixed = msgspec.structs.replace(
        plain, name="fixed", variants=["cu_seqlens_tail"], findings=[],
        cells=[cells[0], msgspec.structs.replace(cells[1], status="equal")],
    )  # fmt: skip
    other = msgspec.structs.replace(plain, inputs_fingerprint="other")
    assert without_variants(fixed, [fixed, other, plain]) == plain
    assert without_variants(fixed, [fixed, other]) is None
    assert without_variants(plain, [fixed, plain]) is None
    told = changes_sentence(plain, fixed)
    assert told == f"**fixed** beside *{plain.name}*: of 2 conditions 1 changed, none for the worse; D6 is gone."
    assert changes_sentence(fixed, plain).endswith("of 2 conditions 1 changed, 1 for the worse.")


def test_recordings_are_found_by_model() -> None:
    assert {one.model.key for one in recorded("glm4_1v")} == {"glm4_1v"}
    assert recorded("nonsense") == []
    assert len(recorded()) == sum(len(recorded(key)) for key in MODELS)
