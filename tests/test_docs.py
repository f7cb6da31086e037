"""The documentation is true: its commands run, its links lead somewhere, and no verb is left out.

Every line of README.md and docs/*.md that begins with `workbench ` inside a fence is run, page by page in one folder,
with small inputs where a page speaks of files that its reader has. A fence marked `gpu` or `long` (```console gpu) is
not run; its options are checked, like those of commands inside a sentence. `# exit code 1` after a command is what it
must end with.
"""

import contextlib
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from tests.runs import small_run
from workbench.budgets import Configuration, Limits
from workbench.capturable import GRAPH, read_ladder
from workbench.cli import app
from workbench.costs import SHIPPED
from workbench.errors import WorkbenchError
from workbench.gaps import analyze
from workbench.ledger import Batch, CallLine, Group, ManagerLine, ProcessLine
from workbench.lint import RULES, lint
from workbench.models import model_facts
from workbench.run import RECORDINGS, load_recording
from workbench.stats import summary
from workbench.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ALL = (*PAGES, ROOT / "DEVELOPERS.md")
ENGINE_VERBS = {"boundary", "capture", "calibrate", "checkpoint", "compare", "faults", "parity", "sweep"}
NOT_RUN = {"gpu", "long"}
FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
EXIT_CODE = re.compile(r"\s+# exit code (\d)$")
OUR_FOLDERS = "workbench|docs|tests|scripts|notebooks|benchmarks"
# What commands make.
MADE = re.compile(r"workbench/recordings/(costs|parity)_|benchmarks/(results\.|data/)")


@dataclass(frozen=True)
class Command:
    """One documented command line; `words` come after `workbench`, `redirect` is the file of `> file`."""

    page: str
    text: str
    words: tuple[str, ...]
    redirect: str | None
    exit_code: int
    run: bool

    @property
    def verb(self) -> str:
        """The first word."""
        return self.words[0]


def label(page: Path) -> str:
    """Name a page by its path in the project."""
    return page.relative_to(ROOT).as_posix()


def command(page: str, line: str, run: bool) -> Command:
    """Read one line that begins with `workbench `."""
    expected = EXIT_CODE.search(line)
    text = EXIT_CODE.sub("", line)
    words = shlex.split(text)[1:]
    redirect = None
    if ">" in words[-2:]:
        redirect, words = words[-1], words[:-2]
    return Command(page, text, tuple(words), redirect, int(expected[1]) if expected else 0, run)


def fenced(page: Path) -> list[Command]:
    """Return the commands in the fences of `page`, in order."""
    found = []
    for info, body in FENCE.findall(page.read_text("utf-8")):
        for line in map(str.strip, body.splitlines()):
            assigned = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)  # VARIABLE=value before a command: not run
            if assigned.startswith("workbench "):
                found.append(command(label(page), assigned, assigned == line and not NOT_RUN & set(info.split())))
    return found


def inline(page: Path) -> list[str]:
    """Return the code spans outside fences, on one line each."""
    return [" ".join(span.split()) for span in CODE.findall(FENCE.sub("", page.read_text("utf-8")))]


COMMANDS = [one for page in PAGES for one in fenced(page)]
RUN = [one for one in COMMANDS if one.run]


# The commands ------------------------------------------------------------------------------------------------------


def own_files(folder: Path) -> None:
    """Put into `folder` what the pages say that a reader has: two runs, answers, results, a ledger."""
    for name in ("workbench", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    small_run(folder / "runs" / "base", "base", repeats=120)
    small_run(folder / "runs" / "head", "head", repeats=120, scale={"graph": 0.9}, seed=1)
    answers = "".join(f'{{"id": {i}, "token_ids": [1, {i}, 3]}}\n' for i in range(50))
    for arm, value in (("off", 0.6548), ("on", 0.6564)):
        (folder / f"{arm}.jsonl").write_text(answers)
        metrics = {
            "alias": "ai2d",
            "exact_match,flexible-extract": value,
            "exact_match_stderr,flexible-extract": 0.0086,
        }
        result = {"results": {"ai2d": metrics}, "n-samples": {"ai2d": {"original": 3088, "effective": 3088}}}
        (folder / f"{arm}.json").write_text(json.dumps(result | {"versions": {"ai2d": 0}, "config": {"model": "vllm"}}))
    batch = Batch(items=[0, 1], tokens=128, budget=128, host_us=900.0)
    group = Group(modality="image", route="graph", grids=[[1, 16, 16]] * 2, tokens=[64, 64], batches=[batch])
    lines = (
        ProcessLine(pid=7, schema_version=1, t=0.0, workbench="0.1.0", vllm="0.33.0", device="cuda"),
        ManagerLine(pid=7, model="Glm4vForConditionalGeneration", budgets=[64, 128], max_items=4, max_frames=0),
        CallLine(pid=7, rank=0, t=1.0, runner="v2", host_us=1000.0, gpu_us=800.0, groups=[group]),
    )
    (folder / "ledger.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@dataclass
class Result:
    """How a command ended."""

    exit_code: int
    output: str


@dataclass
class Reader:
    """Someone who follows the pages: a folder per page, each command run once, in order."""

    base: Path
    results: dict[int, Result] = field(default_factory=dict)

    def follow(self, index: int) -> Result:
        """Run command `index` of RUN, and first those before it on its page (but for the engine's)."""
        wanted = RUN[index]
        for i, one in enumerate(RUN[: index + 1]):
            if one.page == wanted.page and i not in self.results and (i == index or one.verb not in ENGINE_VERBS):
                self.results[i] = self.run(one)
        return self.results[index]

    def run(self, one: Command) -> Result:
        """Run `one` in its page's folder."""
        folder = self.base / Path(one.page).stem
        if not folder.exists():
            folder.mkdir()
            own_files(folder)
        with contextlib.chdir(folder):
            words = [match for word in one.words for match in (expanded(word) or [word])]
            done = CliRunner().invoke(app, words)
            if one.redirect:
                Path(one.redirect).write_text(done.stdout)
        code = 2 if isinstance(done.exception, WorkbenchError) else done.exit_code
        return Result(code, f"{done.output}\n{done.exception!r}")


def expanded(word: str) -> list[str]:
    """Expand `word` as a shell does; a quoted pattern like 'call#*' matches no file and stays."""
    return sorted(map(str, Path().glob(word))) if "*" in word and "/" in word else []


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        patch.delenv("WORKBENCH_RUN", raising=False)
        yield Reader(tmp_path_factory.mktemp("pages"))


def parameters() -> list[Any]:
    """One test per command; those that build an encoder are marked."""
    return [
        pytest.param(i, id=f"{one.page} {one.text}", marks=[pytest.mark.engine] * (one.verb in ENGINE_VERBS))
        for i, one in enumerate(RUN)
    ]


@pytest.mark.parametrize("index", parameters())
def test_command_runs(reader: Reader, index: int) -> None:
    one = RUN[index]
    if one.verb == "advise" and "--profile" not in one.words and not SHIPPED["ernie45_vl"].is_file():
        pytest.skip("no cost profile ships yet: scripts/h200_costs.sh makes it")
    done = reader.follow(index)
    assert done.exit_code == one.exit_code, done.output[-3000:]


# The options -------------------------------------------------------------------------------------------------------


@cache
def verbs() -> dict[str, click.Command]:
    """Every verb by its words, `bundle create` as two."""
    found: dict[str, click.Command] = {}
    root = typer.main.get_command(app)
    assert hasattr(root, "commands")
    for name, verb in root.commands.items():
        if hasattr(verb, "commands"):
            found |= {f"{name} {inner}": each for inner, each in verb.commands.items()}
        else:
            found[name] = verb
    return found


def faults_of(words: tuple[str, ...]) -> list[str]:
    """Say what in `words` is no verb or option of the command line."""
    if words[:1] == ("--help",):
        return []
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in verbs()), None)
    if name is None:
        groups = {verb.split()[0] for verb in verbs() if " " in verb}
        return [] if words[0] in groups and len(words) == 1 else [f"no verb {' '.join(words[:2])!r}"]
    known = {"--help"}
    for parameter in verbs()[name].params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    given = [word.split("=")[0] for word in words[1:] if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)]
    return [f"{name} has no {option}" for option in given if option not in known]


def mentioned(page: Path) -> list[tuple[str, ...]]:
    """Every `workbench VERB ...` of a page, in fences and sentences."""
    spans = [span.removeprefix("$ ") for span in inline(page)]
    said = [shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", span)) for span in spans if re.search(r"\bworkbench ", span)]
    return [one.words for one in fenced(page)] + [tuple(words[1:]) for words in said if words[:1] == ["workbench"]]


@pytest.mark.parametrize("page", ALL, ids=label)
def test_every_verb_and_option_exists(page: Path) -> None:
    assert [fault for words in mentioned(page) for fault in faults_of(words)] == []


def test_the_check_of_options_sees_faults() -> None:
    assert faults_of(("plan", "--budget", "1")) == ["plan has no --budget"]
    assert faults_of(("bundle", "make")) == ["no verb 'bundle make'"]
    assert faults_of(("bundle", "create", "x", "-o", "y", "--no-redact")) == []


def test_the_makefile_uses_what_exists() -> None:
    lines = re.findall(r"\$\(BIN\)/workbench (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert len(lines) >= 3
    assert [fault for line in lines for fault in faults_of(tuple(shlex.split(line)))] == []


def test_every_verb_is_documented() -> None:
    said = {" ".join(words[:n]) for page in PAGES for words in mentioned(page) for n in (1, 2)}
    assert sorted(set(verbs()) - said) == []


def written(one: Command) -> list[str]:
    """Return the files and folders that a documented command makes."""
    options = ("--out", "-o", "--html", "--markdown", "--check")
    named = [value for option, value in zip(one.words, one.words[1:], strict=False) if option in options]
    received = list(one.words[3:]) if one.words[:2] == ("bundle", "extract") else []
    return [*named, *received, *([one.redirect] if one.redirect else [])]


def test_what_commands_write_is_ignored_by_git() -> None:
    ignored = ("runs/", "report", "workbench/recordings/")  # recordings are kept on purpose
    made = [(one.text, path) for one in COMMANDS for path in written(one)]
    assert len(made) >= 25
    assert [(text, path) for text, path in made if not path.startswith(ignored)] == []


def test_commands_are_found_and_most_are_run() -> None:
    assert len(RUN) >= 25
    assert {one.exit_code for one in RUN} == {0, 1}
    assert len({one.page for one in RUN}) >= 6


# What the pages name -----------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", ALL, ids=label)
def test_files_and_modules_exist(page: Path) -> None:
    text = "\n".join(inline(page))
    paths = re.findall(rf"(?:^|(?<=\s))((?:{OUR_FOLDERS})/[\w./+-]*)", text, re.MULTILINE)
    assert [path for path in paths if not MADE.match(path) and not (ROOT / path).exists()] == []
    modules = re.findall(r"python3? -m ((?:workbench|benchmarks)[\w.]*)", text)
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_environment_variables_exist() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "workbench").rglob("*.py"))
    said = {name for page in ALL for name in re.findall(r"\bWORKBENCH_[A-Z_]+", page.read_text("utf-8"))}
    assert said
    assert [name for name in sorted(said) if f'"{name}"' not in source] == []


def test_developers_names_every_room() -> None:
    rooms, _, _ = (ROOT / "DEVELOPERS.md").read_text("utf-8").partition("## Beside it")
    named = {name.rstrip("/") for row in re.findall(r"^\| (`.+?`) \|", rooms, re.MULTILINE) for name in row.split("`")}
    there = {path.name for path in (ROOT / "workbench").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - {"__init__.py", "__main__.py", "__pycache__"} == named - {"", ", "}


def test_recordings_that_ship_are_described() -> None:
    text = (ROOT / "docs" / "recordings.md").read_text("utf-8")
    folders = [path.name for path in (ROOT / "workbench" / "recordings").iterdir() if path.is_dir()]
    assert [name for name in folders if f"`{name}`" not in text] == []


def test_notebooks_that_ship_are_described() -> None:
    text = (ROOT / "docs" / "notebooks.md").read_text("utf-8")
    assert [path.name for path in (ROOT / "notebooks").glob("*.ipynb") if path.name not in text] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in ALL:
        text = page.read_text("utf-8")
        code = [*inline(page), *re.findall(r"^    (make .+)$", text, re.MULTILINE)]
        said = {name for span in code for name in re.findall(r"^make ([a-z]+)", span)}
        assert said <= targets, f"{label(page)} names {said - targets}"


def test_tests_named_as_evidence_exist() -> None:
    text = (ROOT / "docs" / "defects.md").read_text("utf-8")
    named = re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", text)
    assert len(named) >= 7
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text("utf-8")] == []


def test_every_defect_has_a_command_and_a_test() -> None:
    text = (ROOT / "docs" / "defects.md").read_text("utf-8")
    numbers = re.findall(r"^## (D\d)$", text, re.MULTILINE)
    table = re.findall(r"^\| (D\d) \| (.+?) \| `(tests/test_\w+\.py)::(test_\w+)` \| (.*?) ?\|$", text, re.MULTILINE)
    assert [row[0] for row in table] == numbers == [f"D{i}" for i in range(1, 8)]
    for number, commands, file, name, variant in table:
        section = re.split(r"^## ", text.split(f"\n## {number}\n")[1], flags=re.MULTILINE)[0]
        verbs = set(re.findall(r"^workbench (\w+)", section, re.MULTILINE))
        assert set(re.findall(r"`workbench (\w+)`", commands)) == verbs, number
        assert f"`{file}::{name}`" in section, number
        for page in re.findall(r"\((variants/\w+\.md)\)", variant):
            assert f"#{number.lower()}" in (ROOT / "docs" / page).read_text("utf-8"), number


def test_rules_and_scenarios_of_the_defects_exist() -> None:
    source = (ROOT / "workbench" / "encoder" / "parity" / "scenarios.py").read_text("utf-8")
    scenarios = {name.replace("_", "-") for name in re.findall(r"^@scenario\(.*\)\ndef (\w+)\(", source, re.MULTILINE)}
    text = (ROOT / "docs" / "defects.md").read_text("utf-8")
    named = re.findall(r"(?:[Rr]ules?|[Ss]cenario) ((?:`[a-z-]+`(?:, | and )?)+)", text)
    words = {word for group in named for word in re.findall(r"`([a-z-]+)`", group)}
    assert len(words) >= 9
    assert words <= {rule.id for rule in RULES} | scenarios


# The numbers that the pages quote -----------------------------------------------------------------------------------


def defects() -> str:
    """docs/defects.md without line breaks."""
    return " ".join((ROOT / "docs" / "defects.md").read_text("utf-8").split())


def test_defects_quote_the_recordings() -> None:
    text = defects()
    failures = [failure for failure in load_recording("ernie45_vl-mixed-2048").failures if failure.arm == "graph"]
    assert failures
    assert all(failure.cause == "D1" and "shapes cannot be multiplied" in failure.message for failure in failures)
    glm = read_ladder(RECORDINGS / "variants_glm4_1v")
    assert (glm.max_frames, glm.max_items) == (16, 4)
    (beside,) = (case for case in glm.cases if case.beside_videos)
    rms = {column.name: [item.relative_rms for item in column.parity] for column in beside.columns}
    assert {f"{value:.2f}" for value in rms[GRAPH] if value} == set(re.findall(r"relative RMS (\d\.\d+) against", text))
    mended = next(column for column in beside.columns if column.name == "cu_seqlens_tail")
    assert all(item.bit_equal for item in mended.parity)
    videos = [case for case in glm.cases if case.modality == "video"]
    assert videos
    for case in videos:
        graph = next(column for column in case.columns if column.name == GRAPH)
        assert all((item.relative_rms or 0.0) < (case.noise_rms or 0.0) for item in graph.parity)


def test_defects_quote_the_traces_and_the_linter() -> None:
    folder = ROOT / "workbench" / "recordings" / "ernie45_vl-224" / "traces"
    syncs = {}
    for arm in ("eager_served", "eager_fallback"):
        (path,) = folder.glob(f"{arm}.cpu*.json.gz")
        rows = analyze(read_trace(path), "call#*").windows
        syncs[arm] = {row.syncs - 1 for row in rows}  # one is the workbench's own
    assert syncs["eager_served"] == {0}
    assert [{int(number)} for number in re.findall(r"(\d+) waits of the host per call", defects())] == [
        syncs["eager_fallback"]
    ]
    facts = model_facts("glm4_1v")
    report = lint(facts, Configuration(), Limits.of(facts, max_model_len=16_384, max_num_batched_tokens=8_192))
    ratio = next(one.evidence["ratio"] for one in report.findings if one.rule == "oversized-buffer")
    said = re.search(r"the same ([\d,]+) patches: (\d+) times too many at budget 64", defects())
    assert said is not None
    assert {capture.patches for capture in report.captures} == {int(said[1].replace(",", ""))}
    assert (report.captures[0].budget, ratio) == (64, int(said[2]))


def test_graphs_lose_on_most_calls_of_the_mixed_recording() -> None:
    run = load_recording("ernie45_vl-mixed")
    medians = {(timing.arm, timing.call): summary(timing.wall_us).median for timing in run.timings}
    lost = [call for call in range(len(run.calls)) if medians["graph", call] > medians["eager_served", call]]
    assert len(lost) > len(run.calls) / 2
