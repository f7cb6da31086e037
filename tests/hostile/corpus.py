"""Generates hostile bundles from a good one.

`refused(good)` yields bundles that must be refused; `inert(good)` yields valid bundles whose text tries to
act: as HTML, as a script, as Markdown, as terminal codes.
"""

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

MANIFEST = "manifest.json"
FOLDER = "runs/00-ernie-base"
RUN = f"{FOLDER}/run.json"
NOTE = f"{FOLDER}/note.md"
TRACE = f"{FOLDER}/traces/graph.json.gz"
Members = dict[str, bytes]


@dataclass(frozen=True)
class Raw:
    """One zip member, every field free to lie. None means the honest value."""

    name: bytes
    data: bytes
    method: int = 8
    flags: int = 0
    mode: int = 0o100644
    packed: bytes | None = None
    size: int | None = None
    packed_size: int | None = None
    crc: int | None = None
    extra: bytes = b""
    comment: bytes = b""
    offset: int | None = None
    local_name: bytes | None = None
    local_size: int | None = None
    local_extra: bytes = b""
    stamp: int = 0x21


def zip_of(
    members: list[Raw], *, count: int | None = None, comment: bytes = b"", shift: int = 0, disk: int = 0
) -> bytes:
    """The bytes of an archive; the keyword arguments are lies of its end record."""
    body, directory = b"", b""
    for member in members:
        packed = member.packed
        if packed is None:
            packed = _deflated(member.data) if member.method == 8 else member.data
        size = len(member.data) if member.size is None else member.size
        packed_size = len(packed) if member.packed_size is None else member.packed_size
        crc = zlib.crc32(member.data) if member.crc is None else member.crc
        name = member.name if member.local_name is None else member.local_name
        local_size = size if member.local_size is None else member.local_size
        offset = len(body) if member.offset is None else member.offset
        fields = (20, member.flags, member.method, 0, member.stamp, crc, packed_size)
        body += struct.pack("<4s5H3L2H", b"PK\3\4", *fields, local_size, len(name), len(member.local_extra))
        body += name + member.local_extra + packed
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 3 << 8 | 20, *fields, size, len(member.name), len(member.extra),
            len(member.comment), 0, 0, member.mode << 16, offset,
        ) + member.name + member.extra + member.comment  # fmt: skip
    number = len(members) if count is None else count
    end = struct.pack("<4s4H2LH", b"PK\5\6", disk, 0, number, number, len(directory), len(body) + shift, len(comment))
    return body + directory + end + comment


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def members_of(bundle: bytes) -> Members:
    """Names and contents of a good bundle."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def raws(members: Members) -> list[Raw]:
    """Honest members, traces stored as they are."""
    return [Raw(name.encode(), data, method=0 if name.endswith(".gz") else 8) for name, data in members.items()]


def sealed(members: Members, change: Callable[[dict[str, Any]], None] | None = None) -> bytes:
    """An archive whose manifest lists exactly `members`, with right sizes and hashes."""
    return zip_of(sealed_raws(members, change))


def sealed_raws(members: Members, change: Callable[[dict[str, Any]], None] | None = None) -> list[Raw]:
    """The members of such an archive, to be made lie."""
    manifest = json.loads(members[MANIFEST])
    manifest["members"] = [
        {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in members.items()
        if path != MANIFEST
    ]
    if change:
        change(manifest)
    return raws({**members, MANIFEST: json.dumps(manifest).encode()})


def edited(members: Members, path: str, change: Callable[[Any], None]) -> bytes:
    """A sealed bundle in which one JSON member was changed."""
    document = json.loads(members[path])
    change(document)
    return sealed({**members, path: json.dumps(document).encode()})


def refused(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield `(name, bytes)` of bundles that must be refused."""
    yield from _not_archives(good)
    yield from _lying_archives(good)
    yield from _bad_names(good)
    yield from _bombs(good)
    yield from _altered(good)
    yield from _bad_manifests(good)
    yield from _bad_documents(good)
    yield from _bad_traces(good)


def _not_archives(good: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty file", b""
    yield "text", b"PK\3\4 this is no archive"
    yield "pickle", pickle.dumps({"run": 1})
    yield "gzip", gzip.compress(good)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("manifest.json"))
    yield "tar", packed.getvalue()
    yield "empty archive", zip_of([])
    for share in (0.01, 0.3, 0.6, 0.99):
        yield f"truncated at {share:.0%}", good[: int(len(good) * share)]
    yield "last byte missing", good[:-1]
    yield "first byte missing", good[1:]
    yield "twice in a row", good + good


def _lying_archives(good: bytes) -> Iterator[tuple[str, bytes]]:
    honest = raws(members_of(good))
    first, rest = honest[0], honest[1:]
    yield "bytes before", b"#!/bin/sh\n" + good
    yield "bytes after", good + b"<script>"
    yield "archive comment", zip_of(honest, comment=b"x" * 30)
    yield "hidden member", zip_of([*honest, Raw(b"runs/00-ernie-base/plan.json", b"{}")], count=len(honest))
    yield "count too high", zip_of(honest, count=len(honest) + 1)
    yield "count of 65535", zip_of(honest, count=65535)
    yield "directory elsewhere", zip_of(honest, shift=7)
    yield "several disks", zip_of(honest, disk=1)
    yield "member twice", zip_of([*honest, first])
    yield "overlapping members", zip_of([first, replace(rest[0], offset=0), *rest[1:]])
    yield "another local name", zip_of([replace(first, local_name=first.name[:-1] + b"m"), *rest])
    yield "another local size", zip_of([replace(first, local_size=1), *rest])
    yield "extra field", zip_of([replace(first, extra=b"\x01\x00\x00\x00"), *rest])
    yield "local extra field", zip_of([replace(first, local_extra=b"\x01\x00\x00\x00"), *rest])
    yield "member comment", zip_of([replace(first, comment=b"hi"), *rest])
    yield "time stamp", zip_of([replace(first, stamp=0x5A21), *rest])
    yield "encrypted flag", zip_of([replace(first, flags=1), *rest])
    yield "data descriptor flag", zip_of([replace(first, flags=8), *rest])
    for method in (1, 9, 12, 14, 93, 99):
        yield f"method {method}", zip_of([replace(first, method=method), *rest])
    for kind, mode in (("link", 0o120777), ("folder", 0o040755), ("device", 0o020666), ("setuid", 0o104755)):
        yield f"member is a {kind}", zip_of([replace(first, mode=mode), *rest])
    yield "cut stream", zip_of([replace(first, packed=_deflated(first.data)[:-9]), *rest])
    yield "bytes after a stream", zip_of([replace(first, packed=_deflated(first.data) + b"tail"), *rest])
    yield "garbage stream", zip_of([replace(first, packed=b"\xff" * 90), *rest])


def _bad_names(good: bytes) -> Iterator[tuple[str, bytes]]:
    honest = raws(members_of(good))
    for name in (
        b"../../etc/passwd", b"runs/00-ernie-base/../../../x.json", b"/etc/cron.d/x", b"C:\\windows\\x.json",
        b"runs\\00-ernie-base\\plan.json", b"runs/00-ernie-base/plan.json\0.png", b"runs/00-ernie-base/PLAN.JSON",
        b"runs/00-ernie-base/pl\xc3\xa4n.json", b"runs/00-ernie-base/traces/../run.json", b"runs/00-ernie-base/",
        b"runs/00-ernie-base/traces/-rf.json.gz", b"runs/00-ernie-base/traces/.hidden.json.gz", b"",
        b"runs/00-ernie-base/model.pkl", b"runs/00-ernie-base/weights.pt", b"runs/00-ernie-base/x.npy",
        b"setup.py", b"runs/00-ernie-base/report.html", b"runs/00-ernie-base/traces/x.json.gz/y.json.gz",
        b"runs/00-ernie-base/\x1b[31mplan.json", b"~/.ssh/authorized_keys", b"a" * 60_000,
    ):  # fmt: skip
        yield f"named {name[:50]!r}", zip_of([*honest, Raw(name, b"{}")])


def _bombs(good: bytes) -> Iterator[tuple[str, bytes]]:
    members = members_of(good)
    zeros = b" " * (30 << 20)
    yield "ratio", sealed({**members, f"{FOLDER}/plan.json": b"[" + zeros + b"]"})
    path = f"{FOLDER}/plan.json"
    listed = sealed_raws({**members, path: b"{}" + b" " * 98})

    def lying(**lies: Any) -> bytes:
        return zip_of([replace(raw, **lies) if raw.name == path.encode() else raw for raw in listed])

    yield "size of 4 GiB", lying(size=0xFFFFFFFF)
    yield "declared small", lying(packed=_deflated(zeros), size=100)
    yield "declared large", lying(size=10_000)
    yield "declared empty", lying(size=0)
    yield "document beyond its limit", lying(data=b"", size=64 << 20, packed_size=64 << 20)
    honest = raws(members)
    yield (
        "a thousand and one members",
        zip_of(
            [*honest, *(Raw(f"{FOLDER}/traces/t{number}.json.gz".encode(), b"", method=0) for number in range(1001))]
        ),
    )
    yield "note beyond its limit", sealed({**members, "note.md": b"words " * 50_000})
    yield "trace bomb", sealed({**members, TRACE: gzip.compress(b" " * (80 << 20), 9)})


def _altered(good: bytes) -> Iterator[tuple[str, bytes]]:
    members = members_of(good)
    for path in members:
        data = bytearray(members[path])
        data[len(data) // 2] ^= 1
        if path != MANIFEST:
            yield f"{path} altered, checksum mended", zip_of(raws({**members, path: bytes(data)}))
        altered = [
            replace(raw, crc=zlib.crc32(members[path])) if raw.name == path.encode() else raw
            for raw in raws({**members, path: bytes(data)})
        ]
        yield f"{path} altered", zip_of(altered)
    yield "member missing", zip_of(raws({path: data for path, data in members.items() if path != RUN}))
    yield "member not listed", zip_of([*raws(members), Raw(f"{FOLDER}/plan.json".encode(), b"{}")])
    yield "manifest missing", zip_of(raws({path: data for path, data in members.items() if path != MANIFEST}))


def _bad_manifests(good: bytes) -> Iterator[tuple[str, bytes]]:
    members = members_of(good)

    def with_manifest(data: bytes) -> bytes:
        return zip_of(raws({**members, MANIFEST: data}))

    yield "manifest is text", with_manifest(b"hello")
    yield "manifest is empty", with_manifest(b"")
    yield "manifest is a list", with_manifest(b"[]")
    yield "manifest nested 100000 deep", with_manifest(b"[" * 100_000)
    yield "manifest is not UTF-8", with_manifest(b'{"schema_version": "\xff\xfe"}')
    yield "manifest of NaN", with_manifest(b'{"schema_version": NaN}')

    def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
        return sealed(members, change)

    yield "another version", changed(lambda m: m.update(schema_version=2))
    yield "version as text", changed(lambda m: m.update(schema_version="1"))
    yield "unknown field", changed(lambda m: m.update(run_this="rm -rf /"))
    yield "listed twice", changed(lambda m: m["members"].append(m["members"][0]))
    yield "lists what is not there", changed(lambda m: m["members"].append({**m["members"][0], "path": "x"}))
    yield "wrong size", changed(lambda m: m["members"][0].update(bytes=1))
    yield "wrong hash", changed(lambda m: m["members"][0].update(sha256="0" * 64))
    yield "folder outside", changed(lambda m: m["entries"][0].update(folder="../../x"))
    yield "folder of another", changed(lambda m: m["entries"][0].update(folder="runs/01-x"))
    yield "same folder twice", changed(lambda m: m["entries"].append(m["entries"][0]))
    yield "no entries", changed(lambda m: m.update(entries=[]))
    yield "entry of a kind unknown", changed(lambda m: m["entries"][0].update(kind="program"))


def _bad_documents(good: bytes) -> Iterator[tuple[str, bytes]]:
    members = members_of(good)

    def with_run(change: Callable[[Any], None]) -> bytes:
        return edited(members, RUN, change)

    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        data = members[RUN].replace(b'"seed": 0', f'"seed": {number}'.encode())
        yield f"{number} in a run", sealed({**members, RUN: data})
        wall = json.loads(members[RUN])["timings"][0]["wall_us"][0]
        data = members[RUN].replace(str(wall).encode(), number.encode(), 1)
        yield f"{number} as a sample", sealed({**members, RUN: data})
    yield "NaN in a plan", sealed({**members, f"{FOLDER}/plan.json": b'{"x": NaN}'})
    yield "plan nested 100 deep", sealed({**members, f"{FOLDER}/plan.json": b"[" * 100 + b"]" * 100})
    yield "plan nested 1000000 deep", sealed({**members, f"{FOLDER}/plan.json": b"[" * 500_000 + b"]" * 500_000})
    yield "plan is not JSON", sealed({**members, f"{FOLDER}/plan.json": pickle.dumps([1])})
    yield "run is not UTF-8", sealed({**members, RUN: members[RUN].replace(b"ernie-base", b"\xff\xfe\xfd")})
    yield "run of another version", with_run(lambda run: run.update(schema_version=9))
    yield "run with an unknown field", with_run(lambda run: run.update({"\x1b[2J": 1}))
    yield "run with text for a number", with_run(lambda run: run.update(seed="0"))
    yield "run with a wrong arm", with_run(lambda run: run["timings"][0].update(arm="<script>"))
    yield "run is a list", sealed({**members, RUN: b"[]"})
    yield "run with huge integers", with_run(lambda run: run.update(seed=10**400))
    yield "external of another shape", sealed({**members, f"{FOLDER}/external.json": b'{"schema_version": 1}'})
    yield "parity of another shape", sealed({**members, f"{FOLDER}/parity.json": b'{"schema_version": 1}'})
    yield "note that is not UTF-8", sealed({**members, NOTE: b"\xff\xfe\xfd"})


def _bad_traces(good: bytes) -> Iterator[tuple[str, bytes]]:
    members = members_of(good)
    trace = members[TRACE]

    def with_traces(change: Callable[[Any], None]) -> bytes:
        return edited(members, RUN, lambda run: change(run["traces"]))

    yield "trace that is not gzip", sealed({**members, TRACE: b"[]"})
    yield "trace cut off", sealed({**members, TRACE: trace[:-20]})
    yield "trace with a tail", sealed({**members, TRACE: trace + b"tail"})
    yield "trace in two parts", sealed({**members, TRACE: trace + gzip.compress(b"x")})
    yield "trace with a wrong checksum", sealed({**members, TRACE: trace[:-8] + b"\0" * 8})
    yield "trace is an archive", sealed({**members, TRACE: good})
    yield "trace named outside", with_traces(lambda traces: traces[0].update(file="../../../etc/passwd"))
    yield "trace named and missing", with_traces(lambda traces: traces[0].update(file="traces/none.json.gz"))
    yield "trace there and not named", with_traces(lambda traces: traces.pop())


SCRIPTS = (
    "<script>document.documentElement.dataset.pwned=1</script>",
    "<img src=x onerror=\"document.documentElement.dataset.pwned=1\">",
    "</title></style></script><svg onload=document.documentElement.dataset.pwned=1>",
    "\"><iframe srcdoc='<script>parent.document.documentElement.dataset.pwned=1</script>'></iframe>",
    "' onmouseover='document.documentElement.dataset.pwned=1' autofocus "
    "onfocus='document.documentElement.dataset.pwned=1",
    "<a href=\"javascript:document.documentElement.dataset.pwned=1\" id=x>x</a>",
    "[x](javascript:document.documentElement.dataset.pwned=1) ![y](http://127.0.0.1:{port}/pixel.png)",
    "<img src=\"http://127.0.0.1:{port}/pixel.png\"><link rel=stylesheet href=\"http://127.0.0.1:{port}/a.css\">",
    "<meta http-equiv=refresh content=\"0;url=http://127.0.0.1:{port}/\"><base href=\"http://127.0.0.1:{port}/\">",
    "<style>@import url(http://127.0.0.1:{port}/b.css); body{background:url(http://127.0.0.1:{port}/c.png)}</style>",
    "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}${7*7}#{7*7}",
    "<!--><script>document.documentElement.dataset.pwned=1</script>-->]]><![CDATA[<script>document.documentElement.dataset.pwned=1</script>]]>",
    "&lt;script&gt;document.documentElement.dataset.pwned=1&lt;/script&gt;&#60;script&#62;",
    "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\u2066\u200b",
    "| a | b |\n|---|---|\n```\n</details>@everyone #1 [bold]x[/bold] [link=http://x]y[/link]",
)  # fmt: skip


def inert(good: bytes, port: int = 9) -> Iterator[tuple[str, bytes]]:
    """Yield valid bundles with text that must do nothing; `port` is where requests would go."""
    members = members_of(good)
    for number, template in enumerate(SCRIPTS):
        text = template.replace("{port}", str(port))
        run = json.loads(members[RUN])
        run["name"] = run["workload"] = run["model"]["attention_backend"] = text
        run["model"]["architecture"] = run["environment"]["cpu"] = text
        run["environment"]["gpus"][0]["name"] = text
        run["environment"]["packages"][text] = text
        run["notes"] = [text]
        run["failures"] = [{"arm": "graph", "call": 0, "error": text, "message": text, "cause": text}]
        events = json.loads(gzip.decompress(members[TRACE]))
        for event in events["traceEvents"]:
            if event.get("cat") == "kernel":
                event["name"] = text + event["name"]
        hostile = {
            **members,
            RUN: json.dumps(run).encode(),
            NOTE: text.encode(),
            "note.md": text.encode(),
            f"{FOLDER}/lint.json": json.dumps({text: [text, {"message": text}]}).encode(),
            TRACE: gzip.compress(json.dumps(events).encode(), mtime=0),
        }

        def rename(manifest: dict[str, Any], text: str = text) -> None:
            manifest["creator"] = manifest["entries"][0]["name"] = manifest["entries"][0]["model"] = text
            manifest["warnings"] = [text]
            manifest["redactions"] = {text: 1}

        yield f"script {number}", sealed(hostile, rename)
