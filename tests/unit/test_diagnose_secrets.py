"""Secrets in logs never reach a report, whatever their form and wherever they stand; what is no secret stays."""

import string
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.cli.diagnose import diagnose_command
from allranks.utils.redaction import redact
from tests.sampling import examples
from tests.unit.diagnose_examples import of

WIDE = {"COLUMNS": "4000"}
LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"


def _of(alphabet: str, size: int) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=size, max_size=size).filter(lambda s: s[0] not in "-/+" and len(set(s)) > 4)


# What shows its kind by its own form.
TOKENS = {
    "hf_{}": (LETTERS, 34), "ghp_{}": (LETTERS, 36), "gho_{}": (LETTERS, 36), "github_pat_{}": (LETTERS + "_", 60),
    "glpat-{}": (LETTERS, 20), "sk-{}": (LETTERS, 48), "sk-proj-{}": (LETTERS, 40),
    "sk-ant-api03-{}": (LETTERS + "-_", 60), "xoxb-123456789012-{}": (LETTERS, 24),
    "AKIA{}": (string.ascii_uppercase + string.digits, 16), "AIza{}": (LETTERS, 35), "npm_{}": (LETTERS, 36),
    "pypi-AgE{}": (LETTERS, 40), "eyJhbGciOiJIUzI1NiJ9.{}.c2ln": (LETTERS, 40), "MUNGE:AwQD{}:": (LETTERS + "+/", 60),
}  # fmt: skip
AROUND = (
    "{}", '"{}"', "('{}')", "token={}", "login failed with {} (401)", "Authorization: Bearer {}",
    "https://user:{}@host/x", "https://{}@host/x.git", "--token {}", "export HF_TOKEN={}", "a={};b=2", "key:{},",
)  # fmt: skip
# What only its name tells; the value may be anything.
NAMED = {
    "WANDB_API_KEY={}": (HEX, 40), "wandb login {}": (HEX, 40), "wandb: api key {}": (HEX, 40),
    "os.environ['WANDB_API_KEY'] = '{}'": (HEX, 40), "machine api.wandb.ai login user password {}": (HEX, 40),
    "aws_secret_access_key = {}": (LETTERS + "/+", 40), '"secretAccessKey":"{}"': (LETTERS, 40),
    "AccountKey={};EndpointSuffix=x": (LETTERS + "/+", 60), "password={}": (LETTERS, 9),
    'PASSWORD="ab {}"': (LETTERS, 8), "passwd: {}": (LETTERS, 8), "redis://:{}@h:6379": (LETTERS, 12),
    "postgres://u:{}@h/db": (LETTERS, 12), "curl -u user:{} https://x": (LETTERS, 10), "X-Api-Key: {}": (LETTERS, 30),
    "Authorization: Basic {}": (LETTERS + "=", 30), "Authorization: token {}": (LETTERS, 30),
    "Proxy-Authorization: Digest {}": (LETTERS, 30), "Cookie: session={}": (LETTERS, 30),
    "Set-Cookie: sid={}; Path=/": (LETTERS, 30), "?access_token={}&x=1": (LETTERS, 30),
    "https://b/x?sv=1&sig={}": (LETTERS, 40), "OPENAI_API_KEY is 9a{}": (LETTERS, 30), "token is 1z{}": (LETTERS, 30),
    "passphrase={}": (LETTERS, 12), "'api_key': '{}'": (LETTERS, 16),
    "-----BEGIN RSA PRIVATE KEY----- {}": (LETTERS + "+/", 64),
    "-----BEGIN OPENSSH PRIVATE KEY-----\\n{}\\n": (LETTERS + "+/", 70), "{}==": (LETTERS + "+/", 76),
    "db_pass=q7{}": (LETTERS, 10),
}  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, str]:
    """A line with a secret in it, and the secret."""
    if draw(st.booleans()):
        form, around = draw(st.sampled_from(sorted(TOKENS))), draw(st.sampled_from(AROUND))
        secret = draw(_of(*TOKENS[form]))
        return around.format(form.format(secret)), secret
    form = draw(st.sampled_from(sorted(NAMED)))
    secret = draw(_of(*NAMED[form]))
    return form.format(secret), secret


@settings(max_examples=examples(400), deadline=None)
@given(lines())
def test_secrets_of_any_form_are_hidden(line: tuple[str, str]) -> None:
    text, secret = line
    assert secret not in redact(text)
    assert secret[4:] not in redact(text)


@cache
def own_words() -> str:
    """What is said of a log without any secret: a drawn secret may be one of these words."""
    with TemporaryDirectory() as folder:
        line = "2025-01-01 10:00:00 RuntimeError: CUDA error: invalid device ordinal\nValueError: \nFutureWarning: "
        report = msgspec.json.encode(of(Path(folder), line)).decode()
        return report + CliRunner().invoke(diagnose_command, [folder], env=WIDE, standalone_mode=False).output


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines(), st.sampled_from([0, 200, 5000]))
@example(("passwd: interfac", "interfac"), 0)
@example(("--token hf_" + "q" * 9 + "Zr5" * 9, "q" * 9 + "Zr5" * 9), 5000)
@example(("Zr5+tQ8/w" * 8 + "==", "Zr5+tQ8/w" * 8), 0)
@example(("password=Zr5tQ8wx", "Zr5tQ8wx"), 0)
@example(("password=CUDAIPC00", "CUDAIPC00"), 0)
def test_secrets_never_reach_a_report(tmp_path: Path, line: tuple[str, str], pad: int) -> None:
    """In evidence, cause, story and harmless messages; on the terminal and as JSON; on long lines too."""
    text, secret = line
    assume(secret not in own_words())
    said = f"RuntimeError: CUDA error: invalid device ordinal {text}"
    assume(any(p.search(said) for p in CATALOGUE["invalid_device"].patterns))  # some words say that it is another error
    found = of(tmp_path, f"{'x ' * pad}2025-01-01 10:00:00 {said}\nValueError: {text}\nFutureWarning: {text}")
    assert "invalid_device" in {f.id for f in found.findings}
    assert secret not in msgspec.json.encode(found).decode()
    assert secret not in CliRunner().invoke(diagnose_command, [str(tmp_path)], env=WIDE, standalone_mode=False).output


def test_a_window_into_a_long_line_does_not_begin_within_a_secret(tmp_path: Path) -> None:
    """Only the surroundings of a match are looked at: a token that is cut there would no longer be known as one."""
    secret = "Zr5tQ8" * 12
    for gap in range(200, 320, 7):
        line = f"{'x ' * 4000}token=hf_{secret} {'y' * gap} CUDA error: invalid device ordinal {'x ' * 4000}"
        assert "Zr5tQ8Zr5" not in msgspec.json.encode(of(tmp_path, line)).decode()
