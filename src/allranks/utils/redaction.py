"""Redact secrets in text, command-line arguments and environment variables. Pure.

One set of rules serves everything that is written to a file or shown: the run folder, pages, diagnoses and the output
of ``allranks logs``. A secret is recognised by its form (an access token with a published prefix, a private key, a
password in a URL), or by its name (``HF_TOKEN=...``, ``--api-key ...``, ``"password": ...``). Under names that only
suggest a secret (``WANDB``, ``AUTH``), the value must look random as well.

Token forms follow the rule set of gitleaks (https://github.com/gitleaks/gitleaks, config/gitleaks.toml), as does the
search for a rule's keywords before its pattern runs. The entropy limits are those of
detect-secrets (https://github.com/Yelp/detect-secrets).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

HIDDEN = "***"
Kind = Literal["always", "token", "maybe"]

HEX_ENTROPY, BASE64_ENTROPY = 3.0, 4.5  # bits per character, as in detect-secrets
_RANDOM_LENGTH = 16

# ---------------------------------------------------------------------------------------------- names

_SECRET_PARTS = (
    "password", "passwd", "passphrase", "passcode", "secret", "credential", "apikey", "accesskey", "privatekey",
    "accountkey", "encryptionkey", "signingkey", "authkey", "sshkey", "masterkey", "storagekey", "licensekey",
    "authorization",
)  # fmt: skip
_SECRET_WORDS = frozenset({"pwd", "pat", "jwt", "psk"})
_MAYBE_WORDS = frozenset({"key", "auth", "wandb", "session", "signature", "sig", "cookie", "webhook", "pass", "bearer"})
# Names that end like this say something about a secret, they do not hold it.
_ABOUT = frozenset(
    {
        *("file", "files", "path", "paths", "dir", "folder", "name", "names", "length", "len", "count", "counts"),
        *("size", "type", "types", "limit", "timeout", "ttl", "budget", "parallelism", "index", "idx", "ids", "prompt"),
        *("helper", "policy", "project", "entity", "group", "team", "tags", "mode", "notes"),
    }
)
# Special tokens of a tokenizer and counts of tokens: eos_token, max_token.
_TEXT_TOKENS = frozenset(
    {
        *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "special", "image", "video", "audio", "im", "end", "start"),
        *("stop", "decoder", "fim", "prefix", "suffix", "middle", "per", "each", "next", "last", "first", "max", "min"),
        *("num", "n", "added", "additional", "new", "extra", "single", "every", "sub", "any", "current", "previous"),
    }
)
_PATH_VARIABLES = frozenset({"PWD", "OLDPWD"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
_SCHEME = re.compile(r"(?i)^(?:bearer|basic|digest|token|negotiate)\s+\S")


@lru_cache(maxsize=4096)
def kind_of_name(name: str) -> Kind | None:
    """Return how likely a variable, key or option of this name holds a secret.

    Returns:
        ``always``, ``token`` (an access token, which in text may also be a token of a tokenizer), ``maybe`` (only a
        value that looks random is a secret), or None.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or name in _PATH_VARIABLES:
        return None
    joined, last = "".join(words), words[-1]
    if last in _ABOUT:
        return None
    if any(part in joined for part in _SECRET_PARTS) or any(word in _SECRET_WORDS for word in words):
        return "always"
    if last.endswith("token"):
        before = words[-2] if len(words) > 1 else ""
        return None if before in _TEXT_TOKENS else "token"
    if last == "pass" and len(words) > 1 and name.isupper():
        return "always"
    return "maybe" if "token" in words or any(word in _MAYBE_WORDS for word in words) else None


def is_secret_name(name: str) -> bool:
    """Return True for names such as HF_TOKEN, MYSQL_PWD or WANDB_API_KEY (not TOKENIZERS_PARALLELISM or eos_token)."""
    return kind_of_name(name) in ("always", "token")


def looks_random(value: str) -> bool:
    """Return whether a value looks machine-generated: long, of letters and digits, of high entropy."""
    if len(value) < _RANDOM_LENGTH or not re.fullmatch(r"[\w+/=.~-]+", value) or value.startswith(("/", "./", "~/")):
        return False
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return mixed and _entropy(value) >= HEX_ENTROPY


def _entropy(value: str) -> float:
    counts = Counter(value).values()
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts)


def _is_digest(value: str) -> bool:
    return bool(re.fullmatch(r"(?:[0-9a-f]{32}|[0-9a-f]{40}|[0-9a-f]{64}|[0-9a-f]{96}|[0-9a-f]{128})", value))


# ------------------------------------------------------------------------------------------- forms


_compiled = cache(re.compile)  # when it is first used: most commands need few of the patterns


class _Rule(NamedTuple):
    """A pattern that is applied only if the text contains one of its keywords (in lower case)."""

    keywords: tuple[str, ...]
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]


def _key_line(match: re.Match[str]) -> str:
    """Return whether a Base64 line is part of a key, as opposed to a digest, a path or a word."""
    text = match.group(0)
    value = text.strip()
    padded = value.endswith("=")
    mixed = re.search(r"[a-z]", value) and re.search(r"[A-Z]", value) and re.search(r"\d", value)
    return text.replace(value, HIDDEN) if padded or (mixed and _entropy(value) >= BASE64_ENTROPY) else text


def _user_part(match: re.Match[str]) -> str:
    """Return whether the user part of a URL is secret: ``user:password`` always, a name alone only if it is a token."""
    return HIDDEN if ":" in match.group(0) or looks_random(match.group(0)) else match.group(0)


_PUBLISHED = (
    r"hf_[A-Za-z0-9]{10,}", r"api_org_[A-Za-z0-9]{16,}", r"gh[pousr]_[A-Za-z0-9]{16,}", r"github_pat_\w{20,}",
    r"sk-[\w-]{16,}", r"gsk_[A-Za-z0-9]{20,}", r"xai-[A-Za-z0-9]{20,}", r"pplx-[A-Za-z0-9]{20,}",
    r"r8_[A-Za-z0-9]{30,}", r"wandb_v1_[\w-]{20,}", r"nvapi-[\w-]{20,}", r"xox[abeoprs]-[\w-]{10,}",
    r"xapp-\d-[\w-]{10,}", r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}", r"AIza[\w-]{30,}", r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}", r"npm_[A-Za-z0-9]{20,}", r"pypi-[\w-]{20,}", r"dckr_(?:pat|oat)_[\w-]{20,}",
    r"[sr]k_(?:test|live|prod)_[A-Za-z0-9]{10,}", r"SG\.[\w-]{16,}\.[\w-]{16,}", r"do[opr]_v1_[a-f0-9]{32,}",
    r"dapi[a-f0-9]{32}(?:-\d)?", r"hv[sbr]\.[\w-]{24,}", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}", r"tskey-[\w-]{16,}",
    r"ATATT3[\w=-]{20,}", r"AGE-SECRET-KEY-1[A-Z0-9]{20,}", r"dop_v1_[a-f0-9]{32,}",
)  # fmt: skip
_PUBLISHED_KEYWORDS = (
    "hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "sk-", "gsk_", "xai-", "pplx-", "r8_",
    "wandb_v1_", "nvapi-", "xox", "xapp-", "a3t", "akia", "asia", "abia", "acca", "aiza", "ya29.", "gocspx-", "npm_",
    "pypi-", "dckr_", "sk_", "rk_", "sg.", "_v1_", "dapi", "hvs.", "hvb.", "hvr.", "shp", "tskey-", "atatt3",
    "age-secret",
)  # fmt: skip
_FORMS = (
    _Rule(
        ("private key",),
        r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)(?:(?!-----END)[A-Za-z0-9+/=\s\\\"',:|>.*-]){1,20000}",
        rf"\1{HIDDEN}",
    ),
    _Rule(("eyj",), r"(?<![\w-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?", HIDDEN),
    _Rule(("gl",), r"(?<![A-Za-z0-9_])(?:gl[a-z]{2,6}-[\w-]{16,}|gls[ab]_\w{20,})", HIDDEN),  # "gl" is in many texts
    _Rule(_PUBLISHED_KEYWORDS, rf"(?<![A-Za-z0-9_])(?:{'|'.join(_PUBLISHED)})", HIDDEN),
    _Rule(("munge:",), r"\bMUNGE:[A-Za-z0-9+/=]{16,}:?", HIDDEN),
    _Rule(("hooks.slack.com",), r"(?<=hooks\.slack\.com/)[\w/-]{10,}", HIDDEN),
    # a password may have slashes; what begins with a port has a host before it
    _Rule(("://",), r"(?<=://)[^/\s@:\[\"'<>]{0,200}:(?!\d{1,5}(?:/|$))[^\s\"'<>]{1,2000}(?=@)", HIDDEN),
    _Rule(("://",), r"(?<=://)[^/\s@\"'<>]{1,2000}(?=@)", _user_part),
)
_BASE64_LINE = r"(?m)^[ \t]*[A-Za-z0-9+/]{60,}={0,2}[ \t]*$|(?<![\w+/])[A-Za-z0-9+/]{60,20000}={1,2}(?!\w)"

# --------------------------------------------------------------------------------- names in text

_IN_NAMES = (
    r"token|secret|passw|passphrase|passcode|credential|pwd|pat|jwt|psk|key|auth|wandb|session|signature|sig|pass"
)
# After a name: closing quote or bracket, then = or : or =>
_NAMED = (
    rf"(?i)(?<![\w.-])([\w.-]{{0,60}}?(?:{_IN_NAMES})[\w.-]{{0,40}}?)"
    r"(\\?[\"']?\]?\s{0,4}(?:=>|:=|=|:)\s{0,4}|\s?(?=[\"']))"
    r"(?:(\\?[\"'])((?!<\||\[)[^\"'\n]{1,4000}?)\3|([^\s\"',;&}\])\[{(\\][^\s\"',;&}\])\\]*))"
)
_FLAG = rf"(?i)(?<![\w-])(--?[\w.-]{{0,60}}?(?:{_IN_NAMES})[\w.-]{{0,40}}?)([\"']?(?:\s{{0,2}}[=,]\s{{0,2}}|\s+)[\"']?)(?![-\"'])([^\s\"',\]]+)"
_SPOKEN = r"(?i)\b([\w-]{0,60}(?:api[_-]?key|access[_-]?key|token|secret|password)\s+(?:is\s+|was\s+)?[\"']?)(?=[\w/+.-]*\d)(?=[\w/+.-]*[a-z])([\w/+.-]{16,})"
_KEYWORDS = tuple(_IN_NAMES.split("|"))
_EMPTY = re.compile(r"(?i)none|null|nil|true|false")
_NOTHING = re.compile(r"(?i)(?:none|null|nil|true|false|\*\*\*.*|<.*|\$.*|%\w*|\.\.\.)")
_ABOUT_TEXT = (
    _Rule(
        ("authorization", "cookie"),
        r"(?i)\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|digest|token|negotiate)\s+)?|(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)"
        r"(?!\*\*\*)[^\s\"',]{6,}(?:;\s*[\w-]+=[^\s;\"',]+)*",
        rf"\1{HIDDEN}",
    ),
    _Rule(("bearer",), r"(?i)\b(bearer)\s+(?=[\w.~+/=-]{8}|[\w.~+/=-]{0,7}\d)[\w.~+/=-]{4,}", rf"\1 {HIDDEN}"),
    _Rule(("basic",), r"(?i)\b(basic)\s+(?=[A-Za-z0-9+/=_-]*[0-9=])[A-Za-z0-9+/=_-]{12,}", rf"\1 {HIDDEN}"),
    _Rule(
        ("-u", "--user"),
        r"((?:^|[\s\"'])(?:-u|--user)[\"']?(?:\s{0,4}[=,]\s{0,4}|\s{1,4})[\"']?[^\s:\"',]{1,200}:)[^\s\"',]+",
        rf"\1{HIDDEN}",
    ),
    _Rule(("wandb",), r"(?i)(wandb[^\n]{0,60}?)\b[0-9a-f]{40}\b", rf"\1{HIDDEN}"),
)


def _hide_value(kind: Kind | None, name: str, value: str, *, quoted: bool, equals: bool) -> bool:
    """Return whether a value after a name in running text is a secret."""
    if kind is None or _NOTHING.fullmatch(value) or _is_folder(name, value):
        return False
    if kind == "maybe":
        return _suggests_secret(name, value)
    if kind == "token" and value.isdigit() and len(value) < 12:
        return False  # a count
    variable = equals and name.rsplit(".", 1)[-1].isupper()
    return variable or len(value) >= 6 or (kind == "always" and (quoted or equals))


def _is_folder(name: str, value: str) -> bool:
    """Return whether the value is a working directory, as in START_PWD=/home/me, not a password."""
    return name.lower().endswith("pwd") and value.startswith("/")


def _suggests_secret(name: str, value: str) -> bool:
    """Return whether a value under a name such as WANDB or db_pass is a secret."""
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    if name.lower().endswith("pass") and mixed and len(value) >= 6 and not value.startswith("/"):
        return True
    return looks_random(value) and ("wandb" in name.lower() or not _is_digest(value))


def _named(match: re.Match[str]) -> str:
    name, between, quote, inner, bare = match.groups()
    value = inner if quote else bare
    if not between.strip() and not quote:
        return match.group(0)
    hidden = _hide_value(kind_of_name(name), name, value, quoted=bool(quote), equals="=" in between)
    if not hidden:
        return match.group(0)
    return f"{name}{between}{quote}{HIDDEN}{quote}" if quote else f"{name}{between}{HIDDEN}"


def _flag(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    kind = kind_of_name(name.lstrip("-"))
    if not is_secret_name(name.lstrip("-")) and not (kind and looks_random(value) and not _is_digest(value)):
        return match.group(0)
    return match.group(0) if _NOTHING.fullmatch(value) else f"{name}{between}{HIDDEN}"


def _spoken(match: re.Match[str]) -> str:
    name = re.split(r"\s", match.group(1), maxsplit=1)[0]
    return match.group(0) if kind_of_name(name) is None else match.group(1) + HIDDEN


_NAMES = (
    *_ABOUT_TEXT,
    _Rule(("-",), _FLAG, _flag),
    _Rule(_KEYWORDS, _NAMED, _named),
    _Rule(("api", "access", "token", "secret", "password"), _SPOKEN, _spoken),
)


def _apply(rules: Sequence[_Rule], text: str) -> str:
    lowered = text.lower()
    for keywords, pattern, replacement in rules:
        if any(word in lowered for word in keywords):
            text = _compiled(pattern).sub(replacement, text)
    return text


# https://github.com/gitleaks/gitleaks, config/gitleaks.toml; and where the keys of W&B and Kaggle stand
_WHOLE = (
    r"(?<![\w-])(?:hf_[A-Za-z]{34}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{82}|glpat-[\w-]{20}|sk-ant-api\d\d-[\w-]{30,}|sk-proj-[\w-]{40,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|nvapi-[\w-]{60,}|xox[bp]-[\w-]{30,})(?![\w-])"
    r"|api\.telegram\.org/bot\d{8,10}:[\w-]{35}(?![\w-])|[?&]sig=[\w%]{40,}"
    r"|(?i:\bmachine\s+api\.wandb\.ai\s+login\s+\w+\s+password\s+[0-9a-f]{40}\b)"
    r"|(?i:wandb(?:\.login|[ _-]?(?:api)?[ _-]?key)\b[^\n@]{0,20}?(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f]))"
    r"|\"username\\?\"\s*:[^\n]{0,60}\\?\"key\\?\"\s*:\s*\\?\"[0-9a-f]{32}\\?\""
)


@cache
def _whole() -> re.Pattern[str]:
    return re.compile(_WHOLE)


def whole_tokens(text: str) -> Iterator[re.Match[str]]:
    """Yield what has a token's full published form, without the shorter beginnings that `redact_forms` masks, too."""
    return _whole().finditer(text)


def redact_forms(text: str) -> str:
    """Return the text without secrets that are recognised by their form alone.

    For complete documents (pages, JSON), whose structure name-based rules could damage.
    """
    return _apply(_FORMS, text)


def redact(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by ``***``."""
    if len(text) < 4:
        return text
    text = _apply(_FORMS, text)
    if len(text) >= 60:
        text = _compiled(_BASE64_LINE).sub(_key_line, text)
    return _apply(_NAMES, text)


def redact_tree(value: Any) -> Any:
    """Return a tree of dictionaries and lists with redacted strings; the names of keys count, too."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            redact(key) if isinstance(key, str) else key: HIDDEN if _is_named_secret(key, item) else redact_tree(item)
            for key, item in value.items()
        }
    return [redact_tree(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_named_secret(name: Any, value: Any) -> bool:
    """Return whether the full value is a secret, by its name and its form."""
    if not isinstance(name, str) or not isinstance(value, str) or not value or _EMPTY.fullmatch(value):
        return False
    kind = kind_of_name(name)
    if kind == "maybe":
        return bool(_SCHEME.match(value)) or _suggests_secret(name, value)
    return kind is not None and not _is_folder(name, value)


# ------------------------------------------------------------------- variables and arguments


def holds_secret(name: str, value: str) -> bool:
    """Return whether a variable's value is a secret, by its name (HF_TOKEN) or by its form (a password in a URL)."""
    return _is_named_secret(name, value) or redact(value) != value


def redact_env(env: dict[str, str]) -> dict[str, str]:
    """Return environment variables with secret values fully replaced: a partly hidden value is useless."""
    return {name: HIDDEN if holds_secret(name, value) else value for name, value in env.items()}


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments with secret ones fully replaced.

    Hides ``VALUE`` in ``--api-key VALUE``, ``--api-key=VALUE`` and ``cluster.env.API_KEY=VALUE``, the password of
    ``-u USER:PASSWORD``, and any argument that contains a secret by its form.
    """
    words: list[str] = []
    option = ""
    for argument in arguments:
        words.append(_argument(option, argument))
        option = argument if argument.startswith("-") and "=" not in argument else ""
    return words


def _argument(option: str, argument: str) -> str:
    if option and not argument.startswith("-") and _is_option_value(option, argument):
        return HIDDEN
    name, equals, value = argument.partition("=")
    if equals and re.fullmatch(r"-{0,2}[\w.-]+", name):
        return f"{name}={HIDDEN}" if holds_secret(name.lstrip("-").rsplit(".", 1)[-1], value) else argument
    return HIDDEN if redact(argument) != argument else argument


def _is_option_value(option: str, value: str) -> bool:
    name = option.lstrip("-")
    if option in ("-u", "--user"):
        return ":" in value
    return looks_random(value) if option == "-p" else holds_secret(name, value)


def is_placeholder(argument: str) -> bool:
    """Return whether `redact_arguments` has replaced a secret in this argument."""
    return argument == HIDDEN or argument.endswith(f"={HIDDEN}")
