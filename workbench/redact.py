"""Remove from text, JSON and traces what identifies a person, a machine or an account.

    redactor = Redactor(Identity.here())
    redactor.text("saved to /home/alice/runs/a.json", "note")  # "saved to <path>/a.json"
    redactor.findings                                          # what went, by place and rule

What goes: user, host and process names, absolute paths, IP and hardware addresses, values of environment
variables, secrets on command lines and in headers, tokens of known shapes, strings that look random.
What stays byte for byte: numbers, kernel names, shapes, hashes, version numbers, paths below `/usr`
and the part of a stack frame from the package's name on.

Kernel names are exempt from the rules that guess (entropy, words, hosts, variables), because mangled
template arguments look random; the rules for known shapes and for paths still apply to them.
"""

import getpass
import gzip
import json
import re
import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol

from workbench.errors import WorkbenchError
from workbench.redact_rules import (
    COMMON_NAMES,
    ENVIRONMENT_KEY,
    HASH_KEY,
    KEY_RULES,
    PLAIN_VALUE,
    RULES,
    SECRETS,
    VERSION_KEY,
    Rule,
    keep_ipv4,
    keep_variable,
    keep_words,
)

LARGEST_TRACE = 8 << 30  # bytes after decompression
_LARGEST_EVENT = 64 << 20
_CHUNK = 1 << 20
_MEMO = 200_000  # distinct strings remembered; a trace repeats its names a thousand times

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_ANY_STRING = re.compile(_STRING, re.DOTALL)
_TOKEN = re.compile(rb"(" + _STRING + rb")(\s*:)?|[{}\[\]]|(\")", re.DOTALL)
_LITERAL = re.compile(rb"(" + _STRING + rb")(\s*:)?", re.DOTALL)
_BRACKET = re.compile(rb"(?:[^\"{}\[\]]++|" + _STRING + rb")*+(?:([{}\[\]])|(\"))", re.DOTALL)
# A whole event at once: an object of objects nested at most twice, as nearly all are.
_FLAT = rb"\{(?:[^{}\"]++|" + _STRING + rb")*+\}"
_NESTED = rb"\{(?:[^{}\"]++|" + _STRING + rb"|" + _FLAT + rb")*+\}"
_EVENT = re.compile(rb"\{(?:[^{}\"]++|" + _STRING + rb"|" + _NESTED + rb")*+\}", re.DOTALL)
_GPU_EVENT = re.compile(rb'"cat"\s*:\s*"(?:kernel|gpu_memcpy|gpu_memset|gpu_op|concurrent_kernel)"', re.I)
_PROCESS_EVENT = re.compile(rb'"name"\s*:\s*"process_name"')
_HOME = re.compile(rb"(?i)(?:/home|/Users|\\+Users)(?:\\?/|\\+)([A-Za-z][\w.-]{2,31})")


class Reader(Protocol):
    """Anything that reads bytes in blocks."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; empty at the end."""
        ...


class Writer(Protocol):
    """Anything that takes bytes."""

    def write(self, data: bytes, /) -> int:
        """Take `data`."""
        ...


@dataclass(frozen=True)
class Identity:
    """Words that name the person and the machine of one session."""

    users: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def here(cls) -> "Identity":
        """The identity of this process: its account, the name of its home folder, its host."""
        try:
            users = {getpass.getuser(), Path.home().name}
        except (OSError, KeyError, RuntimeError):  # an account that is not in the password file
            users = set()
        host = socket.gethostname()
        return cls(
            users=frozenset(filter(_is_name, users)),
            hosts=frozenset(filter(_is_name, {host, host.partition(".")[0]})),
        )


@dataclass(frozen=True)
class Finding:
    """One thing that was replaced: by which rule, where, what it was, and how often.

    `shown` is the text itself for names and places, its first characters for secrets, so that a list
    of findings can be read without spreading what it found.
    """

    rule: str
    where: str
    shown: str
    count: int


@dataclass
class Redactor:
    """Applies the rules and remembers what they found.

    One redactor serves one bundle: names learned from one member (`learn`) go from all of them.
    """

    identity: Identity = field(default_factory=Identity.here)
    _found: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _learned: set[str] = field(default_factory=set)
    _words: re.Pattern[str] | None = None
    _memo: dict[tuple[str, str, bool], tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=dict)
    _clean: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._compile_words()

    @property
    def findings(self) -> list[Finding]:
        """What was replaced so far, ordered by place and rule."""
        return [
            Finding(rule, where, shown, count)
            for (where, rule, shown), count in sorted(self._found.items(), key=lambda item: item[0])
        ]

    def counts(self) -> dict[str, int]:
        """Replacements per rule."""
        totals: Counter[str] = Counter()
        for (_, rule, _), count in self._found.items():
            totals[rule] += count
        return dict(sorted(totals.items()))

    def learn(self, data: bytes) -> None:
        """Remember account names that home folders in `data` give away, wherever else they stand."""
        for match in _HOME.finditer(data):
            name = match[1].decode("ascii", "replace").rstrip(".")
            if _is_name(name) and name not in self._learned:
                self._learned.add(name)
                self._memo.clear()
                self._clean.clear()
                self._compile_words()

    def text(self, text: str, where: str, *, key: str = "", kernel: bool = False) -> str:
        """Return `text` without what identifies; `key` is the JSON key it stands under.

        `kernel` switches the guessing rules off. `where` only labels the findings.
        """
        redacted, found = self._remembered(text, key, kernel)
        for rule, shown in found:
            self._found[where, rule, shown] += 1
        return redacted

    def _remembered(self, text: str, key: str, kernel: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
        memo = (text, key, kernel)
        known = self._memo.get(memo)
        if known is None:
            if len(self._memo) > _MEMO:
                self._memo.clear()
            known = self._memo[memo] = self._apply(text, kernel, _folded(key))
        return known

    def value(self, value: Any, where: str, *, key: str = "", inside: str = "") -> Any:
        """Return plain JSON data with every string and key redacted; numbers are left alone.

        `key` is the key `value` stands under, `inside` the nearest enclosing key that decides for all
        below it (environment variables, package versions, processes).
        """
        if isinstance(value, str):
            return self.string(value, where, key=key, inside=inside)
        if isinstance(value, list):
            return [self.value(item, where, key=key, inside=_enclosing(key, inside)) for item in value]
        if not isinstance(value, dict):
            return value
        inside = _enclosing(key, inside)
        named = value.get("name") if set(value) == {"name", "value"} else None
        return {
            self.text(str(name), where): self.value(
                item, where, key=named if isinstance(named, str) and name == "value" else str(name), inside=inside
            )
            for name, item in value.items()
        }

    def string(self, value: str, where: str, *, key: str = "", inside: str = "") -> str:
        """Return one JSON string value redacted; see `value` for `key` and `inside`."""
        folded = _folded(key)
        if inside == "processes" and folded in {"name", "command", "cmdline"}:
            return self._whole("process", value, where)
        if ENVIRONMENT_KEY.match(inside):
            variable = re.match(r"(?P<name>[^=]*)=(?P<x>[\s\S]*)", f"{key}={value}")
            if variable is not None and folded != "name" and keep_variable(variable) is None:
                return self._whole("env-value", value, where)
        if value != "localhost" and not PLAIN_VALUE.match(value):
            for rule, pattern in KEY_RULES:
                if pattern.match(folded):
                    return self._whole(rule, value, where)
        return self.text(value, where, key="version" if inside in {"packages", "versions"} else key)

    def trace(self, source: Reader, target: Writer, where: str) -> None:
        """Copy a Kineto trace, redacting its strings; every byte outside them stays as it is.

        `source` and `target` are uncompressed. Memory is bounded by the largest event. A truncated trace
        is copied up to its end.

        Raises:
            WorkbenchError: one event is larger than 64 MiB, or the trace larger than 8 GiB.
        """
        held: list[bytes] = []
        size = 0
        for is_event, data in _EventSplitter(where).split(source):
            held.append(self._event(data, where) if is_event else self._outside(data, where))
            size += len(held[-1])
            if size > _CHUNK:  # many small writes would cost as much as the search
                target.write(b"".join(held))
                held, size = [], 0
        target.write(b"".join(held))

    def _whole(self, rule: str, value: str, where: str) -> str:
        if not value or (value.startswith("<") and value.endswith(">")):
            return value
        self._found[where, rule, _shown(rule, value)] += 1
        return f"<{rule}>"

    def _apply(self, text: str, kernel: bool, key: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        found: list[tuple[str, str]] = []
        exempt = []
        if HASH_KEY.match(key):
            exempt = [keep_words]
        if VERSION_KEY.match(key):
            exempt = [keep_words, keep_ipv4]
        for rule in RULES:
            if not (kernel and rule.guess) and rule.keep not in exempt:
                text = _replace(text, rule, found)
        if self._words is not None and not kernel:
            text = self._words.sub(lambda match: self._word(match[0], found), text)
        return text, tuple(found)

    def _compile_words(self) -> None:
        names = self.identity.users | self.identity.hosts | self._learned
        longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # A name inside our own replacement ("<host>") cannot occur: those words are common names.
        self._words = re.compile(rf"(?i)(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])") if names else None

    def _word(self, word: str, found: list[tuple[str, str]]) -> str:
        rule = "host" if word.lower() in {host.lower() for host in self.identity.hosts} else "user"
        found.append((rule, word))
        return f"<{rule}>"

    def _event(self, data: bytes, where: str) -> bytes:
        """Redact one event, given as the text of its object.

        Most events consist of strings seen before that no rule touches, wherever they stand.
        """
        literals = _ANY_STRING.findall(data)
        if self._clean.issuperset(literals) or all(map(self._is_clean, literals)):
            return data
        if re.search(rb'"(?i:env|environ)', data):
            return self._outside(data, where)
        kernel, process = bool(_GPU_EVENT.search(data)), bool(_PROCESS_EVENT.search(data))
        key = ""

        def replace(match: re.Match[bytes]) -> bytes:
            nonlocal key
            if match[2] is not None:
                key = _decoded(match[1])
                return self._literal(match[1], where) + match[2]
            if process and key == "name" and match[1] != b'"process_name"':
                return _encoded(self._whole("process", _decoded(match[1]), where))
            return self._literal(match[1], where, key=key, kernel=kernel and key == "name")

        return _LITERAL.sub(replace, data)

    def _is_clean(self, literal: bytes) -> bool:
        """Whether no rule changes this string, and, should it be a key, none changes what stands under it."""
        if literal in self._clean:
            return True
        text = _decoded(literal)
        folded = _folded(text)
        decides = bool(_enclosing(text, "")) or any(pattern.match(folded) for _, pattern in KEY_RULES)
        if decides or text == "process_name" or self._remembered(text, "", False)[1]:
            return False
        if len(self._clean) > _MEMO:
            self._clean.clear()
        self._clean.add(literal)
        return True

    def _outside(self, data: bytes, where: str) -> bytes:
        """Redact text between events: a document's own members, where enclosing keys decide."""
        key, enclosing = "", [""]
        parts: list[bytes] = []
        position = 0
        if not data.strip(b", \r\n\t"):
            return data
        for match in _TOKEN.finditer(data):
            if match[1] is not None:
                parts.append(data[position : match.start()])
                position = match.end(1)
                is_key = match[2] is not None
                parts.append(self._literal(match[1], where, key="" if is_key else key, inside=enclosing[-1]))
                key = _decoded(match[1]) if is_key else key
            elif match[3] is not None:  # a string that the truncated file never closed
                parts.append(data[position : match.start()])
                parts.append(_encoded(self.text(_decoded(data[match.start() :] + b'"'), where))[:-1])
                return b"".join(parts)
            elif match[0] in b"{[":
                enclosing.append(_enclosing(key, enclosing[-1]))
            elif len(enclosing) > 1:
                enclosing.pop()
        return b"".join([*parts, data[position:]])

    def _literal(self, literal: bytes, where: str, *, key: str = "", inside: str = "", kernel: bool = False) -> bytes:
        before = _decoded(literal)
        after = self.text(before, where, kernel=True) if kernel else self.string(before, where, key=key, inside=inside)
        return literal if after == before else _encoded(after)


class _EventSplitter:
    """Cuts a JSON stream into objects that stand in an array (events) and what lies between them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._brackets: list[bytes] = []
        self._event_depth: int | None = None

    def split(self, source: Reader) -> Iterator[tuple[bool, bytes]]:
        """Yield `(is_event, bytes)`; joined, the pieces are the stream."""
        buffer, position, start, total = b"", 0, 0, 0
        while chunk := source.read(_CHUNK):
            total += len(chunk)
            buffer, position, start = buffer[start:] + chunk, position - start, 0
            self._check(total, len(buffer))
            while match := _BRACKET.match(buffer, position):
                if match[2] is not None:  # a string that goes on in the next chunk
                    position = match.start(2)
                    break
                position, edge = match.end(), self._edge(match[1])
                if edge == "opens":
                    yield False, buffer[start : position - 1]
                    start = position - 1
                    if whole := _EVENT.match(buffer, start):
                        position, edge = whole.end(), self._close()
                if edge == "closes":
                    yield True, buffer[start:position]
                    start = position
        yield False, buffer[start:]

    def _check(self, total: int, held: int) -> None:
        if total > LARGEST_TRACE:
            raise WorkbenchError(f"{self._where} unpacks to more than {LARGEST_TRACE >> 30} GiB; trace fewer repeats")
        if held > _LARGEST_EVENT + _CHUNK:
            raise WorkbenchError(
                f"{self._where} holds one event above {_LARGEST_EVENT >> 20} MiB; export the trace again"
            )

    def _edge(self, mark: bytes) -> str:
        """Follow one bracket; say whether an event "opens" or "closes" at it."""
        if mark in b"{[":
            opens = self._event_depth is None and mark == b"{" and self._brackets[-1:] == [b"["]
            if opens:
                self._event_depth = len(self._brackets)
            self._brackets.append(mark)
            return "opens" if opens else ""
        if self._brackets:
            self._brackets.pop()
        if self._event_depth is not None and len(self._brackets) == self._event_depth:
            self._event_depth = None
            return "closes"
        return ""

    def _close(self) -> str:
        """The event that just opened is over."""
        return self._edge(b"}")


class _Lenient:
    """Reads a plain or gzip file up to where it breaks; a broken end becomes a warning."""

    def __init__(self, raw: BufferedReader, where: str, warnings: list[str]) -> None:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        self._stream = gzip.GzipFile(fileobj=raw) if packed else raw
        self._where, self._warnings = where, warnings

    def read(self, size: int, /) -> bytes:
        try:
            return self._stream.read1(size)  # not `read`: that would lose what precedes the break
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self._warnings.append(f"{self._where} ends early ({error}); what comes before is kept")
            return b""


def copy_trace(redactor: Redactor | None, source: Path, target: IO[bytes], where: str) -> list[str]:
    """Write the trace `source` (plain or gzip) to `target` as gzip, redacted unless `redactor` is None.

    The compressed bytes depend on the content alone: no time stamp, no file name. Returns warnings; a
    truncated file is copied as far as it goes.

    Raises:
        WorkbenchError: the file cannot be read, or it is too large.
    """
    warnings: list[str] = []
    try:
        with (
            source.open("rb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=target, mtime=0, compresslevel=9) as packed,
        ):
            stream = _Lenient(raw, where, warnings)
            if redactor is not None:
                redactor.trace(stream, packed, where)
            else:
                while block := stream.read(_CHUNK):
                    packed.write(block)
    except OSError as error:
        raise WorkbenchError(f"cannot copy {where}: {error.strerror or error}") from error
    return warnings


def learn_files(redactor: Redactor, paths: Iterable[Path]) -> None:
    """Let `redactor` learn the account names in all files before it redacts the first one."""
    for path in paths:
        with path.open("rb") as raw:
            stream, tail = _Lenient(raw, path.name, []), b""
            while block := stream.read(_CHUNK):
                redactor.learn(tail + block)
                tail = block[-64:]


def _is_name(word: str) -> bool:
    return len(word) >= 3 and word.lower() not in COMMON_NAMES


@lru_cache(maxsize=4096)
def _folded(key: str) -> str:
    """`apiKey`, `API-KEY` and `api key` as `api_key`."""
    return re.sub(r"[-\s.]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)).lower()


def _enclosing(key: str, inside: str) -> str:
    folded = _folded(key)
    decides = ENVIRONMENT_KEY.match(folded) or folded in {"packages", "versions", "processes"}
    return folded if decides else inside


def _decoded(literal: bytes) -> str:
    """The text of a JSON string literal; bytes that are no UTF-8 survive the way back."""
    if b"\\" in literal:
        try:
            return str(json.loads(literal.decode("utf-8", "surrogateescape"), strict=False))
        except ValueError:  # not an escape JSON knows; the raw characters are searched instead
            pass
    return literal[1:-1].decode("utf-8", "surrogateescape")


def _encoded(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _shown(rule: str, text: str) -> str:
    if rule in SECRETS:
        return f"{text[:4]}… ({len(text)} characters)"
    return text if len(text) <= 200 else f"{text[:200]}…"


def _replace(text: str, rule: Rule, found: list[tuple[str, str]]) -> str:
    has_part = "x" in rule.pattern.groupindex

    def replacement(match: re.Match[str]) -> str:
        whole, part = match[0], match["x"] if has_part else match[0]
        if part.startswith("<") and part.endswith(">"):
            return whole
        new = rule.keep(match) if rule.keep else None
        if new == part:
            return whole
        found.append((rule.name, _shown(rule.name, part)))
        new = f"<{rule.name}>" if new is None else new
        if not has_part:
            return new
        start, end = match.start("x") - match.start(), match.end("x") - match.start()
        return whole[:start] + new + whole[end:]

    return rule.pattern.sub(replacement, text)
