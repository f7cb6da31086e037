"""The sentences at the report's top, against the recordings they are computed from."""

import re
from dataclasses import replace

import msgspec
import pandas as pd
import pytest

from workbench import explain, outcomes, parity
from workbench.advisor import advise
from workbench.capturable import find_ladder
from workbench.models import model_facts
from workbench.outcomes import Measured
from workbench.parity import Parity
from workbench.run import ARMS
from workbench.sources import load_workload
from workbench.views import answers


@pytest.fixture(scope="module")
def sessions() -> list[Parity]:
    return parity.recorded()


def test_speed_names_the_gpu_both_times_their_ratio_and_the_variants() -> None:
    facts = model_facts("ernie45_vl")
    subject = explain.open_subject(explain.explainable()[facts.key])
    call = explain.one_image(subject.run)
    speed = explain.speed(subject.run)
    timed = speed[speed["call"] == call].set_index("arm")
    parts = explain.where_time_goes([explain.traced(subject, arm, call=call) for arm in ARMS])
    climbed = find_ladder(facts.key, subject.folder)
    assert climbed is not None
    where = answers.machine(subject.run.environment)
    sentence = answers.speed(facts.title, "one image", where, timed, parts, climbed)
    eager, graph = (pd.Series(timed.loc[arm])["median ms"] for arm in ("eager as served", "graph"))
    assert f"(NVIDIA H200) idle for {1 - parts['busy us'][0] / parts['window us'][0]:.0%}" in sentence
    assert f"takes {graph:.2f} ms instead of {eager:.1f}, {eager / graph:.1f} times as fast as eager" in sentence
    assert re.search(r"all variants together take [\d.]+ ms, [\d.]+ times as fast as the graph", sentence)
    alone = answers.speed(facts.title, "one image", where, timed, parts, None)
    assert alone.endswith("what the variants win is not recorded.")


def test_budgets_are_the_advised_ones_and_a_gain_is_measured_only_where_these_were() -> None:
    facts = model_facts("ernie45_vl")
    measured = outcomes.measured(facts.key)
    assert measured is not None
    assert measured.validation is not None
    advice = advise(load_workload("mixed", facts), measured.model)
    chosen = advice.answer.configuration
    assert chosen.budgets
    listed = f"budgets {', '.join(map(str, chosen.budgets))} with at most {chosen.max_items} items"

    unmeasured = answers.budgets("mixed", facts.title, advice, Measured(measured.model, None, None))
    assert listed in unmeasured
    assert "predicted, a call takes" in unmeasured
    assert "measured" not in unmeasured

    table = outcomes.validation(measured.model, measured.validation)
    gain = outcomes.won(measured.validation, table).set_index("workload")["faster"]["mixed"]
    shipped = answers.budgets("mixed", facts.title, advice, measured)
    assert f"{gain:.3f} times (" in shipped

    tried = table[(table["workload"] == "mixed") & (table["configuration"] == "advised")].iloc[0]
    budgets = tuple(int(budget) for budget in tried["budgets"].split(","))
    as_measured = replace(advice.answer, budgets=budgets, max_items=int(tried["max items"]))
    sentence = answers.budgets("mixed", facts.title, replace(advice, answer=as_measured), measured)
    assert f"measured, a call takes {tried['measured mean ms']:.1f} ms" in sentence
    assert "predicted" not in sentence


def test_safety_counts_conditions_defects_faults_and_false_alarms(sessions: list[Parity]) -> None:
    sentence = answers.safety(sessions)
    for words, some in (
        ("differ in", [one for one in sessions if not one.variants]),
        ("and with variants in", [one for one in sessions if one.variants]),
    ):
        bad = [cell for one in some for cell in one.cells if cell.status in ("error", "mismatch")]
        tested = [cell for one in some for cell in one.cells if cell.status != "not_tested"]
        assert f"{words} {len(bad)} of {len(tested)} conditions, all explained by known defects" in sentence
    assert set(re.findall(r"\bD\d+\b", sentence)) == {
        answers.defect_of(one, cell) for one in sessions for cell in answers.differing(one)
    }
    faults = [result for one in sessions for result in one.faults if result.status != "not_tested"]
    assert f"; {len(faults)} of {len(faults)} planted faults were caught;" in sentence
    assert "raised no false alarms." in sentence


def changed(session: Parity, **changes: object) -> Parity:
    return msgspec.structs.replace(session, **changes)


def test_safety_never_hides_what_no_defect_explains(sessions: list[Parity]) -> None:
    session = sessions[0]
    bare = changed(session, findings=[msgspec.structs.replace(one, defect=None) for one in session.findings])
    assert "1 of them unexplained (no known defect in oversize)" in answers.safety([bare])
    assert list(answers.parity_numbers(bare)) == ["conditions that differ, of 61, no known defect"]
    assert list(answers.parity_numbers(session)) == ["conditions that differ, of 61, known defect D1"]

    hazard = [msgspec.structs.replace(one, severity="hazard") for one in session.findings]
    assert answers.defect_of(changed(session, findings=hazard), answers.differing(session)[0]) is None
    elsewhere = [msgspec.structs.replace(one, scenario="another") for one in session.findings]
    assert answers.defect_of(changed(session, findings=elsewhere), answers.differing(session)[0]) is None

    clean = changed(session, cells=[cell for cell in session.cells if cell.status == "equal"])
    assert "differ in none of" in answers.safety([clean])
    fixed = changed(clean, variants=["fallback"])
    both = answers.safety([session, fixed])
    assert f"of ERNIE-4.5-VL differ in {answers._explained([session])}, and with variants in none of" in both
    assert "differ with variants in none of" in answers.safety([fixed])

    assert session.clean is not None
    missed = changed(
        session,
        clean=msgspec.structs.replace(session.clean, false_alarms=1),
        faults=[msgspec.structs.replace(one, status="missed") for one in session.faults],
    )
    assert f"; 0 of {len(session.faults)} planted faults were caught; " in answers.safety([missed])
    assert "raised 1 false alarm." in answers.safety([missed])
    assert answers.safety([]) == "No parity session with CUDA graphs is recorded here."
