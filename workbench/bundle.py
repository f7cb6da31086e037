"""The review bundle: one file with everything needed to judge a capture.

    BUNDLE.wbz                   a zip archive, see `workbench.archive`
      runs/00-NAME/run.json      a run folder's members, redacted
      runs/00-NAME/traces/*.gz
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

import workbench
from workbench.archive import Archive, Writer
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
FINDINGS = (PARITY_FILE, "lint.json", "plan.json", "engine.json", "costs.json", "advice.json", "answers.json")

LARGEST_JSON = 32 << 20
LARGEST_NOTE = 256 << 10
LARGEST_TRACE = 256 << 20  # packed
LARGEST_UNPACKED_TRACE = 4 << 30
DEEPEST_JSON = 64
LONGEST_US = 365 * 86_400 * 1e6
MOST_SAMPLES = 100_000  # of one timing; the bootstrap's work grows with them
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


class Member(Record, frozen=True):
    """One file of the bundle, as it must be."""

    path: str
    bytes: int
    sha256: str


class Entry(Record, frozen=True):
    """One run, parity session or foreign result; fingerprints are SHA-256, None where it has none."""

    folder: str
    name: str
    kind: Literal["run", "parity", "external"]
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
    """What one run folder, parity folder or foreign file holds, on disk or in a bundle.

    Attributes:
        run, parity, external: what was measured; at least one is there.
        findings: the other JSON files, by name, as plain data.
        traces: names as `run.traces` gives them.
        open_trace: yields the path of a trace file, unpacked from the bundle if need be.
    """

    entry: Entry
    run: Run | None
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
    """Bundle run folders, parity folders and results of other tools.

    Args:
        paths: at least one; a folder with `run.json` or `parity.json`, or a file `workbench.ingest` reads.
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
            _check_plain(msgspec.json.decode(data))
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
        run, parity = decoded.pop(RUN_FILE, None), decoded.pop(PARITY_FILE, None)
        external = decoded.pop(EXTERNAL, None)
        for value, version in ((run, RUN_VERSION), (parity, PARITY_VERSION), (external, EXTERNAL_VERSION)):
            if value is not None and value.schema_version != version:
                raise self.archive.refusal(f"{entry.folder} was made with another schema version")
        wrong = _contradiction(run) if run else _odd_external(external) if external else ""
        if wrong:
            raise self.archive.refusal(f"{entry.folder} contradicts itself: {wrong}")
        if {trace.file for trace in run.traces} != set(traces) if run else traces:
            raise self.archive.refusal(f"the traces of {entry.folder} are not those its {RUN_FILE} names")
        return Content(
            entry=entry,
            run=run,
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


_KINDS: dict[str, Any] = {RUN_FILE: Run, PARITY_FILE: Parity, EXTERNAL: External}


def read_source(path: Path) -> Content:
    """Read a run folder, a parity folder, or a file that `workbench.ingest` knows.

    Raises:
        WorkbenchError: nothing of the kind, or damaged.
    """
    if path.is_file():
        external = read_external(path)
        entry = Entry(folder="", name=external.name, kind="external", model=external.model, created=external.created)
        return Content(entry, None, None, external, {}, (), None, _no_trace)
    run = read_run(path) if not (path / PARITY_FILE).is_file() or (path / RUN_FILE).is_file() else None
    parity = read_parity(path) if (path / PARITY_FILE).is_file() else None
    if run is not None and (wrong := _contradiction(run)):
        raise WorkbenchError(f"{path / RUN_FILE} contradicts itself: {wrong}; capture again")
    return Content(
        entry=_entry(run, parity),
        run=run,
        parity=parity,
        external=None,
        findings={name: _plain(path / name) for name in FINDINGS if name != PARITY_FILE and (path / name).is_file()},
        traces=tuple(trace.file for trace in run.traces) if run else (),
        note=_read_note(path / NOTE) if (path / NOTE).is_file() else None,
        open_trace=lambda file: nullcontext(_trace_path(path, file)),
    )


@contextmanager
def opened(path: Path) -> Iterator[list[Content]]:
    """Yield what a bundle, a run folder or a foreign file holds; the way in for `diff` and `report`.

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


def _entry(run: Run | None, parity: Parity | None) -> Entry:
    source = run or parity
    if source is None:
        raise WorkbenchError("the folder holds neither a run nor a parity session; give a run folder")
    return Entry(
        folder="",
        name=source.name,
        kind="run" if run else "parity",
        created=source.created,
        model=source.model.key,
        replay=source.replay,
        weights=source.model.weights_fingerprint,
        inputs=fingerprint(run.calls) if run else parity.inputs_fingerprint if parity else None,
        configuration=fingerprint(source.config),
        environment=source.environment,
    )


def _documents(source: Content) -> dict[str, Any]:
    """The JSON members of a source as plain data, by file name."""
    run = source.run
    if run is not None:
        packed = [msgspec.structs.replace(trace, file=_packed_name(trace.file)) for trace in run.traces]
        run = msgspec.structs.replace(run, traces=packed)
    typed = {RUN_FILE: run, PARITY_FILE: source.parity, EXTERNAL: source.external}
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
        _check_plain(value)
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


def _contradiction(run: Run) -> str:
    """What a schema cannot say: indices that point nowhere, samples without end; empty when all is well."""
    calls = len(run.calls)
    rows: list[Any] = [*run.batches, *run.timings, *run.phases, *run.equality, *run.failures]
    if any(not 0 <= row.call < calls for row in rows):
        return f"it names a call beyond its {calls}"
    if any(not 0 <= item < len(run.calls[batch.call].tokens) for batch in run.batches for item in batch.items):
        return "a batch names an item its call does not have"
    return _odd_samples(values for timing in run.timings for values in (timing.wall_us, timing.gpu_us))


def _odd_samples(columns: Iterable[list[float]]) -> str:
    for values in columns:
        if len(values) > MOST_SAMPLES:
            return f"a timing has more than {MOST_SAMPLES:,} samples"
        if any(not 0 <= value <= LONGEST_US for value in values):
            return "a time is negative or longer than a year"
    return ""


def _odd_external(external: External) -> str:
    """The same for a foreign result."""
    if any(not 0 <= index < len(external.kernels) for index in external.sequence):
        return "its sequence names an operation that it does not list"
    if any(not 0 <= kernel.total_us <= LONGEST_US for kernel in external.kernels):
        return "a time is negative or longer than a year"
    return _odd_samples(measure.samples for measure in external.measures)


def _check_plain(value: Any) -> None:
    """Refuse nesting beyond `DEEPEST_JSON` and integers beyond 64 bits, on which arithmetic would fail.

    Raises:
        ValueError: one of these.
    """
    level = [value]
    for _ in range(DEEPEST_JSON):
        if any(isinstance(item, int) and abs(item) >= 1 << 63 for item in level):
            raise ValueError("an integer beyond 64 bits")
        level = [
            item
            for parent in level
            if isinstance(parent, dict | list)
            for item in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEEPEST_JSON} levels")
