"""Reports: complete, self-contained, and inert whatever a bundle says."""

import html
import json
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.hostile.corpus import FOLDER, RUN, SCRIPTS, edited, inert, members_of, raws, sealed, zip_of
from tests.runs import make_run, small_run, write_run
from tests.test_parity import finding, session
from workbench.bundle import Bundle, create, opened
from workbench.cli import app
from workbench.conditions import check
from workbench.diff import Diff, compare_files
from workbench.errors import WorkbenchError
from workbench.parity import PARITY_FILE, Cell, encode
from workbench.review import review
from workbench.run import Failure, recording_folder, recording_names
from workbench.views.browser import chromium_command, find_chromium
from workbench.views.bundle_markdown import bundle_markdown, diff_markdown, plain
from workbench.views.bundle_report import LARGEST_REPORT, bundle_html, diff_html
from workbench.views.markup import Markup, element, page
from workbench.views.words import verdicts

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
        "span",
        "code",
        "pre",
        "ul",
        "li",
    ),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "svg", "line", "circle", "text", "rect"),
}
ATTRIBUTES = re.compile(
    r"class|title|lang|charset|name|content|http-equiv|viewbox|width|height|role|aria-label|x|y|x1|x2|y1|y2|cx|cy|r|"
    r"fill|stroke(-\w+)?|text-anchor"
)


class Inspector(HTMLParser):
    """Collects what a page is made of."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def inspect(document: str) -> Inspector:
    inspector = Inspector()
    inspector.feed(document)
    return inspector


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid bundle with every kind of member."""
    folder = small_run(tmp_path_factory.mktemp("runs") / "a", repeats=20)
    (folder / "note.md").write_text("a **note**")
    (folder / "lint.json").write_text('{"findings": [{"rule": "r", "severity": "warning", "message": "m"}]}')
    path = folder.parent / "a.wbz"
    create([folder], path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def hostile(good: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, list[str]]]:
    """One bundle of all hostile texts, the port they call, and the requests that arrive there."""
    requests: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path_factory.mktemp("hostile")
    runs = []
    for number, (_, data) in enumerate(inert(good, server.server_port)):
        path = folder / f"{number}.wbz"
        path.write_bytes(data)
        Bundle(path).extract(folder / str(number))
        runs.append(folder / str(number) / FOLDER)
    create(runs, folder / "all.wbz", redact=False)
    yield folder / "all.wbz", server.server_port, requests
    server.shutdown()
    server.server_close()


def report_of(path: Path) -> str:
    bundle = Bundle(path)
    return bundle_html(bundle, bundle.contents())


# --- what a report holds ---------------------------------------------------------------------------


def test_a_bundle_report_says_what_the_bundle_holds(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wbz"
    path.write_bytes(good)
    document = report_of(path)
    text = " ".join(inspect(document).text)
    for told in ("graph against eager_served", "4.99×", "1/2 (50%)", "a **note**", "NVIDIA H200", "128, 256, 512"):
        assert told in text
    for told in ("graph.json.gz", "lint.json", Bundle(path).digest):
        assert told in text
    assert text.index("graph against eager_served") < text.index("Configuration")  # the verdict comes first


def test_a_comparison_report_starts_with_the_verdict(tmp_path: Path) -> None:
    base, head = small_run(tmp_path / "a"), small_run(tmp_path / "b", seed=1, scale={"graph": 1.1})
    diff = compare_files(base, head)
    document = diff_html(diff, check(diff, ["graph.mean > +5%"]))
    text = " ".join(inspect(document).text)
    assert text.index("graph, mean: slower") < text.index("Conditions") < text.index("Timings")
    assert "fails" in text
    same = diff_html(compare_files(base, base))
    assert "no evidence of a difference" in same


def test_all_outputs_start_with_new_failures_then_what_was_changed(tmp_path: Path) -> None:
    base, head = (recording_folder(name) for name in ("ernie45_vl-mixed", "ernie45_vl-mixed-2048"))
    page, markdown = tmp_path / "d.html", tmp_path / "d.md"
    result = CliRunner().invoke(
        app, ["bundle", "diff", str(base), str(head), "--html", str(page), "--markdown", str(markdown)]
    )
    assert result.exit_code == 1
    written = markdown.read_text().replace("\\", "")
    for text in (result.output, written, " ".join(inspect(page.read_text()).text)):
        order = (
            "worse: calls on which graph failed (RuntimeError, D1): 0 → 4; only in the head: 1, 2, 5, 7",
            "changed: budgets: 128, 256, 512, 1024, 1536, 2048, 4096 → 128, 256, 512, 1024, 1536, 2048",
            "no evidence of a difference in the timings of 8 of the 12 common calls",
            "Timings of one pass over 8 of the 12 common calls, those that every arm finished on both sides",
        )
        places = [text.index(told) for told in order]
        assert places == sorted(places)
        assert text.count("changed:") == 1
    assert CliRunner().invoke(app, ["bundle", "diff", str(head), str(base)]).exit_code == 0  # none is new
    assert CliRunner().invoke(app, ["bundle", "diff", str(head), str(head)]).exit_code == 0


def test_a_new_failure_of_any_pair_comes_before_all_else(tmp_path: Path) -> None:
    failure = Failure(arm="graph", call=0, error="RuntimeError", message="m")
    for side, failures in (("a", []), ("b", [failure])):
        runs = [
            small_run(tmp_path / side / "one", "one", repeats=10),
            small_run(tmp_path / side / "two", "two", repeats=10, failures=failures),
        ]
        create(runs, tmp_path / f"{side}.wbz")
    first, *_ = verdicts(compare_files(tmp_path / "a.wbz", tmp_path / "b.wbz"))
    told = "two: worse: calls on which graph failed (RuntimeError): 0 → 1; only in the head: 0"
    assert first == (told, "worse")
    first, *_ = verdicts(compare_files(tmp_path / "b.wbz", tmp_path / "a.wbz"))
    assert first[1] == "better"


def test_markdown_has_the_tables_of_the_pull_requests(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.wbz"
    path.write_bytes(good)
    with opened(path) as contents:
        text = bundle_markdown(contents, Bundle(path).digest)
        found = review(contents[0])
    assert found is not None
    assert " calls | Mean | Median | Std | P99 | n |" in text
    assert "| speed-up over eager_served |" in text
    assert f"{found.speed_ups[0].value:.2f}×" in text
    assert "1/2 \\(50%\\) calls with equal bits" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1


def test_parity_sessions_and_lint_findings_are_shown_and_compared(tmp_path: Path) -> None:
    cells = [Cell(scenario="oversize", budget=128, status="mismatch", calls=1, items=1, ratio=3.5)]
    equal = Cell(scenario="oversize", budget=128, status="equal", calls=1, items=1, bit_equal=1, ratio=0.0)
    for name, parity in (("a", session([equal])), ("b", session(cells, [finding("padding")]))):
        folder = small_run(tmp_path / name, repeats=10)
        (folder / PARITY_FILE).write_bytes(encode(parity))
        (tmp_path / f"only-{name}").mkdir()
        (tmp_path / f"only-{name}" / PARITY_FILE).write_bytes(encode(parity))
    lint = {"findings": [{"rule": "oversized-buffer", "severity": "warning", "message": "600 times too large"}]}
    (tmp_path / "b" / "lint.json").write_text(json.dumps(lint))
    (tmp_path / "a" / "lint.json").write_text('{"findings": []}')
    for prefix in ("", "only-"):
        create([tmp_path / f"{prefix}a"], tmp_path / "a.wbz", overwrite=True)
        create([tmp_path / f"{prefix}b"], tmp_path / "b.wbz", overwrite=True)
        text = " ".join(inspect(report_of(tmp_path / "b.wbz")).text)
        assert "mismatch, padding: seen" in text
        assert ("600 times too large" in text) == (not prefix)
        diff = compare_files(tmp_path / "a.wbz", tmp_path / "b.wbz")
        told = ["padding: seen", "oversize at budget 128: equal → mismatch"]
        assert diff.pairs[0].parity[-1].new_findings == told
        assert "parity, new finding: padding: seen" in " ".join(inspect(diff_html(diff)).text)
        assert check(diff, ["parity.new_findings > 1"])[0].hit
        notes = " ".join(diff.pairs[0].notes)
        assert ("lint finding, new: warning: oversized-buffer" in notes) == (not prefix)


@pytest.mark.skipif(not recording_names(), reason="no recording is shipped")
def test_recorded_parity_sessions_are_counted_over_all_their_items() -> None:
    """`items` of a session are its worst ones only: by them no output had equal bits, and 229 have."""
    recordings = recording_folder("glm4_1v").parent
    before, after = (recordings / name for name in ("parity_glm4_1v", "parity_glm4_1v-variants"))
    diff = compare_files(before, after)
    (row,) = diff.pairs[0].parity
    assert (row.base_equal, row.base_total, row.head_equal, row.head_total) == (229, 465, 240, 465)
    assert not row.new_findings
    for shown in (diff_markdown(diff), " ".join(inspect(diff_html(diff)).text)):
        assert "parity, gone: image-beside-video at budget 64: mismatch → within" in shown
    with opened(after) as contents:
        told = bundle_markdown(contents)
    assert "in 1 of 74 conditions" in told
    assert "240 of 465 compared items are bit-equal to eager as served, 372 of 372 to vLLM's own graph" in told


@pytest.mark.skipif(not recording_names(), reason="no recording is shipped")
def test_a_pass_says_how_many_calls_its_time_adds_up() -> None:
    with opened(recording_folder("glm4_1v")) as contents:
        told = bundle_markdown(contents)
    assert "- graph against eager\\_served, one pass over the workload's 1,000 calls: 4.17×" in told
    assert "| wall, one pass over the workload's 1,000 calls | Mean |" in told


@pytest.mark.skipif(not recording_names(), reason="no recording is shipped")
@pytest.mark.parametrize("name", recording_names())
def test_reports_of_the_recordings_are_small_and_self_contained(name: str, tmp_path: Path) -> None:
    create([recording_folder(name)], tmp_path / "a.wbz")
    document = report_of(tmp_path / "a.wbz")
    assert len(document.encode()) < LARGEST_REPORT
    inspector = inspect(document)
    assert inspector.tags <= TAGS
    diff = compare_files(recording_folder(name), recording_folder(name))
    assert len(diff_html(diff).encode()) < LARGEST_REPORT


def test_large_bundles_stay_below_the_limit(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(number), make_run(f"run {number}", calls=60, repeats=50, budgets=(4096,)))
        for number in range(4)
    ]
    create(folders, tmp_path / "a.wbz")
    assert len(report_of(tmp_path / "a.wbz").encode()) < LARGEST_REPORT


def test_the_command_line_writes_reports(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a", repeats=20)
    create([folder], tmp_path / "a.wbz")
    runner = CliRunner()
    result = runner.invoke(app, ["bundle", "report", str(tmp_path / "a.wbz"), "--markdown", str(tmp_path / "a.md")])
    assert result.exit_code == 0
    assert (tmp_path / "a.wbz.html").read_text().startswith("<!DOCTYPE html>")
    assert "Bundle digest" in (tmp_path / "a.md").read_text()
    result = runner.invoke(app, ["bundle", "report", str(folder), "-o", str(tmp_path / "r.html"), "--json"])
    assert json.loads(result.stdout)["bytes"] == (tmp_path / "r.html").stat().st_size


# --- inert -----------------------------------------------------------------------------------------


def test_the_builder_escapes_everything_but_its_own() -> None:
    assert (
        element("p", "<b>", None, ["&", Markup("<i></i>")], title='"x')
        == '<p title="&quot;x">&lt;b&gt;&amp;<i></i></p>'
    )
    assert "\x1b" not in element("p", "\x1b[2J")
    document = page("</title><script>", ["</body>"], "p{}")
    assert "<script" not in document
    assert html.escape(POLICY, quote=True) in document


def test_hostile_text_adds_no_tag_and_no_attribute(hostile: tuple[Path, int, list[str]]) -> None:
    path, port, _ = hostile
    diff = compare_files(path, path)
    for document in (report_of(path), diff_html(diff, check(diff, ["doubts > 0"]))):
        inspector = inspect(document)
        assert inspector.tags <= TAGS
        assert all(ATTRIBUTES.fullmatch(name) for name in inspector.attributes), inspector.attributes
        assert not set(document) & set("\x1b\x07\x9b\u202e\u2066\u200b")
        text = " ".join(inspector.text)
        assert "<script>document" in text  # it is there to be read
        assert str(port) in text


def test_hostile_text_is_no_markdown(hostile: tuple[Path, int, list[str]]) -> None:
    path, _, _ = hostile
    with opened(path) as contents:
        text = bundle_markdown(contents)
    text += diff_markdown(compare_files(path, path))
    assert not re.search(r"(?<!\\)<(?!/?(?:br|sub))", text)
    assert not re.search(r"(?<!\\)\]\(", text)
    assert not re.search(r"(?<!\\)`[^0-9a-f]", text)
    assert "javascript:window" not in text
    for script in SCRIPTS:
        assert "\n" not in plain(script)
        assert not re.search(r"@\w|https?://\w", plain(script))


def test_hostile_text_does_nothing_in_a_terminal(hostile: tuple[Path, int, list[str]]) -> None:
    path, _, _ = hostile
    for arguments in (["show", path], ["diff", path, path], ["verify", path]):
        result = CliRunner().invoke(app, ["bundle", *map(str, arguments)])
        assert result.exit_code == 0
        assert not set(result.output) & set("\x1b\x07\x9b\u202e\u2066\u200b")


def dump(document: str, folder: Path) -> str:
    """The document's DOM after Chromium has run what it would run."""
    path = folder / "page.html"
    path.write_text(document)
    profile = folder / "profile"
    # Without the flag that hides the network from it: a request must have every chance to arrive.
    command = [
        part
        for part in chromium_command(profile, "--dump-dom", path.as_uri())
        if not part.startswith("--host-resolver")
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def has_run_a_script(dom: str) -> bool:
    return re.search(r"<html[^>]* data-pwned", dom) is not None


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_chromium_runs_nothing_and_asks_nobody(hostile: tuple[Path, int, list[str]], tmp_path: Path) -> None:
    path, port, requests = hostile
    # The instruments first: a page that does what the hostile text wants is seen doing it.
    free = f"<html><body><script>document.documentElement.dataset.pwned=1</script><img src='http://127.0.0.1:{port}/x'>"
    assert has_run_a_script(dump(free, tmp_path))
    assert requests == ["/x"]
    requests.clear()
    documents = [report_of(path), diff_html(compare_files(path, path))]
    # Each with its policy, and without: escaping alone must hold.
    for document in [*documents, *(text.replace("Content-Security-Policy", "X-None") for text in documents)]:
        dom = dump(document, tmp_path)
        assert "</html>" in dom
        assert not has_run_a_script(dom)
    assert requests == []


@pytest.mark.browser
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_the_policy_alone_holds_too(hostile: tuple[Path, int, list[str]], tmp_path: Path) -> None:
    """What escaping missed would still not run."""
    _, port, requests = hostile
    requests.clear()
    raw = Markup("".join(SCRIPTS).replace("{port}", str(port)).replace("<!--", "").replace("<![CDATA[", ""))
    dom = dump(page("policy", [raw], "p{}"), tmp_path)
    assert not has_run_a_script(dom)
    # A refresh navigates; no policy of a page forbids it, escaping does.
    assert all(request == "/" for request in requests)


# --- fuzz ------------------------------------------------------------------------------------------


def mutated(value: Any, generator: random.Random) -> Any:
    """A JSON document with one value, somewhere, replaced."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(sorted(value))
        return value | {key: mutated(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.9:
        place = generator.randrange(len(value))
        return [*value[:place], mutated(value[place], generator), *value[place + 1 :]]
    odd: list[Any] = [
        None,
        True,
        0,
        -1,
        1e308,
        -1e308,
        2**62,
        5e-324,
        "",
        "<script>",
        "\x1b[2J",
        [],
        {},
        [[]],
        "a" * 5000,
    ]
    return generator.choice([*odd, 0.0, 1, 12])


def test_bundles_with_right_hashes_and_odd_content(good: bytes, tmp_path: Path) -> None:
    """Each is refused in one sentence or shown: nothing crashes on the way."""
    generator, members, path = random.Random(17), members_of(good), tmp_path / "a.wbz"
    other = tmp_path / "good.wbz"
    other.write_bytes(good)
    shown = 0
    for _ in range(250):
        name = generator.choice([RUN, RUN, RUN, f"{FOLDER}/lint.json", "manifest.json"])
        document = mutated(json.loads(members[name]), generator)
        if name == "manifest.json":
            data = zip_of(raws({**members, name: json.dumps(document).encode()}))
        else:
            data = sealed({**members, name: json.dumps(document).encode()})
        path.write_bytes(data)
        try:
            page_of = report_of(path)
            diff = compare_files(other, path)
        except WorkbenchError as error:
            assert "\n" not in str(error)  # noqa: PT017  refusal is one right answer
            continue
        shown += 1
        assert inspect(page_of + diff_html(diff)).tags <= TAGS
        assert diff_markdown(diff)
    assert shown > 10


def test_indices_that_point_nowhere_are_refused(good: bytes, tmp_path: Path) -> None:
    members, path = members_of(good), tmp_path / "a.wbz"

    def refused(change: Any) -> None:
        path.write_bytes(edited(members, RUN, change))
        with pytest.raises(WorkbenchError, match="contradicts itself"):
            Bundle(path).contents()

    refused(lambda run: run["timings"][0].update(call=99))
    refused(lambda run: run["timings"][0].update(call=-1))
    refused(lambda run: run["batches"][0].update(call=2))
    refused(lambda run: run["batches"][0].update(items=[7]))
    refused(lambda run: run["timings"][0].update(wall_us=[-1.0]))
    refused(lambda run: run["timings"][0].update(wall_us=[1.0] * 100_001))


def test_an_empty_comparison_is_a_page_too() -> None:
    empty = Diff(schema_version=1, workbench="0", base="a", head="b", pairs=[], only_base=[], only_head=[])
    assert "</html>" in diff_html(empty)
    assert diff_markdown(empty).startswith("### a → b")
