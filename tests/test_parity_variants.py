"""The parity lab over the variants: each alone and all together, their own planted faults, and what they promise."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from workbench.budgets import Configuration
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.engine

torch = pytest.importorskip("torch", reason="needs an engine")

if TYPE_CHECKING:
    from workbench.encoder.parity.lab import Lab

from workbench.encoder.parity.bisect import valid_rows  # noqa: E402 - needs an engine
from workbench.encoder.parity.faults import FAULTS  # noqa: E402 - needs an engine
from workbench.encoder.parity.faults.planting import changed_postprocess, changed_values  # noqa: E402 - needs an engine
from workbench.encoder.parity.lab import lab_options, open_lab  # noqa: E402 - needs an engine
from workbench.encoder.parity.matrix import (  # noqa: E402 - needs an engine
    Plan,
    bisect_fault,
    campaign,
    clean_runs,
    observe,
    run_matrix,
)
from workbench.encoder.parity.scenarios import SCENARIOS, video_manager  # noqa: E402 - needs an engine
from workbench.encoder.variants import names_for  # noqa: E402 - needs an engine

NAMES = names_for("ernie45_vl")
BUDGETS = (8, 32)
REPAIRS_D1 = {"fallback", "resampler"}
GLM_NAMES = names_for("glm4_1v")
OWN_FAULTS = [fault for fault in FAULTS.values() if fault.variants and "ernie45_vl" in fault.models]


@contextmanager
def opened(model: str, variants: Sequence[str]) -> "Iterator[Lab]":
    """A lab over a small encoder of two blocks and one head."""
    options, _ = lab_options(model, "cpu")
    small = dataclasses.replace(options, width=(options.width or 0) // 2)
    with open_lab(small, Configuration(BUDGETS, 4), variants=variants) as lab:
        yield lab


@pytest.fixture(scope="module")
def everything() -> "Iterator[Lab]":
    """All variants of ERNIE together."""
    with opened("ernie45_vl", NAMES) as lab:
        yield lab


@pytest.fixture(scope="module")
def fingerprint() -> str:
    """Of the inputs of a whole session without variants."""
    with opened("ernie45_vl", ()) as lab:
        return observe(lab, Plan()).inputs_fingerprint


@pytest.mark.parametrize("names", [*([name] for name in NAMES), list(NAMES)], ids="+".join)
def test_graphs_agree_with_eager_in_every_scenario(names: list[str], fingerprint: str) -> None:
    with opened("ernie45_vl", names) as lab:
        session = observe(lab, Plan())
    bad = {cell.scenario for cell in session.cells if cell.status in ("error", "mismatch", "hazard")}
    assert bad == (set() if REPAIRS_D1 & set(names) else {"oversize"})
    assert {finding.defect for finding in session.findings} == ({"D1"} if bad else set())
    videos = [cell for cell in session.cells if cell.scenario == "video"]
    assert {cell.status for cell in videos} <= ({"equal", "within_noise"} if "resampler" in names else {"not_tested"})
    assert session.variants == names
    assert session.exact == ("fused" not in names)
    items, same = (sum(getattr(cell, key) for cell in session.cells) for key in ("graph_items", "graph_equal"))
    assert items > 100
    assert same == items or not session.exact
    assert not session.promise_broken
    # A session without variants can so be compared with this one.
    assert session.inputs_fingerprint == fingerprint


def test_random_workloads_raise_no_alarm(everything: "Lab") -> None:
    runs = clean_runs(everything, 200, seed=3)
    assert (runs.workloads, runs.false_alarms) == (200, 0)
    assert runs.worst_ratio < 0.7


def test_the_offsets_of_glm_are_good_with_its_variant() -> None:
    statuses: list[set[str]] = []
    for names in ((), ("cu_seqlens_tail",), GLM_NAMES):
        with opened("glm4_1v", names) as lab:
            matrix = run_matrix(lab, ("image-beside-video", "video", "fills"))
            statuses.append({cell.status for cell in matrix.cells})
            defects = {finding.defect for finding in matrix.findings}
            assert defects == (set() if names else {"D6"})
            assert clean_runs(lab, 20, seed=1).false_alarms == 0
    assert "hazard" in statuses[0]
    assert statuses[1] | statuses[2] <= {"equal", "within_noise"}


def test_all_variants_of_glm_keep_the_bits_of_its_graph_in_every_scenario() -> None:
    with opened("glm4_1v", GLM_NAMES) as lab:
        session = observe(lab, Plan())
    assert not session.mismatched
    assert not session.findings
    items, same = (sum(getattr(cell, key) for cell in session.cells) for key in ("graph_items", "graph_equal"))
    assert session.exact
    assert same == items > 50


def test_under_the_conditions_of_cuda() -> None:
    """Padded rows hold NaN until they are written, host values are baked, and no two arms agree in every bit."""
    from tests.recorded_graphs import recorded_lab

    with recorded_lab("ernie45_vl", Configuration(BUDGETS, 4), NAMES) as lab:
        assert clean_runs(lab, 40, seed=5).false_alarms == 0
        names = tuple(name for name, scenario in SCENARIOS.items() if not scenario.child)
        statuses = {(cell.scenario, cell.status) for cell in run_matrix(lab, names).cells}
        # Of a tile that is read whole, as without variants (tests/test_recorded_graphs.py).
        assert {one for one in statuses if one[1] not in ("within_noise", "equal", "not_tested")} == {
            ("poisoned-padding", "hazard")
        }
        assert {result.status for result in campaign(lab, names=[fault.name for fault in OWN_FAULTS])} == {"caught"}
    own = [fault.name for fault in FAULTS.values() if "position_cache" in fault.variants]
    with recorded_lab("glm4_1v", Configuration(BUDGETS, 4), GLM_NAMES) as lab:
        matrix = run_matrix(lab, ("image-beside-video", "video"))
        assert {cell.status for cell in matrix.cells} == {"within_noise"}
        assert [result.status for result in campaign(lab, names=own)] == ["caught"]


# Planted faults -----------------------------------------------------------------------------------------------------


def test_faults_of_the_variants_are_caught_and_named(everything: "Lab") -> None:
    results = campaign(everything, names=[fault.name for fault in OWN_FAULTS])
    assert len(results) >= 7
    for result in results:
        assert result.status == "caught", result
    severities = {result.fault: result.severity for result in results}
    assert severities.pop("rows-left-behind") == "hazard"  # nothing reads them, yet
    assert set(severities.values()) == {"mismatch"}


def test_without_its_variant_a_fault_is_not_tested(everything: "Lab") -> None:
    with opened("ernie45_vl", ["fallback"]) as lab:
        results = campaign(lab, names=["metadata-stale", "keys-not-rotated"])
    assert {result.status for result in results} == {"not_tested"}
    assert "variant metadata_cache" in results[0].message
    (gone,) = campaign(everything, names=["block-skipped"])
    assert (gone.status, "variant fused" in gone.message) == ("not_tested", True)


def test_faults_of_the_variants_mend_themselves(everything: "Lab") -> None:
    logics = everything.manager.config.padding_logics
    before = dict(vars(everything.model)), dict(logics), dict(vars(everything.model.batch_cache))
    for fault in OWN_FAULTS:
        with fault.plant(everything):
            pass
    assert (dict(vars(everything.model)), dict(logics), dict(vars(everything.model.batch_cache))) == before


def test_frames_merged_with_the_wrong_partner_are_named(everything: "Lab") -> None:
    def change(values: dict[str, Any], _grids: list[list[int]]) -> None:
        values["temporal"] = values["temporal"][0::2].repeat_interleave(2)

    with changed_values(everything, change):
        matrix = run_matrix(everything, ("video", "fills"))
    assert {(finding.suspect, finding.scenario) for finding in matrix.findings} == {("frame_pairs", "video")}
    assert {cell.status for cell in matrix.cells if cell.scenario == "fills"} <= {"equal", "within_noise"}


@pytest.mark.parametrize(
    ("fault", "first"), [("residual-forgotten", "blocks.0"), ("keys-not-rotated", "blocks.0.attn")]
)
def test_bisection_looks_into_the_fused_tower(everything: "Lab", fault: str, first: str) -> None:
    found = bisect_fault(everything, fault)
    assert (found.first, found.rows) == (first, "valid")
    assert [stage.name for stage in found.stages][-2:] == ["tower", "resampler"]


def test_prefixes_of_the_fused_tower(everything: "Lab", monkeypatch: pytest.MonkeyPatch) -> None:
    """What acts during replays only stands in for what a CUDA graph has baked in; the smallest prefix is a block."""
    from workbench.encoder.parity.bisect import bisect_graph
    from workbench.encoder.static_replay import StaticReplay
    from workbench.encoder.variants.dataflow import KERNELS

    replaying: list[bool] = []
    kernels, original = everything.model.kernels, StaticReplay.replay

    def replay(self: Any) -> None:
        replaying.append(True)
        original(self)
        replaying.clear()

    def rotate(rows: Any, cos: Any, sin: Any) -> None:
        kernels.rotate(rows.flip(-1) if replaying else rows, cos, sin)  # a copy: rows stay as they were

    monkeypatch.setattr(StaticReplay, "replay", replay)
    changed = SimpleNamespace(**{name: getattr(kernels, name) for name in KERNELS} | {"rotate": rotate})
    monkeypatch.setattr(everything.model, "kernels", changed)
    seen = everything.observe([(1, 8, 10)], "prefix")
    assert {finding.suspect for finding in seen.findings} == {"replay"}
    found = bisect_graph(everything, seen.batches[0], "prefix")
    assert (found.arms, found.first, found.rows) == ("graph", "blocks.0", "valid")


def test_scenarios_leave_no_poison_to_those_behind_them(everything: "Lab") -> None:
    """Variant one_pass zeroes only what replays wrote, so what a scenario writes by itself it takes away again."""
    matrix = run_matrix(everything, ("poisoned-padding", "repeat", "poisoned-buffers", "repeat"))
    assert not matrix.findings
    assert {cell.status for cell in matrix.cells} <= {"equal", "within_noise"}


def test_half_of_a_videos_rows_are_left_behind_the_resampler(everything: "Lab") -> None:
    with video_manager(everything, 32):
        seen = everything.observe(everything.inputs([(4, 4, 4), (2, 4, 4)], "video"), "video")
        (batch,) = seen.batches
        assert batch.raw is not None
        assert valid_rows(everything, batch, len(batch.raw)) == sum(seen.call.tokens) == 12
        assert sum(everything.budget_tokens(seen.call, item) for item in batch.items) == 24


@pytest.mark.parametrize(("factor", "beyond"), [(1.004, False), (1.2, True)])
def test_bits_that_are_not_those_of_the_graph_break_a_promise(factor: float, beyond: bool) -> None:
    """Far below the noise floor only vLLM's own graph shows it."""

    def call(original: Callable[..., None], outputs: dict[str, Any], *args: Any) -> None:
        original({"default": outputs["default"] * factor}, *args)

    with opened("ernie45_vl", ["resampler", "one_pass"]) as lab, changed_postprocess(lab, call):
        session = observe(lab, Plan(scenarios=("fills",)))
    assert session.mismatched == beyond
    assert session.promise_broken
    named = {(finding.suspect, finding.severity) for finding in session.findings}
    assert named == {("postprocess", "mismatch") if beyond else ("variant", "hazard")}


# In a child process, and from a terminal -----------------------------------------------------------------------------


def test_a_child_that_is_no_fork_has_the_variants(everything: "Lab", monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.encoder.parity import child

    monkeypatch.setattr(child, "_can_fork", lambda _lab: False)
    part = child.run(everything, "oversize")
    assert [cell.status for cell in part.cells] in (["equal"], ["within_noise"])
    assert not part.findings


def test_the_verb(tmp_path: Path) -> None:
    from workbench.cli import app
    from workbench.parity import read_parity

    runner = CliRunner()
    base = ["parity", "--device", "cpu", "--budgets", "8,32", "--scenarios", "fills,oversize"]
    plain = runner.invoke(app, [*base, "--out", str(tmp_path / "plain"), "--json"])
    assert plain.exit_code == 1, plain.output  # D1
    changed = runner.invoke(
        app,
        [
            *base,
            "--variants",
            "fallback,one_pass",
            "--out",
            str(tmp_path / "changed"),
            "--against",
            str(tmp_path / "plain"),
        ],
    )
    assert changed.exit_code == 0, changed.output
    said = " ".join(changed.stderr.split())
    assert "plain was made without variants, changed with one_pass, fallback" in said
    assert "oversize: error before, equal now" in said
    assert "variants one_pass, fallback" in " ".join(changed.stdout.split())
    assert read_parity(tmp_path / "changed").variants == ["one_pass", "fallback"]
    back = runner.invoke(app, [*base, "--against", str(tmp_path / "changed"), "--json"])
    assert back.exit_code == 1, back.output  # worse than with them
    assert json.loads(back.stdout)["variants"] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--variants", "rotary"], "'rotary' names no variant of ernie45_vl"),
        (["--variants", "cu_seqlens_tail"], "names no variant of ernie45_vl"),
        (["--variants", "fused,fused"], "named twice"),
        (["--variants", ","], "an empty list"),
        (["--model", "qwen3_vl", "--variants", "all"], "no variants of qwen3_vl"),
        (["--width", "0"], "width 0"),
    ],
)
def test_names_that_are_refused(words: list[str], reason: str) -> None:
    from workbench.cli import app

    refused = CliRunner().invoke(app, ["parity", "--device", "cpu", *words])
    assert isinstance(refused.exception, WorkbenchError)
    assert reason in str(refused.exception)
