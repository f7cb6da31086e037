"""The linter: every rule has a planted fault that it finds and a clean input that it leaves alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.runs import make_run
from workbench.budgets import Configuration, Limits, resolve
from workbench.cli import app
from workbench.costs import CostModel, CostProfile, EagerPoint, MemoryPoint, ReplayPoint, TailPoint
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.lint import RULES, Finding, Ints, lint
from workbench.models import ModelFacts, model_facts
from workbench.shapes import captured_shapes

ERNIE, GLM = model_facts("ernie45_vl"), model_facts("glm4_1v")
IMAGES_ONLY = Limits.of(GLM, video_limit=0)


@dataclass(frozen=True)
class Calls:
    """A workload of items (tokens, frames, is video) in calls."""

    calls: tuple[tuple[tuple[int, int, bool], ...], ...]

    @property
    def tokens(self) -> Ints:
        return np.array([tokens for call in self.calls for tokens, _, _ in call], np.int64)

    @property
    def offsets(self) -> Ints:
        return np.cumsum([0, *(len(call) for call in self.calls)])

    @property
    def frames(self) -> Ints:
        return np.array([frames for call in self.calls for _, frames, _ in call], np.int64)

    @property
    def is_video(self) -> Any:
        return np.array([video for call in self.calls for _, _, video in call], np.bool_)


def images(*calls: list[int]) -> Calls:
    """Return calls of images by their tokens."""
    return Calls(tuple(tuple((tokens, 1, False) for tokens in call) for call in calls))


def videos(*calls: list[tuple[int, int]]) -> Calls:
    """Return calls of videos by tokens and frames."""
    return Calls(tuple(tuple((tokens, frames, True) for tokens, frames in call) for call in calls))


def budgets(*given: int, items: int = 4, frames: int | None = None) -> Configuration:
    """Return a configuration."""
    return Configuration(given, items, frames)


@dataclass(frozen=True)
class Case:
    """A question to the linter and the finding it must or must not give."""

    rule: str
    facts: ModelFacts
    configuration: Configuration
    limits: Limits | None = None
    traffic: Calls | None = None
    severity: str | None = None
    budget: int | None = None

    def findings(self) -> list[Finding]:
        """Return the findings of the case's rule."""
        report = lint(self.facts, self.configuration, self.limits, self.traffic)
        return [finding for finding in report.findings if finding.rule == self.rule]


AUTO_GLM = Limits.of(GLM, max_model_len=16384, max_num_batched_tokens=16384)

PLANTED = (
    Case("items-above-smallest-budget", ERNIE, budgets(128, 512, items=129), severity="error", budget=128),
    Case(
        "items-above-smallest-budget",
        ERNIE,
        Configuration(max_items=5000),
        Limits.of(ERNIE, max_model_len=4096, max_num_batched_tokens=4096),
        severity="warning",
        budget=4096,
    ),
    Case("unsorted-budgets", ERNIE, budgets(512, 128), severity="warning"),
    Case("repeated-budget", ERNIE, budgets(128, 128, 512), severity="warning", budget=128),
    Case("many-graphs", ERNIE, budgets(*range(64, 64 + 65)), severity="warning"),
    Case("oversized-buffer", GLM, Configuration(), AUTO_GLM, severity="error", budget=64),
    Case("oversized-buffer", ERNIE, budgets(5, items=4), severity="warning", budget=5),
    Case("undersized-buffer", GLM, budgets(100, items=8), IMAGES_ONLY, severity="error", budget=100),
    Case("rotary-table-overrun", GLM, budgets(4097, items=1), IMAGES_ONLY, severity="error", budget=4097),
    Case("dominated-budget", GLM, Configuration(), AUTO_GLM, severity="warning", budget=64),
    Case("dominated-budget", ERNIE, budgets(101, 104), severity="warning", budget=101),
    Case("buffer-memory", GLM, Configuration(), AUTO_GLM, severity="warning"),
    Case("baked-max-seqlen", ERNIE, budgets(64, 32768, items=1), severity="info", budget=32768),
    Case("baked-max-seqlen", ERNIE, budgets(1024, items=16), traffic=images([64] * 16), severity="info"),
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=32), severity="error"),
    # Not in proportion to max items, and still one offset too many.
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=5), severity="error"),
    # Videos with fewer frames than max items.
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=2), severity="error"),
    Case("frames-above-capacity", GLM, budgets(64, frames=8), severity="warning"),
    Case(
        "frames-above-capacity",
        GLM,
        budgets(64, frames=8),
        traffic=videos([(16, 4), (16, 4), (16, 4)]),
        severity="error",
    ),
    Case("item-above-largest-budget", ERNIE, budgets(128), traffic=images([64], [129]), severity="error", budget=128),
    Case("item-above-largest-budget", GLM, budgets(128), IMAGES_ONLY, images([129]), severity="warning", budget=128),
    Case("item-above-largest-budget", ERNIE, budgets(6176), severity="warning", budget=6176),
    Case("item-above-largest-budget", GLM, budgets(7499), IMAGES_ONLY, severity="info", budget=7499),
    Case("item-above-largest-budget", GLM, budgets(7500), severity="info", budget=7500),  # videos have up to 30,000
    Case(
        "unreachable-budget", ERNIE, budgets(64, 128, 256), traffic=images([64], [200]), severity="warning", budget=128
    ),
    Case("unreachable-budget", ERNIE, budgets(6177, 8192, items=1), severity="warning", budget=8192),
    Case("one-item-replays", ERNIE, budgets(64, items=1), severity="warning"),
    Case("one-item-replays", ERNIE, budgets(64, items=1), traffic=images([16, 16]), severity="warning"),
    Case("no-graph-for-modality", ERNIE, budgets(64), traffic=videos([(64, 4)]), severity="info"),
)

CLEAN = (
    Case("items-above-smallest-budget", ERNIE, budgets(128, 512, items=128)),
    Case("unsorted-budgets", ERNIE, budgets(128, 512)),
    Case("repeated-budget", ERNIE, budgets(128, 512)),
    Case("many-graphs", ERNIE, budgets(*range(64, 64 + 64))),
    Case("oversized-buffer", GLM, budgets(64, 128), IMAGES_ONLY),
    Case("oversized-buffer", ERNIE, budgets(101)),
    Case("undersized-buffer", GLM, budgets(104, items=8), IMAGES_ONLY),
    Case("undersized-buffer", ERNIE, budgets(100, items=8)),  # Ernie rounds up
    Case("rotary-table-overrun", GLM, budgets(4096, 16384, items=4), IMAGES_ONLY),
    Case("dominated-budget", GLM, budgets(64, 128, 4096), IMAGES_ONLY),
    Case("dominated-budget", ERNIE, budgets(128, 128, 256)),  # repeated, which is another rule
    Case("buffer-memory", GLM, budgets(64, 128, 4096), IMAGES_ONLY),
    Case("baked-max-seqlen", ERNIE, budgets(64, 8192)),
    Case("baked-max-seqlen", ERNIE, budgets(1024, items=16), traffic=images([1024], [64] * 16)),
    Case("zeroed-sequence-tail", GLM, budgets(64, 128), IMAGES_ONLY),
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=4)),
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=32), traffic=videos([(64, 32)])),
    Case("zeroed-sequence-tail", GLM, budgets(64, 128, frames=2), traffic=images([64])),
    Case("zeroed-sequence-tail", ERNIE, budgets(64, 128, frames=32)),
    Case("frames-above-capacity", GLM, budgets(64)),
    Case("frames-above-capacity", GLM, budgets(64, frames=8), IMAGES_ONLY),
    Case("frames-above-capacity", GLM, budgets(64, frames=12), traffic=videos([(16, 4), (16, 4), (16, 4)])),
    Case("frames-above-capacity", ERNIE, budgets(64, frames=1)),
    Case("item-above-largest-budget", ERNIE, budgets(128), traffic=images([64], [128])),
    Case("item-above-largest-budget", ERNIE, budgets(6177)),
    Case("item-above-largest-budget", GLM, budgets(7500), IMAGES_ONLY),
    Case("item-above-largest-budget", ERNIE, budgets(4096), Limits.of(ERNIE, max_model_len=4096)),
    Case("unreachable-budget", ERNIE, budgets(64, 128, 256), traffic=images([64], [100], [200])),
    Case("unreachable-budget", ERNIE, budgets(6177, 8192, items=2)),
    Case("one-item-replays", ERNIE, budgets(64, items=2)),
    Case("one-item-replays", ERNIE, budgets(64, items=1), traffic=images([16], [16])),
    Case("no-graph-for-modality", GLM, budgets(64), traffic=videos([(64, 4)])),
    Case("no-graph-for-modality", ERNIE, budgets(64), traffic=images([64])),
)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case.rule} {case.facts.key}")
def test_planted(case: Case) -> None:
    findings = case.findings()
    assert findings
    assert findings[0].severity == case.severity
    if case.budget is not None:
        assert findings[0].budget == case.budget
    assert findings[0].message
    assert findings[0].remedy
    assert findings[0].evidence


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: f"{case.rule} {case.facts.key}")
def test_clean(case: Case) -> None:
    assert case.findings() == []


def test_every_rule_is_planted_and_clean() -> None:
    rules = {rule.id for rule in RULES}
    assert len(rules) == len(RULES)
    assert {case.rule for case in PLANTED} == rules
    assert {case.rule for case in CLEAN} == rules


def test_a_sound_configuration_has_no_finding() -> None:
    assert lint(ERNIE, budgets(128, 256, 512, 1024, 2048, 4096, 6180)).findings == ()
    report = lint(GLM, budgets(64, 128, 7500), IMAGES_ONLY, images([64, 64], [60], [7000]))
    assert report.findings == ()
    assert not report.failed


def test_default_glm_is_600_times_too_large() -> None:
    report = lint(GLM, Configuration(), AUTO_GLM)
    oversized = {finding.budget: finding.evidence["ratio"] for finding in report.findings if finding.rule[:4] == "over"}
    assert oversized[64] == 600
    assert report.captures[0].patches == 153_600
    assert report.failed


def test_errors_come_first() -> None:
    severities = [finding.severity for finding in lint(GLM, Configuration((512, 100)), AUTO_GLM).findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert set(severities) == {"error", "warning", "info"}


def test_calls_of_both_modalities_are_planned_apart() -> None:
    both = Calls((((16, 1, False), (16, 4, True), (16, 1, False)),))
    report = lint(GLM, budgets(32, 64, frames=64), traffic=both)
    # Together the three would need budget 64; images take 32 and the video 32.
    unreachable = [finding.budget for finding in report.findings if finding.rule == "unreachable-budget"]
    assert unreachable == [64]


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="no item"):
        lint(ERNIE, budgets(64), traffic=images())


def test_a_configuration_without_sense_is_refused() -> None:
    with pytest.raises(WorkbenchError, match="budget 0 is not positive"):
        lint(ERNIE, budgets(0))


def test_bytes_of_buffers() -> None:
    capture = captured_shapes(ERNIE, resolve(budgets(2048)))[0]
    sizes = {buffer.name: buffer.bytes for buffer in (*capture.inputs, capture.output)}
    assert sizes == {
        "pixel_values": 8192 * 588 * 2,
        "rotary_pos_emb": 8192 * 40 * 4,
        "cu_seqlens": 5 * 4,
        "max_seqlen": 4,
        "output": 8192 * 1280 * 2,
    }
    assert capture.bytes == sum(sizes.values())


def cost_profile() -> CostProfile:
    """A profile with nothing but captures: 100 MiB for the first of 1024, 2 MiB for one of 64 beside it."""
    run = make_run()
    points = [MemoryPoint(budget=b, first=first, seconds=s, bytes=m * 2**20) for b, first, s, m in CAPTURED]
    return CostProfile(
        schema_version=1,
        workbench="test",
        created=run.created,
        replay_kind="cuda_graph",
        environment=run.environment,
        model=run.model,
        replays=[
            ReplayPoint(budget=64, sequences=[256], gpu_us=[1.0]),
            ReplayPoint(budget=1024, sequences=[], gpu_us=[2.0]),
        ],
        tails=[TailPoint(tokens=64, wall_us=[1.0])],
        eager=[EagerPoint(arm="eager_served", tokens=64, wall_us=[1.0])],
        calls=[],
        captures=points,
        seed=0,
    )


CAPTURED = ((64, True, 0.2, 10), (1024, True, 0.2, 100), (64, False, 0.1, 2), (1024, False, 0.1, 6))


def test_memory_of_a_profile() -> None:
    known = lint(ERNIE, budgets(64, 1024)).record(CostModel(cost_profile()))["memory"]
    assert known["capture_bytes"] == 102 * 2**20
    assert known["capture_seconds"] == pytest.approx(0.2)
    assert "NVIDIA H200" in known["capture_basis"]


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_json(path, cost_profile())
    options = ("--budgets", "64,1024", "--max-items", "4", "--profile", str(path), "--json")
    assert json.loads(run("--model", "ernie45_vl", *options).stdout)["memory"]["capture_bytes"] == 102 * 2**20
    assert isinstance(run("--model", "glm4_1v", *options).exception, WorkbenchError)


# The command ----------------------------------------------------------------------------------------------------


def run(*options: str) -> Any:
    """Run `workbench lint`; return typer's result."""
    return CliRunner().invoke(app, ["lint", *options])


def test_command_finds_errors() -> None:
    result = run("--model", "glm4_1v", "--budgets", "100", "--max-items", "8", "--video-limit", "0", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    finding = next(finding for finding in record["findings"] if finding["rule"] == "undersized-buffer")
    assert (finding["severity"], finding["budget"]) == ("error", 100)
    assert finding["evidence"] == {"capacity": 96, "items": 8}
    assert {rule["rule"] for rule in record["rules"]} == {rule.id for rule in RULES}
    assert record["captures"][0]["buffers"]["pixel_values"]["shape"] == [384, 1176]
    assert record["memory"]["capture_bytes"] is None
    assert "calibrate" in record["memory"]["capture_basis"]


def test_command_passes_warnings() -> None:
    result = run("--model", "ernie45_vl", "--budgets", "512,128", "--max-items", "4", "--json")
    assert result.exit_code == 0
    assert {finding["severity"] for finding in json.loads(result.stdout)["findings"]} == {"warning"}


def test_command_for_people() -> None:
    result = run("--model", "ernie45_vl", "--budgets", "128,128", "--max-items", "4")
    assert result.exit_code == 0
    assert "repeated-budget" in result.stdout
    assert "6,177" in result.stdout
    assert "no finding" in run("--model", "ernie45_vl", "--budgets", "128,6180", "--max-items", "4").stdout


def test_command_reports_a_refusal_as_a_finding() -> None:
    result = run("--model", "ernie45_vl", "--budgets", "128", "--max-items", "129", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["budgets"] is None


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "gpt", "--budgets", "128", "--max-items", "4"),
        ("--model", "glm4_1v", "--budgets", "128,x", "--max-items", "4"),
        ("--model", "glm4_1v", "--budgets", "-128", "--max-items", "4"),
        ("--model", "glm4_1v"),
    ],
)
def test_command_refuses(options: tuple[str, ...]) -> None:
    assert isinstance(run(*options, "--json").exception, WorkbenchError)


def test_command_reads_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("width,height\n224,224\n448,448\n")
    options = ("--budgets", "64,128", "--max-items", "4", "--workload", str(path), "--json")
    result = run("--model", "ernie45_vl", *options)
    assert result.exit_code == 1
    rules = {finding["rule"] for finding in json.loads(result.stdout)["findings"]}
    assert rules == {"item-above-largest-budget", "unreachable-budget"}
