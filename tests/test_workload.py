"""Workloads from every source, call formation, and bad input."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.grids import largest_image
from workbench.models import model_facts
from workbench.presets import PRESETS
from workbench.random_mm import RandomMM, draw, parse_buckets, parse_limit, sample
from workbench.sources import Options, load_workload
from workbench.workload import (
    ItemsPerCall,
    Policy,
    RequestPerCall,
    Scheduler,
    Workload,
    encoder_budget,
    group,
    make_workload,
    summarize,
)

ERNIE, GLM = model_facts("ernie45_vl"), model_facts("glm4_1v")


def images(*counts: int, side: int = 224) -> Workload:
    """A workload of square images, `counts` per request."""
    sizes = np.tile([side, side, 1], (sum(counts), 1))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return make_workload(sizes, offsets, ERNIE, name="images", source="test")


def sizes_of(workload: Workload) -> list[tuple[int, ...]]:
    """Return sizes as tuples."""
    return [tuple(size) for size in workload.sizes.tolist()]


# --- tables -------------------------------------------------------------------------------------------------

ROWS = [
    {"width": 224, "height": 224, "call": "b"},
    {"width": 640, "height": 480, "call": "a"},
    {"width": 100, "height": 50, "call": "b"},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format that the name's ending tells."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", ["w.csv", "w.json", "w.jsonl", "w.parquet"])
def test_tables_of_every_format(tmp_path: Path, name: str) -> None:
    made = load_workload(write_table(tmp_path / name, ROWS), ERNIE)
    assert sizes_of(made) == [(224, 224, 1), (100, 50, 1), (640, 480, 1)]
    assert made.offsets.tolist() == [0, 2, 3]  # call b appears first
    assert made.calls() == [[64, 8], [391]]
    assert (made.name, made.model) == ("w", "ernie45_vl")


def test_without_a_call_column_every_row_is_a_request(tmp_path: Path) -> None:
    rows = [{"width": 224, "height": 224, "frames": frames} for frames in (1, 8)]
    made = load_workload(write_table(tmp_path / "w.csv", rows), GLM)
    assert made.offsets.tolist() == [0, 1, 2]
    assert made.frames.tolist() == [1, 4]
    assert made.is_video.tolist() == [False, True]


def test_json_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_text('[[{"width": 224, "height": 224}, {"width": 28, "height": 56}], [{"width": 640, "height": 480}]]')
    assert load_workload(path, ERNIE).offsets.tolist() == [0, 2, 3]


BAD_TABLES = {
    "empty.csv": ("", "is empty"),
    "header.csv": ("width,height\n", "has no rows"),
    "columns.csv": ("breadth,height\n1,2\n", "has no column width; it has breadth, height"),
    "twice.csv": ("width,Width,height\n1,1,2\n", "two columns 'width'"),
    "zero.csv": ("width,height\n224,224\n224,0\n", "zero.csv row 2 has height 0"),
    "negative.csv": ("width,height\n-5,224\n", "negative.csv row 1 has width -5"),
    "nan.csv": ("width,height\n224,nan\n", "nan.csv row 1 has no value for height"),
    "gap.csv": ("width,height,frames\n224,224,\n", "gap.csv row 1 has no value for frames"),
    "text.csv": ("width,height\n224,big\n", "text.csv row 1 has height 'big', which is not a number"),
    "half.csv": ("width,height\n224,3.5\n", "row 1 has height 3.5, which is not a whole number"),
    "label.csv": ("width,height,call\n224,224,\n224,224,1\n", "row 1 has no call"),
    "bool.json": ('[{"width": true, "height": 5}]', "true and false"),
    "nan.json": ('[{"width": NaN, "height": 5}]', "row 1 has no value for width"),
    "list.json": ("[[1, 2]]", "item 1 is '1', not an object"),
    "object.json": ('{"width": 5}', "is not a JSON array"),
    "cut.json": ('[{"width": 5', "is not readable as json"),
    "labels.json": ('[{"width": 5, "height": 5, "call": [1]}]', "calls that are lists"),
    "cut.jsonl": ('{"width": 5, "height": 5}\n{"width": 5, "he', "is not readable as jsonl"),
    "not.parquet": ("PAR1", "is not readable as parquet"),
    "deep.json": ("[" * 100_000, "is not readable as json"),
    "w.yaml": ("width: 3", "is not a kind of table"),
}


@pytest.mark.parametrize("name", sorted(BAD_TABLES))
def test_bad_tables_are_one_sentence(tmp_path: Path, name: str) -> None:
    text, message = BAD_TABLES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkbenchError) as caught:
        load_workload(tmp_path / name, ERNIE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_in_latin_1_is_told_to_be_saved_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_bytes("width,height,grö\xdfe\n224,224,1\n".encode("latin-1"))
    with pytest.raises(WorkbenchError, match=r"w\.csv is not UTF-8; save it as UTF-8"):
        load_workload(path, ERNIE)


def test_a_refused_row_names_the_processor_and_vllms_clamp(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("width,height\n224,224\n20,6000\n6000,20\n")
    with pytest.raises(WorkbenchError, match=r"w.csv row 2, 20 x 6000: the Hugging Face processor of ERNIE.*28 x 5600"):
        load_workload(path, ERNIE)
    with pytest.raises(
        WorkbenchError, match=r"the Hugging Face processor of GLM-4.1V refuses an aspect ratio above 200"
    ):
        load_workload(path, GLM)
    clamped = load_workload(path, ERNIE, Options(clamp=True))
    assert clamped.grids.tolist() == [[1, 16, 16], [1, 400, 2], [1, 2, 400]]
    assert clamped.notes == ("2 items clamped to an aspect ratio of 200 as vLLM's resize does",)
    skipped = load_workload(path, ERNIE, Options(skip_bad=True))
    assert (skipped.items, skipped.offsets.tolist()) == (1, [0, 1, 1, 1])
    assert "2 items left out" in skipped.notes[0]


def test_all_items_refused_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text("width,height\n20,6000\n")
    with pytest.raises(WorkbenchError, match="refuses an aspect ratio"):
        load_workload(path, GLM, Options(skip_bad=True))


def test_nothing_of_that_name() -> None:
    with pytest.raises(WorkbenchError, match=r"there is no workload 'mxed'.*pull-request, glm-image"):
        load_workload("mxed", ERNIE)
    for name in ("", "x" * 5000, "a\0b"):
        with pytest.raises(WorkbenchError):
            load_workload(name, ERNIE)


# --- images -------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of real image files: three formats, one turned by EXIF, one animated, one that is text."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    image.new("RGB", (640, 480)).save(folder / "a.png")
    exif = image.Exif()
    exif[0x0112] = 6
    image.new("RGB", (300, 200)).save(folder / "b.jpg", exif=exif)
    frames = [image.new("L", (64, 96), shade) for shade in (0, 255)]
    frames[0].save(folder / "inner" / "c.GIF", save_all=True, append_images=frames[1:])
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_a_folder_of_images(pictures: Path) -> None:
    made = load_workload(pictures, ERNIE)
    assert sizes_of(made) == [(640, 480, 1), (200, 300, 1), (64, 96, 1)]
    assert made.offsets.tolist() == [0, 1, 2, 3]
    assert made.source == "folder pictures, 3 images"


def test_unreadable_images_are_named_counted_and_skipped_only_on_demand(pictures: Path) -> None:
    (pictures / "broken.png").write_bytes((pictures / "a.png").read_bytes()[:20])
    (pictures / "empty.jpg").write_bytes(b"")
    with pytest.raises(WorkbenchError, match=r"2 of 5 images in .* cannot be read, the first: broken.png"):
        load_workload(pictures, ERNIE)
    made = load_workload(pictures, ERNIE, Options(skip_bad=True))
    assert made.items == 3
    assert made.notes[0].startswith("2 of 5 images")


def test_a_header_that_claims_a_bomb_is_unreadable(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "bomb.ppm").write_bytes(b"P6 60000 60000 255\n")
    with pytest.raises(WorkbenchError, match=r"1 of 1 images .* bomb.ppm"):
        load_workload(tmp_path, ERNIE)
    with pytest.raises(WorkbenchError, match="none is left"):
        load_workload(tmp_path, ERNIE, Options(skip_bad=True))


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="holds no images"):
        load_workload(tmp_path, ERNIE)


# --- random-mm and presets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('x')", "not literal data"),
        ("{(224, 224, 1): open('x')}", "not literal data"),
        ("{(224, 224, 1): 1.0", "not literal data"),
        ("{" * 5000, "not literal data"),
        ("[(224, 224, 1)]", "not a dict"),
        ("{}", "not a dict"),
        ("{(224, 224): 1.0}", "not (height, width, frames)"),
        ("{(224, 0, 1): 1.0}", "not (height, width, frames)"),
        ("{(224, True, 1): 1.0}", "not (height, width, frames)"),
        ("{(224, 224, 1): -1}", "probability -1"),
        ("{(224, 224, 1): 'x'}", "probability 'x'"),
        ("{(224, 224, 1): 1e999}", "probability inf"),
        ("{(1, 1, 1): " + "1" * 200_000 + "}", "too long"),
    ],
)
def test_bad_bucket_strings(text: str, message: str) -> None:
    with pytest.raises(WorkbenchError) as caught:
        parse_buckets(text)
    assert message in str(caught.value)


def test_bucket_strings_as_vllm_reads_them() -> None:
    assert parse_buckets("{(224, 224, 1): 1, '(480, 640, 8)': 0.5}") == {(224, 224, 1): 1.0, (480, 640, 8): 0.5}
    assert parse_limit('{"image": 1, "video": 0}') == {"image": 1, "video": 0}


@pytest.mark.parametrize("text", ["", "[1]", '{"image": -1}', '{"image": 1.5}', '{"image": true}', "{'image': 1}"])
def test_bad_limits(text: str) -> None:
    with pytest.raises(WorkbenchError, match="is not JSON like"):
        parse_limit(text)


IMAGE: dict[tuple[int, int, int], float] = {(224, 224, 1): 1.0}
BAD_SETTINGS: list[tuple[RandomMM, str]] = [
    (RandomMM(IMAGE, requests=0), "0 requests"),
    (RandomMM(IMAGE, base_items=-1), "negative"),
    (RandomMM(IMAGE, range_ratio=1.5), "not between 0 and 1"),
    (RandomMM(IMAGE, limit={"video": 1}), "names no image"),
    (RandomMM({(224, 224, 1): 0.0}), "all bucket probabilities are 0"),
    (RandomMM(IMAGE, base_items=4, limit={"image": 2}), "at least 4 items, but the limit per prompt allows 2"),
    (RandomMM(IMAGE, requests=10**9), "exceed 50,000,000 items"),
    (RandomMM(IMAGE, base_items=0), "is empty"),
    (RandomMM(IMAGE, seed=-1), "seed -1 is not between 0 and"),
]


@pytest.mark.parametrize(("setting", "message"), BAD_SETTINGS)
def test_settings_that_vllm_refuses_too(setting: RandomMM, message: str) -> None:
    from workbench.sources import random_mm

    with pytest.raises(WorkbenchError) as caught:
        random_mm(setting, ERNIE, Options())
    assert message in str(caught.value)


def test_height_comes_first_in_a_bucket() -> None:
    made = load_workload("{(480, 640, 1): 1}", ERNIE, Options(RandomMM({}, requests=3)))
    assert sizes_of(made) == [(640, 480, 1)] * 3


def test_a_modality_at_its_limit_loses_its_buckets() -> None:
    setting = RandomMM(
        {(224, 224, 1): 0.5, (224, 224, 8): 0.5}, requests=500, base_items=4, limit={"image": 9, "video": 1}, seed=3
    )
    sizes, offsets = sample(setting)
    videos = np.add.reduceat(sizes[:, 2] > 1, offsets[:-1])
    assert np.diff(offsets).tolist() == [4] * 500
    assert videos.max() == 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_load_for_their_models_and_say_whose_they_are(name: str) -> None:
    preset = PRESETS[name]
    assert "pull request" in preset.origin or "this project's own" in preset.origin
    for key in preset.models:
        made = load_workload(name, model_facts(key))
        assert len(made) == preset.recipe.requests
        assert preset.origin in made.source


def test_the_pull_requests_preset() -> None:
    made = load_workload("pull-request", ERNIE)
    assert made.calls() == [[64]] * 1000


def test_presets_are_the_same_every_time() -> None:
    assert load_workload("mixed", ERNIE).tokens.tolist() == load_workload("mixed", ERNIE).tokens.tolist()


@pytest.fixture(scope="module")
def data_set() -> Any:
    """vLLM's own random-mm data set, of which only the item iterator is used."""
    pytest.importorskip("vllm")
    from workbench.encoder import bootstrap

    bootstrap.prepare()
    from vllm.benchmarks.datasets import RandomMultiModalDataset

    return RandomMultiModalDataset(random_seed=0)


settings_of_vllm = st.builds(
    RandomMM,
    buckets=st.dictionaries(
        st.sampled_from([(224, 224, 1), (480, 640, 1), (768, 1024, 1), (224, 224, 8), (480, 640, 16)]),
        st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]),
        min_size=1,
    ),
    requests=st.integers(1, 30),
    base_items=st.integers(0, 12),
    range_ratio=st.sampled_from([0.0, 0.25, 1 / 3, 0.75, 1.0]),
    limit=st.fixed_dictionaries({"image": st.integers(0, 12), "video": st.integers(0, 5)}),
    seed=st.integers(0, 2**32),
)


@pytest.mark.engine
@given(settings_of_vllm)
@settings(max_examples=200, deadline=None)
def test_items_are_vllms_own_draw_for_draw(data_set: Any, setting: RandomMM) -> None:
    try:
        parameters = data_set.get_mm_item_sampling_params(
            setting.base_items, setting.range_ratio, dict(setting.limit), dict(setting.buckets)
        )
    except ValueError:
        with pytest.raises(WorkbenchError):
            sample(setting)
        return
    least, most, limit, buckets = parameters
    data_set._rng = np.random.default_rng(setting.seed)
    theirs = [
        [tuple(int(side) for side in item) for item in data_set.get_mm_item_iterator(least, most, buckets, limit)]
        for _ in range(setting.requests)
    ]
    generator = np.random.default_rng(setting.seed)
    sizes, offsets = draw(setting, generator)
    ours = [
        [(height, width, frames) for width, height, frames in sizes[first:last].tolist()]
        for first, last in pairwise(offsets.tolist())
    ]
    assert ours == theirs
    assert generator.bit_generator.state == data_set._rng.bit_generator.state


# --- call formation -----------------------------------------------------------------------------------------


def test_one_request_a_call_drops_empty_requests() -> None:
    assert group(images(2, 0, 3), RequestPerCall()).offsets.tolist() == [0, 2, 5]


def test_items_per_call_ignores_requests() -> None:
    assert group(images(2, 0, 5), ItemsPerCall(3)).offsets.tolist() == [0, 3, 6, 7]


def test_a_call_holds_one_modality_images_first() -> None:
    sizes = np.array([[224, 224, 8], [224, 224, 1], [448, 224, 8], [448, 224, 1]])
    mixed = make_workload(sizes, np.array([0, 4]), GLM, name="x", source="x")
    made = group(mixed, RequestPerCall())
    assert made.offsets.tolist() == [0, 2, 4]
    assert sizes_of(made) == [(224, 224, 1), (448, 224, 1), (224, 224, 8), (448, 224, 8)]


def test_offline_scheduler_fills_the_token_budget_in_chunks() -> None:
    # A request has 100 + 64 tokens. Of 370 a step, the third prompt gets 42 of its text in the first step; in the
    # second step its remaining 122 and the fourth's 164 leave 84 for the fifth, which do not reach its image.
    made = group(images(*[1] * 5), Scheduler(text_tokens=100, batched_tokens=370, output_tokens=1))
    assert made.counts.tolist() == [2, 2, 1]
    reached = group(images(*[1] * 5), Scheduler(text_tokens=100, batched_tokens=400, output_tokens=1))
    assert reached.counts.tolist() == [2, 3]


def test_decoding_requests_take_tokens_and_seats() -> None:
    made = group(images(*[1] * 6), Scheduler(text_tokens=0, batched_tokens=10_000, output_tokens=5, running=2))
    assert made.counts.tolist() == [2, 2, 2]
    busy = group(images(*[1] * 3), Scheduler(text_tokens=0, batched_tokens=64, output_tokens=1000))
    assert busy.counts.tolist() == [1, 1, 1]


def test_the_encoder_budget_bounds_a_step() -> None:
    made = group(images(*[1] * 6), Scheduler(text_tokens=10, batched_tokens=10_000, encoder_budget=150))
    assert made.counts.tolist() == [2, 2, 2]
    with pytest.raises(WorkbenchError, match="an item of 64 tokens exceeds the encoder budget of 63"):
        group(images(1), Scheduler(encoder_budget=63))


def test_vllms_encoder_budget_is_the_larger_of_two() -> None:
    assert encoder_budget(images(1), Scheduler(batched_tokens=100)) == largest_image(ERNIE)
    assert encoder_budget(images(1), Scheduler(batched_tokens=100_000)) == 100_000


def test_a_slow_stream_is_one_request_a_call_and_a_fast_one_is_not() -> None:
    stream = images(*[1] * 300)
    slow, fast = (group(stream, Scheduler(rate=rate, step_ms=10)) for rate in (1.0, 1000.0))
    assert slow.counts.mean() < 1.05
    assert 3 < fast.counts.mean() < 15
    again = group(stream, Scheduler(rate=1000.0, step_ms=10))
    other = group(stream, Scheduler(rate=1000.0, step_ms=10, seed=1))
    assert fast.offsets.tolist() == again.offsets.tolist() != other.offsets.tolist()


@pytest.mark.parametrize(
    "policy",
    [
        ItemsPerCall(0),
        Scheduler(rate=0.0),
        Scheduler(rate=-1.0),
        Scheduler(rate=float("nan")),
        Scheduler(step_ms=0),
        Scheduler(text_tokens=-1),
        Scheduler(output_tokens=0),
        Scheduler(batched_tokens=0),
        Scheduler(running=0),
    ],
)
def test_policies_that_cannot_run(policy: Policy) -> None:
    with pytest.raises(WorkbenchError):
        group(images(1, 1), policy)


policies = st.one_of(
    st.just(RequestPerCall()),
    st.builds(ItemsPerCall, st.integers(1, 9)),
    st.builds(
        Scheduler,
        rate=st.none() | st.sampled_from([0.5, 20.0, 2000.0]),
        text_tokens=st.sampled_from([0, 7, 100]),
        output_tokens=st.integers(1, 9),
        batched_tokens=st.integers(1, 500),
        running=st.integers(1, 5),
        encoder_budget=st.none() | st.integers(64, 300),
    ),
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20).filter(any), policies)
@settings(max_examples=200, deadline=None)
def test_grouping_keeps_every_item_once_and_in_order(counts: list[int], policy: Policy) -> None:
    requests = images(*counts)
    sides: npt.NDArray[np.int32] = requests.sizes.copy()
    sides[:, 0] = np.arange(1, len(sides) + 1)  # marks each item; the grids stay those of 224 x 224
    marked = Workload("x", "ernie45_vl", "x", sides, requests.grids, requests.tokens, requests.offsets)
    made = group(marked, policy)
    assert made.sizes[:, 0].tolist() == sides[:, 0].tolist()
    assert (made.counts > 0).all()
    assert (made.offsets[0], made.offsets[-1]) == (0, requests.items)
    if isinstance(policy, Scheduler) and policy.encoder_budget is not None:
        assert max(map(sum, made.calls())) <= policy.encoder_budget


def test_a_million_items() -> None:
    sizes = np.random.default_rng(0).integers(28, 2000, (1_000_000, 3))
    sizes[:, 2] = 1
    made = make_workload(sizes, np.arange(1_000_001), ERNIE, name="x", source="x", clamp=True)
    assert group(made, ItemsPerCall(8)).counts.tolist() == [8] * 125_000


def test_summary_counts_empty_groups_apart() -> None:
    made = summarize(images(2, 0, 3, 0))
    assert (made.groups, made.empty, made.images, made.videos) == (4, 2, 5, 0)
    assert made.tokens == {"min": 64, "median": 64, "p90": 64, "p99": 64, "max": 64, "sum": 320}
    assert made.items_per_group["max"] == 3
    assert made.tokens_per_group["min"] == 128
    assert made.shapes == [{"width": 224, "height": 224, "frames": 1, "tokens": 64, "items": 5}]


def test_a_folder_that_is_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from workbench.files import write_bytes

    (tmp_path / "sizes.csv").write_text("width,height\n")
    with pytest.raises(WorkbenchError, match=r"cannot write .*calls\.json: .*choose a folder"):
        write_bytes(tmp_path / "sizes.csv" / "calls.json", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["sizes.csv"]
