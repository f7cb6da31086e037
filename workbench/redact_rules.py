"""What `workbench.redact` looks for: patterns, and the exceptions that keep evidence readable.

A rule replaces its group `x`, or the whole match, by `<rule>`. Its `keep` function may return another
replacement, and the text itself to leave it alone. Rules run in order: known shapes, then places, then
guesses, each on what the earlier ones left.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

Keep = Callable[[re.Match[str]], str | None]

# Account names that belong to images and services; they tell nothing about a person.
COMMON_NAMES = frozenset(
    [
        *["root", "user", "users", "admin", "ubuntu", "debian", "centos", "ec2-user", "runner", "jovyan"],
        *["vscode", "docker", "nobody", "guest", "default", "home", "work", "workspace", "shared", "public"],
        *["data", "app", "build", "builder", "test", "tests", "dev", "python", "conda", "cuda", "nvidia"],
        *["amd", "torch", "vllm", "model", "models", "local", "host", "localhost", "graph", "kernel"],
        *["encoder", "image", "video", "eager", "none", "main"],
    ]
)


@dataclass(frozen=True)
class Rule:
    """One thing to remove. A `guess` is not applied to kernel names."""

    name: str
    pattern: re.Pattern[str]
    keep: Keep | None = None
    guess: bool = False


SECRET_VARIABLE = re.compile(
    r"TOKEN(?!S)|SECRET|(?:^|_)KEY|APIKEY|PASS|PWD|CRED|AUTH|COOKIE|SESSION|SIGNATURE|PRIVATE|DSN|WEBHOOK"
)
_OPEN_VARIABLE = re.compile(
    r"(?:VLLM|CUDA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|TRITON|CUBLAS|NVIDIA|HIP|ROCR|RCCL|KINETO)(?:_|$)"
)
PLAIN_VALUE = re.compile(r"[\"']?(?:[-+]?[\d.,:]+|true|false|on|off|yes|no|none|null|)[\"']?$", re.IGNORECASE)
_PUBLIC_HOST = re.compile(
    r"(?:[\w-]+\.)*(?:github\.com|githubusercontent\.com|huggingface\.co|pytorch\.org|python\.org|pypi\.org|"
    r"vllm\.ai|readthedocs\.io|nvidia\.com|perfetto\.dev|w3\.org|apache\.org|arxiv\.org|example\.(?:com|org))$|"
    r"localhost$|127(?:\.\d+){3}$|0\.0\.0\.0$"
)
_PACKAGE_ROOT = re.compile(
    r".*(?:site-packages|dist-packages|python3?(?:\.\d+)?)[/\\](?=.)|"
    r".*[/\\](?=(?:vllm|torch|triton|transformers|workbench|flash_attn|numpy)[/\\])",
    re.DOTALL,
)
_CODE_FILE = re.compile(
    r"[\w.+@-]{1,100}\.(?:pyi?|pyx|cuh?|cpp|cc|c|h|hpp|so(?:\.\d+)*|json(?:\.gz)?|gz|md|txt|ipynb|sqlite|ya?ml|toml|log)$"
)
_OPEN_PATH = re.compile(r"/(?:usr|lib|lib64|bin|sbin|etc|proc|sys|dev(?!/shm)|opt/(?:conda|nvidia|rocm)|v\d+)(?:/|$)")
_STATE = re.compile(
    r"(?:not|no|required|missing|invalid|valid|expired|empty|unset|needed|optional|disabled|enabled|unknown|"
    r"ignored|unused|wrong)(?![\w-])",
    re.IGNORECASE,
)
_HASH = re.compile(r"(?:0x)?(?:[0-9a-f]+|[0-9A-F]+)$|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
# RFC 4648, upper case: of 87,000 names in the sources of torch, vLLM and transformers and in the recordings, none.
_BASE32 = re.compile(r"(?=(?:[A-Z]*[2-7]){2})[A-Z2-7]{20,}=*$")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def keep_path(match: re.Match[str]) -> str | None:
    """Keep what names code: system paths, a package's own tree, the last component of a source file."""
    text = match["x"]
    if _OPEN_PATH.match(text) and not re.search(r"/(?:home|users)/", text, re.IGNORECASE):
        return text
    root = _PACKAGE_ROOT.match(text)
    if root:
        return f"<path>/{text[root.end() :]}"
    last = re.split(r"[/\\]", text)[-1]
    return f"<path>/{last}" if _CODE_FILE.match(last) else None


def keep_url(match: re.Match[str]) -> str | None:
    """Keep an address of a well-known public host without credentials or query."""
    if match["scheme"].lower() not in {"http", "https", "git+https"}:
        return None
    rest = match["rest"]
    host = re.split(r"[/:?#]", rest, maxsplit=1)[0]
    if "@" in rest.partition("/")[0] or "?" in rest or not _PUBLIC_HOST.match(host):
        return None
    return match[0]


def keep_variable(match: re.Match[str]) -> str | None:
    """Keep numbers and switches, and the variables that configure the software under study."""
    name, value = match["name"], match["x"]
    if SECRET_VARIABLE.search(name):
        return None
    if PLAIN_VALUE.match(value) or (_OPEN_VARIABLE.match(name) and not value.startswith("/")):
        return value
    return None


def keep_named_secret(match: re.Match[str]) -> str | None:
    """`token: 64` counts tokens, "auth is required" is prose; every other named secret goes."""
    text = match["x"]
    counts = match["name"].lower() == "token" and re.fullmatch(r"\d{1,7}", text)
    return text if counts or (match["is"] and _STATE.match(text)) else None


def keep_host(match: re.Match[str]) -> str | None:
    """Keep measures ("host: 12.3 us") and prose ("the host is idle"), which tell of host time."""
    text = match["x"].rstrip(".")
    prose = match["is"] and re.fullmatch(r"[A-Za-z]+", text)
    return match["x"] if prose or re.fullmatch(r"\d+(?:\.\d+)?", text) else None


def keep_public(match: re.Match[str]) -> str | None:
    """Keep well-known public hosts."""
    return match["x"] if _PUBLIC_HOST.match(match["x"].lower()) else None


def keep_ipv4(match: re.Match[str]) -> str | None:
    """Keep loopback and wildcard addresses, and four-part version numbers."""
    before = match.string[max(0, match.start() - 24) : match.start()]
    if re.search(r"(?:[=<>~!]=\s*|\bv|(?i:version|driver|release)\W{0,3}|[A-Za-z]\w*-)$", before):
        return match[0]
    try:
        address = ipaddress.IPv4Address(match[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else None


def keep_ipv6(match: re.Match[str]) -> str | None:
    """Keep what only looks like an address."""
    try:
        ipaddress.IPv6Address(match["x"])
    except ValueError:
        return match["x"]
    return None


def is_random(text: str) -> bool:
    """Whether letters and digits look drawn at random rather than written as words.

    Random base-62 text changes its class (word, capitals, number) every two characters and has one vowel
    in five letters; identifiers in CamelCase change every four and have one in three. Text of one case
    and digits must also hardly repeat a character.
    """
    one_case = text.lower() == text or text.upper() == text
    if len(text) < 20 or text.isdigit() or (text.isalpha() and one_case):
        return False
    mean = len(text) / max(1, len(_WORD.findall(text)))
    if one_case:
        return len(text) >= 24 and mean < 4 and len(set(text)) >= min(18, 0.55 * len(text))
    letters = [character for character in text.lower() if character.isalpha()]
    vowels = sum(character in "aeiou" for character in letters) / len(letters)
    return len(set(text)) >= 12 and (mean < 2.8 or (mean < 3.6 and vowels < 0.27))


def keep_words(match: re.Match[str]) -> str | None:
    """Keep hashes, mangled C++ names and identifiers made of words."""
    token = match[0]
    tail = token.rpartition("-")[2]
    if token.startswith(("_Z", "ZN")) or _HASH.match(token) or (len(tail) >= 16 and _HASH.match(tail)):
        return token
    if _BASE32.match(token):
        return None
    joined = re.sub(r"[-_+/=]", "", token)
    one_case = joined.lower() == joined or joined.upper() == joined
    # Random text of 64 characters has few separators; snake_case and dashed names have many.
    if len(token) - len(joined) <= len(token) // (12 if one_case else 8) + 2:
        return None if is_random(joined) else token
    return None if any(is_random(part) for part in re.split(r"[-_+/=]", token)) else token


def _rule(name: str, pattern: str, keep: Keep | None = None, *, guess: bool = False) -> Rule:
    return Rule(name, re.compile(pattern, re.VERBOSE), keep, guess)


# Shapes of issued keys: hubs and model vendors, forges, chat, clouds, registries, web tokens.
_TOKENS = r"""
(?<![A-Za-z0-9])(?:
    hf_[A-Za-z0-9]{16,} | api_org_[A-Za-z0-9]{16,} | sk-(?:proj-|ant-|or-|svcacct-)?[A-Za-z0-9_-]{20,}
  | nvapi-[\w-]{20,} | r8_[A-Za-z0-9]{30,} | gsk_[A-Za-z0-9]{30,} | wandb_v1_\w{20,}
  | ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
  | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
  | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,} | \d{8,10}:AA[\w-]{30,}
  | (?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16} | AIza[\w-]{30,} | ya29\.[\w-]{20,} | GOCSPX-[\w-]{20,}
  | dop_v1_[0-9a-f]{40,} | dapi[0-9a-f]{32} | tskey-[\w-]{16,} | hvs\.[\w-]{20,}
  | [rsp]k_(?:live|test)_[A-Za-z0-9]{16,} | SG\.[\w-]{16,}\.[\w-]{16,}
  | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,} | dckr_pat_[\w-]{20,}
  | lsv2_[a-z]{2}_[0-9a-f]{32}\w* | PMAK-[0-9a-f]{24}-[0-9a-f]{34} | shp(?:at|ca|pa|ss)_[0-9a-f]{32}
  | v1\.0-[0-9a-f]{24}-[0-9a-f]{64,}
  | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?
)(?![A-Za-z0-9])"""
_OPTION = r"(?i)(?<!\S)--?(?:[a-z0-9]+[-_])*"
_NOT_LOCAL = r"(?!<|127\.|0\.0\.0\.0|localhost)"
_PART = r"[^\s/\\\"'<>|:*?,;()\[\]{}=]+"  # one component of a path
_EDGE = r"(?:(?<![\w./\\$)\]-])|(?<=-[ILB]))(?<!<path>)"  # where an absolute path can begin
_NAMED = r"""(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key
    |secret[_-]?key|credentials?|auth|session[_-]?id|jwt|otp)"""

RULES: tuple[Rule, ...] = (
    _rule(
        "private-key",
        r"-----BEGIN\ [A-Z ]*PRIVATE\ KEY(?:\ BLOCK)?-----[\s\S]*?(?:-----END\ [A-Z ]*PRIVATE\ KEY(?:\ BLOCK)?-----|$)",
    ),
    _rule("token", _TOKENS),
    _rule(
        "secret",
        r"""(?i)\b(?:authorization|proxy-authorization|x-api-key|api-key|set-cookie|cookie)
        ["']?\s*[:=]\s*["']?(?P<x>[^\n"',}]+)""",
    ),
    _rule("secret", r"(?i)\b(?:bearer|basic)\s+(?P<x>[A-Za-z0-9._~+/=-]{12,})"),
    _rule(
        "secret",
        r"""(?i)\b(?:AccountKey|SharedAccessKey|sig|X-Amz-(?:Signature|Credential|Security-Token))
        =(?P<x>[^\s;&"']+)""",
    ),
    _rule("url", r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,12})://(?P<rest>[^\s\"'<>`\\]+)", keep_url),
    _rule(
        "secret",
        _OPTION
        + r"""(?:token|secret|password|passwd|pass|pwd|key|apikey|credentials?|auth|pat|cookie|session[-_]id)(?:=|\s+)
        (?P<x>"[^"]*"|'[^']*'|[^\s"'-][^\s"']*)""",
    ),
    _rule("secret", r"(?<!\S)-u\s+(?P<x>[^\s:]+:\S+)"),
    _rule("user", _OPTION + r"(?:user|username|login)(?:=|\s+)(?P<x>[^\s-]\S*)"),
    _rule(
        "host",
        _OPTION + rf"(?:host|hostname|addr|address|node-name|nodelist)(?:=|\s+)(?P<x>{_NOT_LOCAL}[^\s-]\S*)",
    ),
    _rule(
        "env-value",
        r"""(?<![\w-])(?P<name>[A-Z][A-Z0-9_]{2,})=(?P<x>"[^"]*"|'[^']*'|[^\s"',;)\]}]+)""",
        keep_variable,
        guess=True,
    ),
    _rule(
        "secret",
        rf"""(?i)(?<![\w-])(?:[a-z0-9]+[_-])*?(?P<name>{_NAMED})["']?
        \s*(?:[:=]|(?P<is>\bis\b))\s*["']?(?P<x>(?!<)[^\s"',;}}]{{6,}})""",
        keep_named_secret,
        guess=True,
    ),
    _rule(
        "user",
        r"""(?i)(?<![\w-])(?:user(?:name)?|logname|login)["']?\s*[:=]\s*["']?(?P<x>(?!<)[\w.@-]+)""",
        guess=True,
    ),
    _rule("user", r"\b[ug]id=\d+\((?P<x>[^)]+)\)", guess=True),
    _rule(
        "host",
        rf"""(?i)(?<![\w-])(?:host(?:name)?|nodename|fqdn)["']?
        \s*(?:[:=]|(?P<is>\bis\b))\s*["']?(?P<x>{_NOT_LOCAL}[\w.-]+)""",
        keep_host,
        guess=True,
    ),
    _rule(
        "account",
        r"""(?<![\w.@/+-])(?P<x>[\w.+-]+@(?!v?\d|main\b|master\b|latest\b|plt\b|GLIBC|CXXABI)
        [A-Za-z][\w.-]*(?::[~\w./-]*)?)""",
        guess=True,
    ),
    _rule("account", r"(?<![\w.@/+-])[\w.+-]+@(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", guess=True),
    _rule(
        "path",
        rf"""(?i)(?:(?<!<path>)(?P<x>(?:/home/|/users/){_PART}
        (?:(?:\ [\w.-]+){{0,3}}[/\\]+{_PART})*[/\\]?))""",
        keep_path,
    ),
    _rule(
        "path",
        rf"""(?i)(?<![\w.])(?P<x>(?:~[\w.-]*/|[a-z]:\\+)(?:{_PART}(?:\ [\w.-]+){{0,3}}[/\\]+)*{_PART}[/\\]?)""",
        keep_path,
    ),
    _rule("path", r"""(?<![\w\\])(?P<x>\\\\[\w.-]+(?:\\+[^\s\\"'<>|:*?]+)+)""", keep_path),
    _rule(
        "path",
        rf"""{_EDGE}(?P<x>(?:/{_PART}){{2,}}/?
        |/(?:root|home|Users|mnt|data|workspace|scratch|work|nfs|lustre)(?![\w.-]))""",
        keep_path,
    ),
    _rule(
        "host",
        r"""(?i)(?<![\w.-])(?P<x>(?:[\w-]+\.)+(?:internal|local|localdomain|corp|lan|intra|intranet|home|svc
        |cluster|amazonaws\.com|cloudapp\.azure\.com|googleusercontent\.com))(?![\w-])""",
        guess=True,
    ),
    _rule(  # three labels and more; ".net" also ends names of modules, so there the first must look numbered
        "host",
        r"""(?i)(?<![\w./@-])(?P<x>(?:[a-z][a-z0-9-]{0,62}\.(?:[a-z0-9-]{1,63}\.){1,8}(?:com|org|edu|gov|mil)
        |(?=[a-z]{1,62}(?:-|\d\d))[a-z0-9-]{1,63}\.(?:[a-z0-9-]{1,63}\.){1,8}net))(?![\w-]|\.\w)""",
        keep_public,
        guess=True,
    ),
    _rule("host", r"(?i)\b(?P<x>ip-\d+-\d+-\d+-\d+[\w.-]*)", guess=True),
    _rule("ip", r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", keep_ipv4, guess=True),
    _rule(
        "ip",
        r"""(?i)(?<![\w:])(?P<x>(?:[23][0-9a-f]{3}|f[cd][0-9a-f]{2}|fe[89ab][0-9a-f])
        :(?:[0-9a-f]{0,4}:){1,6}[0-9a-f]{0,4})(?![\w:])""",
        keep_ipv6,
        guess=True,
    ),
    _rule("hardware-address", r"(?i)(?<![\w:-])[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}(?![\w:-])", guess=True),
    _rule("gpu-uuid", r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"),
    _rule(
        "process", r"\|\s+\d+\s+\S+\s+\S+\s+\d+\s+[CGM+]+\s+(?P<x>\S.*?)\s+\d+MiB\s*\|", guess=True
    ),  # a row of nvidia-smi
    _rule("process", r"^thread\ \d+\ \((?P<x>.+)\)$", guess=True),
    _rule("secret", r"(?<![\w<])[A-Za-z0-9_+/=-]{20,}(?![\w>])", keep_words, guess=True),
)

# JSON keys, folded to snake case, whose string value goes whole.
KEY_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "secret",
        re.compile(
            r"(?:^|.*_)(?:password|passwd|secret|token|api_?key|access_?key|private_?key|credentials?"
            r"|authorization|cookie|session_?id|jwt|otp)$"
        ),
    ),
    ("host", re.compile(r"(?:host|hostname|host_name|nodename|node_name|machine|fqdn|computer_?name)$")),
    ("user", re.compile(r"(?:user|username|user_name|login|logname)$")),
    ("process", re.compile(r"(?:process_name|exe|executable|comm)$")),
)
ENVIRONMENT_KEY = re.compile(r"(?:env|envs|environ|env_vars|environment_variables)$")
HASH_KEY = re.compile(r"(?:.*_)?(?:hash|sha\d*|digest|fingerprint|commit|checksum|trace_id|id)$")
VERSION_KEY = re.compile(r"(?:.*_)?(?:version|driver|packages|versions|release|torch|vllm|cuda\w*)$")
SECRETS = frozenset({"secret", "token", "private-key", "env-value"})  # shown by their first characters only
