"""The review bundle: one file with everything needed to judge a capture.

    BUNDLE.wbz                   a zip archive, see `workbench.archive`
      runs/00-NAME/run.json      a run folder's members, redacted
      runs/00-NAME/traces/*.gz
      runs/00-NAME/ladder.json   a ladder of variants, beside a run or alone, see `workbench.capturable`
      runs/00-NAME/parity.json   and other findings, see `FINDINGS`
      runs/01-NAME/external.json what another tool measured, see `workbench.ingest`
      note.md                    what the author has to say
      manifest.json              size and SHA-256 of every member, fingerprints, what was redacted

The same inputs give the same bytes. The SHA-256 of the manifest is the bundle's digest: posted beside
the file, it proves that nothing was exchanged. Nothing in a bundle is executed, followed or fetched.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

import workbench
from workbench.archive import Archive, Writer
from workbench.capturable import LADDER_FILE, Ladder, read_ladder
from workbench.capturable import SCHEMA_VERSION as LADDER_VERSION
from workbench.contradictions import check_plain, wrong_external, wrong_ladder, wrong_run
from workbench.errors import WorkbenchError
from workbench.files import read_json, refuse_existing, replacing, replacing_folder
from workbench.ingest import External, read_external
from workbench.ingest.external import SCHEMA_VERSION as EXTERNAL_VERSION
from workbench.parity import PARITY_FILE, Parity, read_parity
from workbench.parity import SCHEMA_VERSION as PARITY_VERSION
from workbench.redact import Finding, Redactor, copy_trace, learn_files
from workbench.run import RUN_FILE, Environment, Record, Run, read_run
from workbench.run import SCHEMA_VERSION as RUN_VERSION

FORMAT_VERSION = 1
EXTENSION = ".wbz"
MANIFEST = "manifest.json"
NOTE = "note.md"
EXTERNAL = "external.json"
FINDINGS = (
    *(LADDER_FILE, PARITY_FILE),
    *("lint.json", "plan.json", "engine.json", "costs.json", "advice.json", "answers.json"),
)

LARGEST_JSON = 32 << 20
LARGEST_NOTE = 256 << 10
LARGEST_TRACE = 256 << 20  # packed
LARGEST_UNPACKED_TRACE = 4 << 30
_TRACE_RATIO = 400  # Kineto text packs 10 to 40 times
_FOLDER = r"runs/\d\d-[a-z0-9][a-z0-9-]{0,39}"
_TRACE_NAME = r"traces/[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}\.json\.gz"
_ALLOWED = {
    re.compile(rf"manifest\.json|{_FOLDER}/(?:run|external)\.json"): LARGEST_JSON,
    re.compile(rf"{_FOLDER}/(?:{'|'.join(map(re.escape, FINDINGS))})"): LARGEST_JSON,
    re.compile(rf"(?:{_FOLDER}/)?note\.md"): LARGEST_NOTE,
    re.compile(rf"{_FOLDER}/{_TRACE_NAME}"): LARGEST_TRACE,
}
_PIECE = 1 << 20

Kind = Literal["run", "ladder", "parity", "external"]


class Member(Record, frozen=True):
    """One file of the bundle, as it must be."""

    path: str
    bytes: int
    sha256: str


class Entry(Record, frozen=True):
    """One run, ladder, parity session or foreign result; fingerprints are SHA-256, None where it has none."""

    folder: str
    name: str
    kind: Kind
    created: str = ""
    model: str | None = None
    replay: str | None = None
    weights: str | None = None
    inputs: str | None = None
    configuration: str | None = None
    environment: Environment | None = None


class Manifest(Record, frozen=True):
    """What a bundle holds. `redactions` counts replacements per rule; None means it was not redacted."""

    schema_version: int
    creator: str
    entries: list[Entry]
    members: list[Member]
    redactions: dict[str, int] | None
    warnings: list[str] = []


@dataclass(frozen=True)
class Created:
    """What `create` made, or would make. `digest` is the SHA-256 of the manifest."""

    manifest: Manifest
    digest: str
    findings: list[Finding]
    bytes: int


@dataclass(frozen=True)
class Content:
    """What one folder of measurements or foreign file holds, on disk or in a bundle.

    Attributes:
        run, ladder, parity, external: what was measured; at least one is there.
        findings: the other JSON files, by name, as plain data.
        traces: names as `run.traces` gives them.
        open_trace: yields the path of a trace file, unpacked from the bundle if need be.
    """

    entry: Entry
    run: Run | None
    ladder: Ladder | None
    parity: Parity | None
    external: External | None
    findings: dict[str, Any]
    traces: tuple[str, ...]
    note: str | None
    open_trace: Callable[[str], AbstractContextManager[Path]]


def create(
    paths: Sequence[Path],
    target: Path | None,
    *,
    redact: bool = True,
    note: Path | None = None,
    overwrite: bool = False,
) -> Created:
    """Bundle folders of runs, ladders and parity sessions, and results of other tools.

    Args:
        paths: at least one; a folder with `run.json`, `ladder.json` or `parity.json`, or a file that
            `workbench.ingest` reads.
        target: the bundle; None only reports what would go in and what redaction would replace.
        redact: replace what identifies a person, a machine or an account (`workbench.redact`).
        note: Markdown for the reader.
        overwrite: replace a `target` that is there.

    Raises:
        WorkbenchError: nothing given, something unreadable, a `target` that is there, or a folder that cannot be
            written.
    """
    if not paths:
        raise WorkbenchError("a bundle needs at least one run folder; give the path of one")
    if len(paths) > 99:
        raise WorkbenchError(f"a bundle holds at most 99 runs, not {len(paths)}; make several")
    if target is not None:
        refuse_existing(target, overwrite)
    redactor = Redactor() if redact else None
    if redactor is not None:
        learn_files(redactor, (file for path in paths for file in _files(path)))
    sources = [read_source(path) for path in paths]
    remark = _read_note(note) if note else None
    packing = _Packing(redactor)
    if target is None:
        return packing.write(BytesIO(), sources, remark)
    with replacing(target) as temporary:
        return packing.write(temporary, sources, remark)


class _Packing:
    """Writes members one after the other and keeps the book."""

    def __init__(self, redactor: Redactor | None) -> None:
        self.redactor = redactor
        self.members: list[Member] = []
        self.warnings: list[str] = []

    def write(self, target: Path | BytesIO, sources: Sequence[Content], note: str | None) -> Created:
        entries = []
        with Writer(target) as archive:
            self.archive = archive
            for index, source in enumerate(sources):
                entries.append(self._source(index, source))
            if note is not None:
                self._add(NOTE, self._text(note, NOTE).encode())
            manifest = Manifest(
                schema_version=FORMAT_VERSION,
                creator=f"workbench {workbench.__version__}",
                entries=entries,
                members=self.members,
                redactions=self.redactor.counts() if self.redactor else None,
                warnings=self.warnings,
            )
            data = encode(manifest)
            archive.add(MANIFEST, data, packed=False)
        size = target.stat().st_size if isinstance(target, Path) else len(target.getbuffer())
        findings = self.redactor.findings if self.redactor else []
        return Created(manifest, hashlib.sha256(data).hexdigest(), findings, size)

    def _source(self, index: int, source: Content) -> Entry:
        name = self._text(source.entry.name, "name of the run")
        folder = f"runs/{index:02d}-{_slug(name)}"
        for file, document in _documents(source).items():
            where = f"{folder}/{file}"
            try:
                check_plain(document)
            except ValueError as error:
                raise WorkbenchError(f"{where} is not what a bundle takes: {error}; measure again") from error
            plain = self.redactor.value(document, where) if self.redactor else document
            self._add(where, encode(plain))
        for file in source.traces:
            where = f"{folder}/{_packed_name(file)}"
            packed = BytesIO()
            with source.open_trace(file) as path:
                self.warnings += copy_trace(self.redactor, path, packed, where)
            self._add(where, packed.getvalue(), packed=True)
        if source.note is not None:
            self._add(f"{folder}/{NOTE}", self._text(source.note, f"{folder}/{NOTE}").encode())
        entry = msgspec.to_builtins(source.entry) | {"folder": folder}
        return msgspec.convert(self.redactor.value(entry, MANIFEST) if self.redactor else entry, Entry)

    def _text(self, text: str, where: str) -> str:
        return self.redactor.text(text, where) if self.redactor else text

    def _add(self, path: str, data: bytes, *, packed: bool = False) -> None:
        limit = next((limit for pattern, limit in _ALLOWED.items() if pattern.fullmatch(path)), 0)
        if len(data) > limit:
            raise WorkbenchError(
                f"{path} has {len(data):,} bytes, more than the {limit:,} a bundle takes; leave it out"
            )
        self.archive.add(path, data, packed=packed)
        self.members.append(Member(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))


class Bundle:
    """A bundle opened for reading; nothing in it is trusted.

    Raises:
        WorkbenchError: not a bundle, another format version, or a manifest that does not fit the members.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive = Archive(path, _ALLOWED)
        data = self.archive.read(MANIFEST)
        self.digest = hashlib.sha256(data).hexdigest()
        version = self._decode(MANIFEST, data, dict).get("schema_version")
        if version != FORMAT_VERSION:
            raise WorkbenchError(
                f"{path} has format version {version!r}; this workbench reads {FORMAT_VERSION}, so open it with the "
                "workbench that made it"
            )
        self.manifest = self._decode(MANIFEST, data, Manifest)
        self._members = {member.path: member for member in self.manifest.members}
        self._check_listing()

    def read(self, path: str) -> bytes:
        """Return one member, its size and hash checked against the manifest.

        Raises:
            WorkbenchError: no such member, or altered.
        """
        data = self.archive.read(path)
        self._check_hash(path, hashlib.sha256(data).hexdigest())
        return data

    def contents(self) -> list[Content]:
        """Decode all entries (traces stay packed).

        Raises:
            WorkbenchError: a member is altered or not of its schema.
        """
        return [self._content(entry) for entry in self.manifest.entries]

    def note(self) -> str | None:
        """The author's note on the whole bundle."""
        return self._note(NOTE)

    def verify(self, expect: str | None = None) -> None:
        """Check every byte: hashes, schemas, and that traces unpack within their limits.

        Args:
            expect: the digest the author posted; a prefix of at least 12 characters will do.

        Raises:
            WorkbenchError: naming the first member that is wrong, and why.
        """
        if expect is not None and (len(expect) < 12 or not self.digest.startswith(expect.lower())):
            raise self.archive.refusal(f"its digest is {self.digest}, not {expect}")
        for path in self._members:
            if "/traces/" in path:
                self._check_trace(path)
        self.contents()
        self.note()

    def extract(self, folder: Path, *, overwrite: bool = False) -> list[Path]:
        """Verify, then write all members below `folder`; returns the traces, ready for Perfetto.

        Raises:
            WorkbenchError: anything `verify` refuses, or a folder that is not empty or not writable.
        """
        self.verify()
        with replacing_folder(folder, overwrite) as temporary:
            for path in (*self._members, MANIFEST):
                target = temporary / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as handle:
                    for piece in self.archive.pieces(path):
                        handle.write(piece)
        return [folder / path for path in self._members if "/traces/" in path]

    def _check_listing(self) -> None:
        listed, there = set(self._members), set(self.archive.entries) - {MANIFEST}
        if len(listed) != len(self.manifest.members) or listed != there:
            odd = sorted(listed ^ there) or ["a member listed twice"]
            raise self.archive.refusal(f"its manifest and its members differ: {odd[0][:120]}")
        folders = [entry.folder for entry in self.manifest.entries]
        used = {"/".join(path.split("/")[:2]) for path in listed if path.startswith("runs/")}
        if len(set(folders)) != len(folders) or used != set(folders):
            raise self.archive.refusal("its manifest does not name the folders it holds")
        for path, member in self._members.items():
            if self.archive.entries[path].size != member.bytes:
                raise self.archive.refusal(f"{path} has another size than its manifest says")

    def _check_hash(self, path: str, digest: str) -> None:
        if self._members[path].sha256 != digest:
            raise self.archive.refusal(f"{path} was altered: its SHA-256 is not the one in the manifest")

    def _check_trace(self, path: str) -> None:
        """Hash a trace and unpack it without keeping it."""
        sha, inflater, total = hashlib.sha256(), zlib.decompressobj(31), 0
        try:
            for piece in self.archive.pieces(path):
                sha.update(piece)
                while piece and not inflater.eof:
                    total += len(inflater.decompress(piece, _PIECE))
                    piece = inflater.unconsumed_tail
                    if total > min(LARGEST_UNPACKED_TRACE, max(_PIECE, self._members[path].bytes * _TRACE_RATIO)):
                        raise self.archive.refusal(f"{path} unpacks to far more than a trace of its size does")
        except zlib.error as error:
            raise self.archive.refusal(f"{path} does not unpack ({error})") from error
        self._check_hash(path, sha.hexdigest())
        if not inflater.eof or inflater.unused_data:
            raise self.archive.refusal(f"{path} is not one whole gzip stream")

    def _decode(self, path: str, data: bytes, kind: Any) -> Any:
        try:
            check_plain(msgspec.json.decode(data))
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise self.archive.refusal(f"{path} is not what it should be ({error})") from error

    def _content(self, entry: Entry) -> Content:
        prefix = f"{entry.folder}/"
        files = [path.removeprefix(prefix) for path in self._members if path.startswith(prefix)]
        traces = tuple(file for file in files if file.startswith("traces/"))
        decoded = {
            file: self._decode(prefix + file, self.read(prefix + file), _KINDS.get(file, Any))
            for file in files
            if file.endswith(".json")
        }
        run, ladder = decoded.pop(RUN_FILE, None), decoded.pop(LADDER_FILE, None)
        parity, external = decoded.pop(PARITY_FILE, None), decoded.pop(EXTERNAL, None)
        for value, version in (
            *((run, RUN_VERSION), (ladder, LADDER_VERSION)),
            *((parity, PARITY_VERSION), (external, EXTERNAL_VERSION)),
        ):
            if value is not None and value.schema_version != version:
                raise self.archive.refusal(f"{entry.folder} was made with another schema version")
        if entry.kind != ("external" if external else _kind(run, ladder, parity)):
            raise self.archive.refusal(f"its manifest calls {entry.folder} what it is not")
        if wrong := _wrong(run, ladder, external):
            raise self.archive.refusal(f"{entry.folder} contradicts itself: {wrong}")
        if {trace.file for trace in run.traces} != set(traces) if run else traces:
            raise self.archive.refusal(f"the traces of {entry.folder} are not those its {RUN_FILE} names")
        return Content(
            entry=entry,
            run=run,
            ladder=ladder,
            parity=parity,
            external=external,
            findings=decoded,
            traces=traces,
            note=self._note(prefix + NOTE),
            open_trace=lambda file: self._unpacked(prefix + file),
        )

    @contextmanager
    def _unpacked(self, path: str) -> Iterator[Path]:
        self._check_trace(path)
        with TemporaryDirectory(prefix="workbench-") as folder:
            target = Path(folder) / path.rsplit("/", 1)[1]
            with target.open("xb") as handle:
                handle.writelines(self.archive.pieces(path))
            yield target

    def _note(self, path: str) -> str | None:
        if path not in self._members:
            return None
        try:
            return self.read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.archive.refusal(f"{path} is not UTF-8 text") from error


_KINDS: dict[str, Any] = {RUN_FILE: Run, LADDER_FILE: Ladder, PARITY_FILE: Parity, EXTERNAL: External}


def read_source(path: Path) -> Content:
    """Read a folder of a run, a ladder or a parity session, or a file that `workbench.ingest` knows.

    Raises:
        WorkbenchError: nothing of the kind, or damaged.
    """
    if path.is_file():
        external = read_external(path)
        entry = Entry(folder="", name=external.name, kind="external", model=external.model, created=external.created)
        return Content(entry, None, None, None, external, {}, (), None, _no_trace)
    ladder = read_ladder(path) if (path / LADDER_FILE).is_file() else None
    parity = read_parity(path) if (path / PARITY_FILE).is_file() else None
    run = read_run(path) if (path / RUN_FILE).is_file() or not (ladder or parity) else None
    if wrong := _wrong(run, None, None):
        raise WorkbenchError(f"{path / RUN_FILE} contradicts itself: {wrong}; capture again")
    if wrong := _wrong(None, ladder, None):
        raise WorkbenchError(f"{path / LADDER_FILE} contradicts itself: {wrong}; measure again")
    typed = (LADDER_FILE, PARITY_FILE)
    return Content(
        entry=_entry(run, ladder, parity),
        run=run,
        ladder=ladder,
        parity=parity,
        external=None,
        findings={name: _plain(path / name) for name in FINDINGS if name not in typed and (path / name).is_file()},
        traces=tuple(trace.file for trace in run.traces) if run else (),
        note=_read_note(path / NOTE) if (path / NOTE).is_file() else None,
        open_trace=lambda file: nullcontext(_trace_path(path, file)),
    )


@contextmanager
def opened(path: Path) -> Iterator[list[Content]]:
    """Yield what a bundle, a folder of measurements or a foreign file holds; the way in for `diff` and `report`.

    A bundle is verified whole: members that the caller never reads count too.

    Raises:
        WorkbenchError: it is none of these, or damaged.
    """
    if not is_bundle(path):
        yield [read_source(path)]
        return
    bundle = Bundle(path)
    bundle.verify()
    yield bundle.contents()


def is_bundle(path: Path) -> bool:
    """Whether `path` claims to be a bundle: by its extension, or by how a zip file begins."""
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return path.suffix == EXTENSION or handle.read(4) == b"PK\3\4"


def encode(value: object) -> bytes:
    """JSON as it stands in a bundle: indented, keys in the order of the schema.

    Raises:
        WorkbenchError: a number that JSON does not have.
    """
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def fingerprint(value: object) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def _no_trace(file: str) -> AbstractContextManager[Path]:
    raise WorkbenchError(f"there is no trace {file} beside a result of another tool")


def _kind(run: Run | None, ladder: Ladder | None, parity: Parity | None) -> Kind | None:
    """What a folder is called by: the first of these that it holds."""
    return "run" if run else "ladder" if ladder else "parity" if parity else None


def _wrong(run: Run | None, ladder: Ladder | None, external: External | None) -> str:
    """What contradicts itself in the parts of one source; empty when all is well."""
    return (
        (wrong_run(run) if run else "")
        or (wrong_ladder(ladder) if ladder else "")
        or (wrong_external(external) if external else "")
    )


def _entry(run: Run | None, ladder: Ladder | None, parity: Parity | None) -> Entry:
    source, kind = run or ladder or parity, _kind(run, ladder, parity)
    if source is None or kind is None:
        raise WorkbenchError("the folder holds no run, ladder or parity session; give a run folder")
    if isinstance(source, Ladder):
        # A ladder is not named by its author. The name is not the folder's: the same ladder gives the same bundle.
        name, inputs = f"ladder of {source.model.key}", fingerprint((source.seed, _inputs(source)))
        configuration = fingerprint((source.budgets, source.max_items, source.max_frames))
    else:
        name, configuration = source.name, fingerprint(source.config)
        inputs = source.inputs_fingerprint if isinstance(source, Parity) else fingerprint(source.calls)
    return Entry(
        folder="",
        name=name,
        kind=kind,
        created=source.created,
        model=source.model.key,
        replay=source.replay,
        weights=source.model.weights_fingerprint,
        inputs=inputs,
        configuration=configuration,
        environment=source.environment,
    )


def _inputs(ladder: Ladder) -> list[Any]:
    return [(case.modality, case.grids, case.beside_videos) for case in ladder.cases]


def _documents(source: Content) -> dict[str, Any]:
    """The JSON members of a source as plain data, by file name."""
    run = source.run
    if run is not None:
        packed = [msgspec.structs.replace(trace, file=_packed_name(trace.file)) for trace in run.traces]
        run = msgspec.structs.replace(run, traces=packed)
    typed = {RUN_FILE: run, LADDER_FILE: source.ladder, PARITY_FILE: source.parity, EXTERNAL: source.external}
    documents = source.findings | {file: value for file, value in typed.items() if value is not None}
    return {file: msgspec.to_builtins(value) for file, value in sorted(documents.items())}


def _packed_name(file: str) -> str:
    return file if file.endswith(".gz") else f"{file}.gz"


def _trace_path(folder: Path, file: str) -> Path:
    """The file of a trace that `run.json` names; it must lie in the folder's `traces/`."""
    if not re.fullmatch(_TRACE_NAME, _packed_name(file)):
        raise WorkbenchError(
            f"{folder / RUN_FILE} names a trace {file[:120]!r}; a trace is called traces/NAME.json.gz, so rename it"
        )
    path = folder / file
    if path.is_symlink() or not path.is_file():
        raise WorkbenchError(f"{folder / RUN_FILE} names {file}, which is not there; copy the whole run folder")
    return path


def _files(path: Path) -> Iterator[Path]:
    """The files of a source, for learning names."""
    if path.is_file():
        yield path
    else:
        yield from (file for file in sorted(path.glob("*.json")) if file.is_file())
        yield from (file for file in sorted(path.glob("traces/*")) if file.is_file() and not file.is_symlink())


def _plain(path: Path) -> Any:
    value = read_json(path, object, LARGEST_JSON)
    try:
        check_plain(value)
    except ValueError as error:
        raise WorkbenchError(f"{path} is not what this command reads: {error}") from error
    return value


def _read_note(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_NOTE:
            raise WorkbenchError(f"{path} is longer than the {LARGEST_NOTE >> 10} KiB of a note; shorten it")
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise WorkbenchError(f"{path} is not UTF-8 text; save it as such") from error
    except OSError as error:
        raise WorkbenchError(f"cannot read {path}: {error.strerror or error}") from error


def _slug(name: str) -> str:
    """A folder name of lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"
