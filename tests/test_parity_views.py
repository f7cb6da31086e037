"""Figures and tables of notebook 03 from stored results; no engine."""

import msgspec
import pytest

from tests.test_parity import NOISE, fault, finding, session
from workbench.decision import benchmark_delta, binomial_interval, proxy_flips
from workbench.parity import Bisection, Campaign, Cell, Difference, ItemResult, Parity, Stage

WORST = Difference(
    tokens=4, bit_equal=False, finite=True, max_abs=1.0, relative_rms=0.1, worst_row=0.2, min_cosine=0.99
)
BROKEN = Difference(
    tokens=4, bit_equal=False, finite=False, max_abs=None, relative_rms=None, worst_row=None, min_cosine=None
)


@pytest.fixture
def parity() -> Parity:
    item = ItemResult(
        scenario="fills",
        budget=16,
        call=0,
        item=0,
        modality="image",
        grid=(1, 4, 4),
        status="mismatch",
        graph=BROKEN,
        padded=WORST,
    )
    cells = [
        Cell(scenario="fills", budget=16, status="mismatch", calls=1, items=1, ratio=4.2, worst=WORST),
        Cell(scenario="mixed", budget=None, status="error", reason="RuntimeError: no"),
        Cell(scenario="video", budget=16, status="not_tested", reason="none"),
    ]
    return msgspec.structs.replace(session(cells, [finding("cu_seqlens"), finding("cu_seqlens")]), items=[item])


def stage(name: str, rms: float | None) -> Stage:
    return Stage(
        name=name,
        relative_rms=rms,
        worst_row=rms,
        finite=rms is not None,
        padded_max_abs=None,
        padded_finite=False,
    )


def test_matrix_shows_tested_scenarios_and_their_distance(parity: Parity) -> None:
    from workbench.views import parity as views

    heat = views.matrix(parity).data[0]
    assert list(heat.y) == ["fills", "mixed"]
    assert list(heat.x) == ["16", "all"]
    assert [list(row) for row in heat.text] == [["MISMATCH 4.2", ""], ["", "error"]]
    table = views.matrix_table(parity)
    assert table["scenario"].tolist() == ["fills", "mixed"]
    assert table["worst relative RMS"].tolist()[0] == 0.1


def test_variants_are_shown_where_a_session_has_some(parity: Parity) -> None:
    from workbench.views import parity as views

    cells = [msgspec.structs.replace(parity.cells[0], graph_items=3, graph_equal=2)]
    changed = msgspec.structs.replace(parity, cells=cells, variants=["one_pass", "fused"])
    table = views.matrix_table(changed)
    assert table[["replayed by vLLM's graph", "with its bits"]].to_numpy().tolist() == [[3, 2]]
    assert "with its bits" not in views.matrix_table(parity)
    assert views.noise_table({"a": parity, "b": changed})["variants"].tolist() == ["", "one_pass, fused"]
    assert "variants" not in views.noise_table({"a": parity})


def test_findings_are_counted_per_suspect_and_scenario(parity: Parity) -> None:
    from workbench.views import parity as views

    (row,) = views.findings_table(parity.findings).to_dict("records")
    assert (row["suspect"], row["times"]) == ("cu_seqlens", 2)
    assert views.findings_table([]).empty


def test_worst_items_keep_what_is_not_finite(parity: Parity) -> None:
    from workbench.views import parity as views

    (row,) = views.worst_items(parity).to_dict("records")
    assert row["finite"] is False
    assert row["padded eager relative RMS"] == 0.1


def test_items_that_the_lab_poisoned_do_not_hide_the_worst_ones(parity: Parity) -> None:
    from workbench.views import parity as views

    (item,) = parity.items
    poisoned = msgspec.structs.replace(item, status="hazard")
    wrong = msgspec.structs.replace(item, status="mismatch", scenario="image-beside-video")
    hidden = msgspec.structs.replace(parity, items=[poisoned] * 12 + [wrong])
    table = views.worst_items(hidden)
    assert len(table) == 10
    assert table["scenario"].tolist()[0] == "image-beside-video"


def test_bisection_marks_the_first_module() -> None:
    from workbench.views import parity as views

    found = Bisection(
        scenario="fills",
        budget=16,
        arms="padded",
        first="blocks.0",
        rows="valid",
        stages=[stage("embeddings", 0.0), stage("blocks.0", 0.5), stage("tower", None)],
    )
    line = views.bisection(found, NOISE).data[0]
    assert list(line.x) == ["embeddings", "blocks.0", "tower"]
    assert line.y[1] == 0.5
    assert line.y[2] == 10.0  # not finite
    assert line.y[0] > 0  # a log axis
    assert len(set(line.marker.color)) == 2


def test_noise_faults_and_decisions_have_figures_and_tables(parity: Parity) -> None:
    from workbench.views import parity as views

    assert len(views.noise({"a": parity}).data) == 6
    assert views.noise_table({"a": parity})["attention over floor"].tolist() == [32]
    results = [fault("order", "caught"), fault("baked", "not_tested", needs="cuda"), fault("gone", "missed")]
    heat = views.faults(results, "faults").data[0]
    assert len(heat.y) == 2
    assert list(heat.x) == ["fills", "mixed"]
    campaign = Campaign(replay="static_replay", results=results, clean={})
    assert views.fault_table(campaign, [])["ernie45_vl"].tolist() == ["caught", "-", "missed"]
    deltas = [benchmark_delta("AI2D", "score", (0.6548, 0.0086), (0.6564, 0.0085))]
    assert views.benchmark_table(deltas)["sigma"].tolist() == pytest.approx([0.132], abs=1e-3)
    assert len(views.benchmarks(deltas).data) == 2
    assert views.agreement("50 answers", 0.94, binomial_interval(47, 50)).data[0].x[0] == 0.94


def test_proxy_is_labelled_by_pair(parity: Parity) -> None:
    import numpy as np

    from workbench.views import parity as views

    rows = np.random.default_rng(0).standard_normal((20, 8))
    flips = proxy_flips(rows, rows + 0.1)
    table = views.proxy_table({"a": msgspec.structs.replace(parity, proxy=flips)})
    assert table["pair"].tolist() == ["graph and eager"]
    assert table["flips"].tolist() == [flips.flips]
