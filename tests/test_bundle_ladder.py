"""Ladders in bundles: round trip, redaction, refusals, reports that stay inert, and comparison."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from tests.hostile.corpus import SCRIPTS, edited, members_of, sealed
from tests.ladders import make_glm_ladder, make_ladder
from tests.runs import small_run
from tests.test_bundle_report import ATTRIBUTES, TAGS, dump, has_run_a_script, inspect, mutated, report_of
from workbench import explain
from workbench.bundle import Bundle, create, opened, read_source
from workbench.capturable import (
    ALL,
    GRAPH,
    LADDER_FILE,
    SERVED,
    Captured,
    Case,
    Column,
    Ladder,
    Steps,
    find_ladder,
    read_ladder,
)
from workbench.cli import app
from workbench.conditions import check
from workbench.contradictions import LONGEST_NAME, LONGEST_TEXT, MOST_ROWS, MOST_SAMPLES, wrong_ladder
from workbench.diff import Diff, compare_files
from workbench.errors import WorkbenchError
from workbench.files import write_json
from workbench.run import RECORDINGS, SOURCE_VARIABLE
from workbench.views.browser import find_chromium, take_screenshot
from workbench.views.bundle_markdown import bundle_markdown, diff_markdown
from workbench.views.bundle_report import LARGEST_REPORT, diff_html

RECORDED = ("ernie45_vl", "glm4_1v")
FOLDER = "runs/00-ladder-of-ernie45-vl"
MEMBER = f"{FOLDER}/{LADDER_FILE}"
ALLOWED = TAGS | {"em", "strong"}


def written(folder: Path, ladder: Ladder) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / LADDER_FILE, ladder)
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a valid bundle of a made-up ladder."""
    folder = tmp_path_factory.mktemp("good")
    create([written(folder / "mine", make_ladder())], folder / "a.wbz")
    return (folder / "a.wbz").read_bytes()


# --- in and out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", RECORDED)
def test_recorded_ladders_come_out_as_they_went_in(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [RECORDINGS / f"variants_{model}", RECORDINGS / f"parity_{model}-variants"]
    made = create(sources, tmp_path / "a.wbz")
    assert made.findings == []  # redaction finds nothing, so evidence is not eaten
    bundle = Bundle(tmp_path / "a.wbz")
    bundle.verify(made.digest)
    climbed, parity = bundle.contents()
    assert climbed.ladder == read_ladder(sources[0])
    assert parity.parity == read_source(sources[1]).parity
    assert [entry.kind for entry in bundle.manifest.entries] == ["ladder", "parity"]
    assert climbed.entry.model == model
    assert None not in (climbed.entry.weights, climbed.entry.inputs, climbed.entry.configuration)
    assert climbed.entry.weights == parity.entry.weights
    bundle.extract(tmp_path / "out")
    received = tmp_path / "out" / climbed.entry.folder
    create([received, tmp_path / "out" / parity.entry.folder], tmp_path / "b.wbz")
    assert (tmp_path / "b.wbz").read_bytes() == (tmp_path / "a.wbz").read_bytes()
    monkeypatch.setenv(SOURCE_VARIABLE, str(received))
    assert list(explain.explainable()) == [model]
    ours = msgspec.structs.replace(read_ladder(received), notes=["received"])
    write_json(received / LADDER_FILE, ours)
    assert find_ladder(model, explain.explainable()[model]) == ours


def test_the_same_ladder_gives_the_same_bytes_from_any_folder(good: bytes, tmp_path: Path) -> None:
    create([written(tmp_path / "another" / "name", make_ladder())], tmp_path / "a.wbz")
    assert (tmp_path / "a.wbz").read_bytes() == good
    fewer = msgspec.structs.replace(make_ladder(), budgets=[64], cases=make_ladder().cases[1:])
    create([written(tmp_path / "fewer", fewer)], tmp_path / "b.wbz")
    left, right = (Bundle(tmp_path / name).manifest.entries[0] for name in ("a.wbz", "b.wbz"))
    assert left.weights == right.weights
    assert left.inputs != right.inputs
    assert left.configuration != right.configuration


def test_a_ladder_travels_with_what_lies_beside_it(tmp_path: Path) -> None:
    ladder = make_ladder()
    folder = written(tmp_path / "ladder", ladder)
    (folder / "parity.json").write_bytes((RECORDINGS / "parity_ernie45_vl-variants" / "parity.json").read_bytes())
    (folder / "lint.json").write_text('{"findings": []}')
    (folder / "note.md").write_text("one idea")
    run = small_run(tmp_path / "run")
    written(run, ladder)
    create([folder, run], tmp_path / "a.wbz")
    Bundle(tmp_path / "a.wbz").verify()
    alone, beside = Bundle(tmp_path / "a.wbz").contents()
    assert (alone.entry.kind, beside.entry.kind) == ("ladder", "run")
    assert alone.ladder == beside.ladder == ladder
    assert alone.parity is not None
    assert list(alone.findings) == ["lint.json"]
    assert alone.note == "one idea"
    assert beside.run is not None
    text = " ".join(inspect(report_of(tmp_path / "a.wbz")).text)
    assert text.count("The variants' ladder") == 2
    assert "Parity session" in text


def test_the_command_line(tmp_path: Path) -> None:
    folder, target = written(tmp_path / "mine", make_ladder()), tmp_path / "a.wbz"

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["bundle", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "0 replacements" in run("create", folder, "--show-redactions")
    made = json.loads(run("create", folder, "-o", target, "--json"))
    assert made["manifest"]["entries"][0]["kind"] == "ladder"
    assert "ladder of ernie45_vl" in run("show", target)
    assert "is whole" in run("verify", target, "--expect", made["digest"])
    assert "unpacked" in run("extract", target, tmp_path / "out")
    assert read_ladder(tmp_path / "out" / FOLDER) == make_ladder()
    run("report", folder, "-o", tmp_path / "a.html", "--markdown", tmp_path / "a.md")
    assert "| 64 tokens |" in (tmp_path / "a.md").read_text()
    assert "no evidence of a difference" in run("diff", target, folder)


# --- redaction -------------------------------------------------------------------------------------

SECRETS = (
    "/home/alice/work",
    "alice",
    "hf_QwErTyUiOpAsDfGhJkLzXcVbNm12",
    "build-7.corp",
    "10.20.30.40",
    "hunter2secret",
)


def planted(text: str) -> Ladder:
    """A ladder with `text` wherever vLLM, torch or a person writes freely."""
    ladder = make_ladder()
    sync = msgspec.structs.replace(
        ladder.boundaries[1].syncs[0], place=text, source=text, frames=[text], call="Tensor.cpu"
    )
    assert ladder.boundaries[1].obstacle is not None
    obstacle = msgspec.structs.replace(ladder.boundaries[1].obstacle, message=text, place=text, source=text)
    boundary = msgspec.structs.replace(ladder.boundaries[1], obstacle=obstacle, syncs=[sync], unwatched=text)
    case = ladder.cases[1]
    columns = [*case.columns[:-1], msgspec.structs.replace(case.columns[-1], findings=[text])]
    columns[1] = Column(name=columns[1].name, error=f"RuntimeError: {text}")
    version = text.partition(" (")[0]  # what looks like an address may be a version of four parts there
    environment = msgspec.structs.replace(ladder.environment, cpu=text, packages={"numpy": "2.3.5", "mine": version})
    return msgspec.structs.replace(
        ladder,
        notes=[text],
        environment=environment,
        boundaries=[ladder.boundaries[0], boundary],
        cases=[msgspec.structs.replace(case, columns=columns)],
        maps=[msgspec.structs.replace(ladder.maps[-1], why_not=text)],
    )


def test_what_identifies_goes_from_every_text_of_a_ladder(tmp_path: Path) -> None:
    text = (
        f'File "{SECRETS[0]}/vllm/model.py", line 7, by {SECRETS[1]} with {SECRETS[2]} on host={SECRETS[3]} '
        f"({SECRETS[4]}), --password {SECRETS[5]}"
    )
    ladder = planted(text)
    made = create([written(tmp_path / "mine", ladder)], tmp_path / "a.wbz")
    packed = members_of((tmp_path / "a.wbz").read_bytes())
    for secret in SECRETS:
        assert not [name for name, data in packed.items() if secret.encode() in data], secret
    assert made.manifest.redactions
    assert sum(made.manifest.redactions.values()) >= 50
    (content,) = Bundle(tmp_path / "a.wbz").contents()
    assert content.ladder is not None
    assert content.ladder.boundaries[1].syncs[0].place.startswith('File "<path>/vllm/model.py", line 7')
    assert content.ladder.cases[0].columns[-1].wall_us == ladder.cases[0].columns[-1].wall_us  # numbers keep their bits
    assert content.ladder.environment.packages["numpy"] == "2.3.5"
    kept = create([tmp_path / "mine"], tmp_path / "b.wbz", redact=False)
    assert kept.manifest.redactions is None
    assert Bundle(tmp_path / "b.wbz").contents()[0].ladder == ladder


# --- hostile ---------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def first(ladder: dict[str, Any]) -> dict[str, Any]:
    """The first column of the second call, eager as served of an image."""
    column: dict[str, Any] = ladder["cases"][1]["columns"][0]
    return column


HOSTILE: dict[str, Change] = {
    "another version": lambda ladder: ladder.update(schema_version=9),
    "version as text": lambda ladder: ladder.update(schema_version="1"),
    "no version": lambda ladder: ladder.pop("schema_version"),
    "unknown field": lambda ladder: ladder.update(run_this="rm -rf /"),
    "unknown field of a column": lambda ladder: first(ladder).update({"\x1b[2J": 1}),
    "missing field": lambda ladder: ladder.pop("environment"),
    "wrong modality": lambda ladder: ladder["cases"][0].update(modality="<script>"),
    "wrong replay": lambda ladder: ladder.update(replay="program"),
    "text for a time": lambda ladder: first(ladder).update(busy_us="0"),
    "huge integer": lambda ladder: ladder.update(seed=10**400),
    "negative sample": lambda ladder: first(ladder)["wall_us"].__setitem__(0, -1.0),
    "sample of no time": lambda ladder: first(ladder)["wall_us"].__setitem__(0, 5e-324),
    "endless sample": lambda ladder: first(ladder)["wall_us"].__setitem__(0, 1e300),
    "negative busy": lambda ladder: first(ladder).update(busy_us=-1.0),
    "negative gain": lambda ladder: ladder["boundaries"][0].update(inside_us=-1.0),
    "endless module": lambda ladder: ladder["maps"][0]["modules"][0].update(us=1e300),
    "endless family": lambda ladder: ladder["maps"][0]["modules"][0]["families"].update(gemm=[1, 1e300]),
    "endless roofline": lambda ladder: ladder["maps"][0]["modules"][0].update(roofline_us=1e300),
    "negative nodes": lambda ladder: ladder["maps"][0].update(nodes=-1),
    "nodes beyond counting": lambda ladder: first(ladder).update(nodes=1 << 60),
    "negative tokens": lambda ladder: ladder["cases"][1].update(tokens=[-64]),
    "tokens of no item": lambda ladder: ladder["cases"][1].update(tokens=[64, 64]),
    "no items": lambda ladder: ladder["cases"][1].update(tokens=[], grids=[]),
    "negative grid": lambda ladder: ladder["cases"][1].update(grids=[[1, -16, 16]]),
    "no columns": lambda ladder: ladder["cases"][1].update(columns=[]),
    "a column twice": lambda ladder: ladder["cases"][1]["columns"].append(first(ladder)),
    "order of others": lambda ladder: first(ladder).update(order=[1, 2]),
    "order that falls": lambda ladder: first(ladder).update(order=list(range(20, 0, -1))),
    "parity of others": lambda ladder: first(ladder)["parity"].append(first(ladder)["parity"][0]),
    "too many samples": lambda ladder: first(ladder).update(wall_us=[1.0] * (MOST_SAMPLES + 1), order=[]),
    "too many samples together": lambda ladder: ladder["cases"][1].update(
        columns=[{"name": str(number), "wall_us": [1.0] * 60_000} for number in range(9)]
    ),
    "too long an order": lambda ladder: first(ladder).update(order=[0] * (MOST_SAMPLES + 1)),
    "too many calls": lambda ladder: ladder.update(cases=ladder["cases"][:1] * (MOST_ROWS + 1)),
    "too many notes": lambda ladder: ladder.update(notes=["x"] * (MOST_SAMPLES + 1)),
    "endless name": lambda ladder: ladder["cases"][1].update(name="x" * (LONGEST_NAME + 1)),
    "empty name": lambda ladder: first(ladder).update(name=""),
    "endless title": lambda ladder: ladder["boundaries"][0].update(title="x" * (LONGEST_NAME + 1)),
    "endless module name": lambda ladder: ladder["maps"][0]["modules"][0].update(module="x" * (LONGEST_NAME + 1)),
    "endless error": lambda ladder: first(ladder).update(error="x" * (LONGEST_TEXT + 1)),
    "endless package": lambda ladder: ladder["environment"]["packages"].update({"x" * (LONGEST_TEXT + 1): "1"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ladders_are_refused_in_a_bundle_and_on_the_way_into_one(
    name: str, good: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.wbz"
    path.write_bytes(edited(members_of(good), MEMBER, HOSTILE[name]))
    with pytest.raises(WorkbenchError) as refused:
        Bundle(path).verify()
    message = str(refused.value)
    assert message.startswith(f"{path} is not a bundle to trust: {FOLDER}")
    assert message.isprintable()
    assert len(message) < 800
    document = json.loads(members_of(good)[MEMBER])
    HOSTILE[name](document)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / LADDER_FILE).write_text(json.dumps(document))
    with pytest.raises(WorkbenchError, match=re.escape(LADDER_FILE)):
        create([tmp_path / "mine"], tmp_path / "b.wbz")
    assert not (tmp_path / "b.wbz").exists()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(number: str, good: bytes, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "a.wbz"
    sample = str(make_ladder().cases[1].columns[0].wall_us[0])
    data = members[MEMBER].replace(sample.encode(), number.encode(), 1)
    assert data != members[MEMBER]
    path.write_bytes(sealed({**members, MEMBER: data}))
    with pytest.raises(WorkbenchError, match="not a bundle to trust"):
        Bundle(path).contents()


def test_a_bundle_is_what_its_manifest_calls_it(good: bytes, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "a.wbz"

    def called(kind: str) -> Callable[[dict[str, Any]], None]:
        return lambda manifest: manifest["entries"][0].update(kind=kind)

    for kind in ("run", "parity", "external"):
        path.write_bytes(sealed(members, called(kind)))
        with pytest.raises(WorkbenchError, match="calls runs/00-ladder-of-ernie45-vl what it is not"):
            Bundle(path).contents()
    bare = {name: data for name, data in members.items() if name != MEMBER} | {f"{FOLDER}/lint.json": b"{}"}
    path.write_bytes(sealed(bare))
    with pytest.raises(WorkbenchError, match="what it is not"):
        Bundle(path).contents()


@pytest.mark.parametrize("ladder", [make_ladder(), make_glm_ladder()], ids=["ernie", "glm"])
def test_whole_ladders_contradict_nothing(ladder: Ladder) -> None:
    assert wrong_ladder(ladder) == ""


def armed(text: str, known: bool) -> Ladder:
    """A valid ladder that says `text` in every place that takes any; of a `known` encoder, whose recipes are shown."""
    ladder = planted(text)
    name = text[:LONGEST_NAME]
    rename = msgspec.structs.replace
    case = ladder.cases[0]
    kept = {SERVED, GRAPH, ALL}
    columns = [
        column if column.name in kept else rename(column, name=f"{name} {place}"[-LONGEST_NAME:], variants=[name])
        for place, column in enumerate(case.columns)
    ]
    mapped = make_ladder().maps[0]
    modules = [rename(one, module=name, families={name: (1, 2.0)}) for one in mapped.modules]
    return rename(
        ladder,
        cases=[rename(case, name=name, columns=columns)],
        maps=[*ladder.maps, rename(mapped, name=name, modules=modules)],
        boundaries=[rename(one, name=name, title=name) for one in ladder.boundaries],
        captured=[
            *ladder.captured,
            Captured(
                column=name,
                costs=[],
                schedules=[text],
                recipes=[msgspec.structs.replace(steps_of(name), refused=[text])],
            ),
        ],
        model=rename(
            ladder.model,
            key=ladder.model.key if known else name,
            architecture=text,
            attention_backend=text,
            weights=text,
        ),
        created=text,
    )


@pytest.fixture(scope="module")
def weapons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bundle with a ladder of each hostile text."""
    folder = tmp_path_factory.mktemp("weapons")
    texts = [text.replace("{port}", "9") for text in SCRIPTS]
    create(
        [written(folder / str(number), armed(text, known=number % 2 == 0)) for number, text in enumerate(texts)],
        folder / "a.wbz",
        redact=False,
    )
    return folder / "a.wbz"


def test_hostile_text_of_a_ladder_stays_text(weapons: Path) -> None:
    diff = compare_files(weapons, weapons)
    for document in (report_of(weapons), diff_html(diff)):
        inspector = inspect(document)
        assert inspector.tags <= ALLOWED
        assert all(ATTRIBUTES.fullmatch(name) for name in inspector.attributes), inspector.attributes
        assert not set(document) & set("\x1b\x07\x9b\u202e\u2066\u200b")
        assert "<script>document" in " ".join(inspector.text)  # it is there to be read
    with opened(weapons) as contents:
        text = bundle_markdown(contents) + diff_markdown(diff)
    assert not re.search(r"(?<!\\)<(?!/?(?:br|sub))", text)
    assert not re.search(r"(?<!\\)\]\(", text)
    for verb in (["show", weapons], ["diff", weapons, weapons]):
        result = CliRunner().invoke(app, ["bundle", *map(str, verb)])
        assert result.exit_code == 0
        assert not set(result.output) & set("\x1b\x07\x9b\u202e\u2066\u200b")


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_chromium_runs_nothing_of_it(weapons: Path, tmp_path: Path) -> None:
    document = report_of(weapons)
    for text in (document, document.replace("Content-Security-Policy", "X-None")):
        dom = dump(text, tmp_path)
        assert "</html>" in dom
        assert not has_run_a_script(dom)


def test_odd_ladders_with_right_hashes_are_refused_or_shown(good: bytes, tmp_path: Path) -> None:
    generator, members, path = random.Random(23), members_of(good), tmp_path / "a.wbz"
    other, shown = tmp_path / "good.wbz", 0
    other.write_bytes(good)
    document = json.loads(members[MEMBER])
    for _ in range(120):
        path.write_bytes(sealed({**members, MEMBER: json.dumps(mutated(document, generator)).encode()}))
        try:
            page = report_of(path)
            diff = compare_files(other, path)
            with opened(path) as contents:
                assert bundle_markdown(contents)
        except WorkbenchError as error:
            assert "\n" not in str(error)  # noqa: PT017  refusal is one right answer
            continue
        shown += 1
        assert inspect(page + diff_html(diff)).tags <= ALLOWED
        assert diff_markdown(diff)
    assert 10 < shown < 110


@pytest.mark.parametrize("part", ["cases", "maps", "boundaries", "captured"])
def test_a_ladder_without_a_part_is_a_page_too(part: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "mine", msgspec.structs.replace(make_ladder(), **{part: []}))
    create([folder], tmp_path / "a.wbz")
    assert "</html>" in report_of(tmp_path / "a.wbz")
    with opened(folder) as contents:
        assert "ladder of ernie45" in bundle_markdown(contents)


def steps_of(way: str, rows: int = 256) -> Steps:
    return Steps(rows=rows, attention=way, qkv=way, proj=way, fc1=way, fc2=way)


@pytest.mark.parametrize(
    ("recipes", "why"),
    [
        ([steps_of("way")] * (MOST_ROWS + 1), "more than 500 ways"),
        ([steps_of("way", -1)], "a count is negative"),
        ([steps_of("")], "a name is empty"),
        ([steps_of("x" * 401)], "longer than 400"),
    ],
    ids=["too many", "negative", "empty", "endless"],
)
def test_recipes_that_no_ladder_has_are_refused(recipes: list[Steps], why: str) -> None:
    ladder = msgspec.structs.replace(make_ladder(), captured=[Captured(column=ALL, costs=[], recipes=recipes)])
    assert why in wrong_ladder(ladder)


@pytest.mark.parametrize("missing", [SERVED, GRAPH, ALL])
def test_a_ladder_without_a_step_is_a_page_too(missing: str, tmp_path: Path) -> None:
    ladder = make_ladder()
    cases = [
        msgspec.structs.replace(case, columns=[column for column in case.columns if column.name != missing])
        for case in ladder.cases
    ]
    create([written(tmp_path / "mine", msgspec.structs.replace(ladder, cases=cases))], tmp_path / "a.wbz")
    assert "</html>" in report_of(tmp_path / "a.wbz")


# --- what a page says ------------------------------------------------------------------------------


def test_the_page_of_a_ladder_says_what_notebook_01_says(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.wbz").write_bytes(good)
    document = report_of(tmp_path / "a.wbz")
    text = " ".join(inspect(document).text)
    for told in (
        *("times as fast as eager as served on 3 calls", "equal vLLM's graph bit for bit", "beyond the noise floor"),
        *("On  4096 tokens  vLLM's graph, one_pass", "Step by step: 64 tokens", "Every step of every call (24)"),
        *("2 of 3 candidates capture", "ViT and the resampler as shipped", "grid = grid_thw.cpu()"),
        *("vision_model.blocks.*.attn.qkv", "vLLM's graph at budget 64, by module", "why", "NVIDIA H200"),
    ):
        assert told in text, told
    assert document.count("<circle") == 3 + 3 + 8 + 4  # the legend, and a dot per timed step but the two eager ones


def test_what_keeps_a_ladder_from_its_word_stands_first(tmp_path: Path) -> None:
    ladder = msgspec.structs.replace(make_ladder(), replay="static_replay", complete=False)
    create([written(tmp_path / "mine", ladder)], tmp_path / "a.wbz")
    document = report_of(tmp_path / "a.wbz")
    text = " ".join(inspect(document).text)
    assert text.index("static replay: Python runs again") < text.index("bit for bit")
    assert "the ladder is not whole: its session did not come to its end" in text
    assert "times as fast as eager as served" not in text
    assert "<circle" not in document


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("ernie45_vl", "times as fast as eager as served on"),
        ("glm4_1v", "On 64 tokens, videos allowed vLLM's graph is wrong"),
    ],
)
def test_pages_of_the_recordings(model: str, told: str, tmp_path: Path) -> None:
    ladder = read_ladder(RECORDINGS / f"variants_{model}")
    case = next(case for case in ladder.cases if case.name == "64 tokens")
    times = next(column.wall_us for column in case.columns if column.name == ALL)
    row = f"| {np.mean(times) / 1e3:.2f} | {np.percentile(times, 99) / 1e3:.2f} |"
    create([RECORDINGS / f"variants_{model}"], tmp_path / "a.wbz")
    document = report_of(tmp_path / "a.wbz")
    assert len(document.encode()) < LARGEST_REPORT / 20
    inspector = inspect(document)
    assert inspector.tags <= ALLOWED
    with opened(tmp_path / "a.wbz") as contents:
        markdown = bundle_markdown(contents)
    assert told in markdown
    assert ("How blocks are computed" in document) == any(one.recipes for one in ladder.captured)
    assert row in next(line for line in markdown.splitlines() if line.startswith("| 64 tokens |"))


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_the_figure_is_drawn_in_colour(tmp_path: Path) -> None:
    """A dot of each colour stands where the page's own numbers put it."""
    from PIL import Image

    create([RECORDINGS / "variants_ernie45_vl"], tmp_path / "a.wbz")
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    page.write_text(report_of(tmp_path / "a.wbz"))
    take_screenshot(page, picture, height=1000)
    colors = {color for _, color in Image.open(picture).convert("RGB").getcolors(1 << 24) or []}
    assert {(0xD5, 0x5E, 0x00), (0x56, 0xB4, 0xE9), (0x00, 0x9E, 0x73)} <= colors


# --- comparison ------------------------------------------------------------------------------------


def varied(ladder: Ladder, change: Callable[[Case, Column], Column], seed: int = 5, **fields: Any) -> Ladder:
    """The same measured again: samples in another order, each column changed by `change`."""
    generator = random.Random(seed)

    def again(case: Case, column: Column) -> Column:
        samples = generator.sample(column.wall_us, len(column.wall_us))
        return change(case, msgspec.structs.replace(column, wall_us=samples))

    cases = [
        msgspec.structs.replace(case, columns=[again(case, column) for column in case.columns]) for case in ladder.cases
    ]
    return msgspec.structs.replace(ladder, cases=cases, **fields)


def scaled(factors: dict[str, float]) -> Callable[[Case, Column], Column]:
    def change(_: Case, column: Column) -> Column:
        factor = factors.get(column.name, 1.0)
        return msgspec.structs.replace(column, wall_us=[value * factor for value in column.wall_us])

    return change


def diff_of(tmp_path: Path, head: Ladder, base: Ladder | None = None) -> Diff:
    sides = written(tmp_path / "base", base or make_ladder()), written(tmp_path / "head", head)
    for side in sides:
        create([side], side.with_suffix(".wbz"), overwrite=True)
    return compare_files(tmp_path / "base.wbz", tmp_path / "head.wbz")


def verdicts_of(diff: Diff) -> dict[str, str]:
    return {timing.name: timing.changes[0].verdict for timing in diff.timings()}


def test_the_same_ladder_again_has_no_evidence_of_a_difference(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, varied(make_ladder(), scaled({})))
    (pair,) = diff.pairs
    assert set(verdicts_of(diff).values()) == {"no evidence"}
    assert pair.doubts + pair.differences + pair.notes == []
    assert not diff.has_new_failures()
    headline = {timing.name for timing in pair.timings if timing.call is None}
    assert headline == {"all variants[video of 4 frames]", "graph[64 tokens]", "all variants[64 tokens]",
                        "all variants[4096 tokens]"}  # fmt: skip


def test_faster_variants_are_named_and_nothing_else(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, varied(make_ladder(), scaled({ALL: 0.9, "fused": 0.9})))
    found = verdicts_of(diff)
    assert {name for name, verdict in found.items() if verdict == "faster"} == {
        name for name in found if name.startswith((f"{ALL}[", "fused["))
    }
    assert set(found.values()) == {"faster", "no evidence"}
    markdown = diff_markdown(diff).replace("\\", "")
    assert "**all variants[64 tokens], mean: faster, -10" in markdown
    assert "all variants[64 tokens], median" not in markdown  # one sentence for each call
    assert "vLLM's graph and of all variants, call by call" in " ".join(inspect(diff_html(diff)).text)
    assert not check(diff, ["all variants[64 tokens].mean > +5%"])[0].hit


def test_another_machine_or_day_is_said(tmp_path: Path) -> None:
    ladder = make_ladder()
    gpu = msgspec.structs.replace(ladder.environment.gpus[0], name="NVIDIA H100 80GB HBM3")
    other = varied(
        ladder,
        scaled({GRAPH: 1.2}),
        environment=msgspec.structs.replace(ladder.environment, gpus=[gpu]),
        created="2026-12-24T12:00:00+00:00",
    )
    (pair,) = diff_of(tmp_path, other).pairs
    told = " ".join(pair.doubts)
    assert "another GPU" in told
    assert "measured on other days: 2026-11-29 and 2026-12-24" in told
    assert "vLLM's own graph changed by +2" in told
    assert "on 1 of 1 calls although no variant touches it" in told
    bigger = msgspec.structs.replace(other, budgets=[64, 4096])
    (pair,) = diff_of(tmp_path, bigger).pairs
    assert "although no variant" not in " ".join(pair.doubts)  # other budgets explain it
    assert "budgets: 64, 2048 → 64, 4096" in pair.differences


def test_a_step_that_fails_only_in_the_head_ends_the_command_with_1(tmp_path: Path) -> None:
    def failing(case: Case, column: Column) -> Column:
        fails = column.name == ALL and case.name == "64 tokens"
        return Column(name=ALL, error="OutOfMemoryError: at 0x7f00") if fails else column

    diff = diff_of(tmp_path, varied(make_ladder(), failing))
    assert diff.has_new_failures()
    assert check(diff, ["all variants.failures > +0"])[0].hit
    result = CliRunner().invoke(app, ["bundle", "diff", str(tmp_path / "base.wbz"), str(tmp_path / "head.wbz")])
    assert result.exit_code == 1
    assert "worse: calls on which all variants failed (OutOfMemoryError): 0 → 1; only in the head: 1" in result.output
    # The calls on which both fail, with other addresses in their errors, are none that only one has.
    again = varied(
        make_ladder(), lambda _, column: msgspec.structs.replace(column, error=column.error and "RuntimeError: x")
    )
    assert not diff_of(tmp_path, again).has_new_failures()


def test_outputs_that_went_wrong_are_new_findings(tmp_path: Path) -> None:
    def wrong(case: Case, column: Column) -> Column:
        if (case.name, column.name) != ("64 tokens", "one_pass"):
            return column
        far = msgspec.structs.replace(column.parity[0], bit_equal=False, relative_rms=1.0)
        return msgspec.structs.replace(column, parity=[far], against_graph=[far], findings=["offsets fall"])

    diff = diff_of(tmp_path, varied(make_ladder(), wrong))
    (row,) = diff.pairs[0].parity
    assert row.new_findings == [
        "one_pass[64 tokens] has other bits than vLLM's graph",
        "one_pass[64 tokens] lies beyond 3 noise floors from eager as served",
        "one_pass[64 tokens]: offsets fall",
    ]
    assert check(diff, ["ladder.new_findings > 0"])[0].hit
    (row,) = diff_of(tmp_path, make_ladder(), varied(make_ladder(), wrong)).pairs[0].parity
    assert (len(row.new_findings), len(row.gone_findings)) == (0, 3)


def test_what_one_side_alone_ran_is_left_out_and_said(tmp_path: Path) -> None:
    ladder = make_ladder()
    cases = [
        msgspec.structs.replace(case, columns=[one for one in case.columns if one.name != "fused"])
        for case in ladder.cases[:2]
    ]
    diff = diff_of(tmp_path, msgspec.structs.replace(ladder, cases=cases))
    assert diff.pairs[0].notes == ["calls of the base alone: 4096 tokens", "steps of the base alone: fused"]
    assert not [name for name in verdicts_of(diff) if "4096" in name or "fused" in name]
    other = msgspec.structs.replace(ladder, model=msgspec.structs.replace(ladder.model, depth=1))
    (pair,) = diff_of(tmp_path, other).pairs
    assert pair.timings == []
    assert "timings are not compared: the models differ in depth (2 and 1)" in pair.notes


@pytest.mark.parametrize("model", RECORDED)
def test_a_recorded_ladder_does_not_differ_from_itself(model: str) -> None:
    folder = RECORDINGS / f"variants_{model}"
    diff = compare_files(folder, folder)
    assert set(verdicts_of(diff).values()) <= {"no evidence", "not judged"}
    assert len(verdicts_of(diff)) == sum(
        bool(one.wall_us) for case in read_ladder(folder).cases for one in case.columns
    )
    assert not diff.has_new_failures()
    assert not diff.pairs[0].parity[0].new_findings
