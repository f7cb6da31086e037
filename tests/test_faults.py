"""Every planted fault that can be shown on the CPU is caught under the right name."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench.parity import FaultResult

pytestmark = pytest.mark.engine
MODELS = ("ernie45_vl", "glm4_1v")


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], FaultResult]:
    from workbench.encoder.parity.matrix import run_campaign

    campaign = run_campaign(MODELS, clean=10, device="cpu")
    assert campaign.passed
    return {(result.model, result.fault): result for result in campaign.results}


def test_there_are_at_least_twenty_of_them(results: dict[tuple[str, str], FaultResult]) -> None:
    for model in MODELS:
        caught = [result for (key, _), result in results.items() if key == model and result.status == "caught"]
        assert len(caught) >= 30


def test_each_is_caught_or_says_why_not(results: dict[tuple[str, str], FaultResult]) -> None:
    from workbench.encoder.parity.faults import FAULTS

    for (model, name), result in results.items():
        fault = FAULTS[name]
        if fault.needs == "cuda" or model not in fault.models:
            assert result.status == "not_tested"
            assert result.message
        else:
            assert result.status == "caught", (model, name, result)
            assert result.suspect in fault.expected


def test_faults_that_leave_outputs_alone_are_seen_too(results: dict[tuple[str, str], FaultResult]) -> None:
    for name in ("buffers-not-zeroed", "budget-largest", "graphs-never-used", "max-seqlen-too-small"):
        for model in MODELS:
            assert results[model, name].severity == "hazard"


def test_expected_suspects_exist() -> None:
    from workbench.encoder.parity.faults import FAULTS
    from workbench.parity import SUSPECTS

    assert {suspect for fault in FAULTS.values() for suspect in fault.expected} <= set(SUSPECTS)


def test_a_fault_mends_itself() -> None:
    """After each fault the model and the manager are as they were."""
    from workbench.budgets import Configuration
    from workbench.encoder.parity.faults import FAULTS
    from workbench.encoder.parity.lab import lab_options, open_lab

    options, _ = lab_options("ernie45_vl", "cpu")
    with open_lab(options, Configuration((16,), 4)) as lab:
        before = (dict(vars(lab.model)), dict(vars(lab.manager)))
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in lab.model.modules()]
        for fault in FAULTS.values():
            if "ernie45_vl" in fault.models and not fault.variants:
                with fault.plant(lab):
                    pass
        assert (dict(vars(lab.model)), dict(vars(lab.manager))) == before
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in lab.model.modules()] == hooks
        assert lab.observe([(1, 4, 4)], "after").status == "equal"


def test_a_fault_that_cannot_be_planted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager
    from dataclasses import replace

    from workbench.budgets import Configuration
    from workbench.encoder.parity import faults
    from workbench.encoder.parity.lab import Lab, lab_options, open_lab
    from workbench.encoder.parity.matrix import campaign

    @contextmanager
    def breaks(_lab: Lab) -> Iterator[None]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield

    known = faults.FAULTS["order-wrong"]
    monkeypatch.setattr(faults, "FAULTS", {"breaks": replace(known, name="breaks", plant=breaks), known.name: known})
    monkeypatch.setattr("workbench.encoder.parity.matrix.FAULTS", faults.FAULTS)
    options, _ = lab_options("ernie45_vl", "cpu")
    counts: list[int] = []
    with open_lab(options, Configuration((8, 16), 2)) as lab:
        broken, caught = campaign(lab, on_fault=lambda results: counts.append(len(results)))
    assert (broken.status, caught.status) == ("not_tested", "caught")
    assert "illegal memory access" in broken.message
    assert counts == [1, 2]


def test_the_verbs(tmp_path: Path) -> None:
    from workbench.cli import app
    from workbench.parity import read_parity

    runner = CliRunner()
    small = ["--device", "cpu", "--json"]
    made = runner.invoke(app, ["parity", "--scenarios", "fills,repeat", "--out", str(tmp_path / "run"), *small])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["cells"]
    assert read_parity(tmp_path / "run").name == "run"
    shown = runner.invoke(app, ["parity", "--scenarios", "fills", "--device", "cpu"])
    assert "graph and eager agree in all 3 conditions" in " ".join(shown.stdout.split())
    again = runner.invoke(app, ["parity", "--scenarios", "fills,repeat", "--against", str(tmp_path / "run"), *small])
    assert again.exit_code == 0, again.output
    other = runner.invoke(app, ["parity", "--scenarios", "fills", "--against", str(tmp_path / "run"), *small])
    assert "another inputs" in str(other.exception)
    refused = runner.invoke(app, ["parity", "--scenarios", "nothing", *small])
    assert refused.exit_code != 0
    assert "unknown scenario 'nothing'" in str(refused.exception)
    for verb in ("parity", "faults"):
        refused = runner.invoke(app, [verb, "--depth", "0", *small])
        assert "depth 0 is not between 1 and" in str(refused.exception)


def test_the_verb_decisions(tmp_path: Path) -> None:
    from workbench.cli import app

    runner = CliRunner()
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(json.dumps({"id": i, "text": "A"}) + "\n" for i in range(50)))
    b.write_text("".join(json.dumps({"id": i, "text": "A" if i > 2 else "B"}) + "\n" for i in range(50)))
    same = runner.invoke(app, ["decisions", str(a), str(a)])
    assert same.exit_code == 0
    assert "50 of 50 answers are identical" in same.stdout
    differ = runner.invoke(app, ["decisions", str(a), str(b)])
    assert differ.exit_code == 1
    assert "47 of 50 answers are identical (94.0%; 95% interval 83.5% to 98.7%)" in differ.stdout
    as_json = runner.invoke(app, ["decisions", str(a), str(b), "--json"])
    assert json.loads(as_json.stdout)["agreement"]["identical"] == 47
