"""Messages to a webhook: what they hold, who may get them, and that none of them ends a run."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from allranks.errors import SpecError
from allranks.launch.notification import message, notify
from allranks.launch.outcome import RunResult
from allranks.spec import parse_spec

MODEL = {"model": {"name": "tiny:mistral"}, "data": {"source": "builtin:instructions"}}


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict]]]:
    bodies: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "refuse" in self.path else 200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


def result(**fields: object) -> RunResult:
    metrics = {"steps": 7, "eval_loss": 1.5, "failure": {"rank": 3, "host": "n2"}}
    known = {"run": "demo", "folder": "runs/demo", "status": "failed", "exit_code": 1, "message": "rank 3 on n2 failed"}
    return RunResult(**{**known, "metrics": metrics, **fields})  # type: ignore[arg-type]


def test_a_failure_is_sent_and_a_problem_with_it_only_logged(hook: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    address, bodies = hook
    log: list[str] = []
    notify(parse_spec({**MODEL, "observe": {"notify": address}}), result(), log.append)
    assert not log and (bodies[0]["event"], bodies[0]["rank"], bodies[0]["host"]) == ("failure", 3, "n2")
    assert bodies[0]["text"] == "demo: failed. rank 3 on n2 failed"
    monkeypatch.setenv("HOOK", f"{address}/refuse")
    notify(parse_spec({**MODEL, "observe": {"notify": "env:HOOK"}}), result(), log.append)
    monkeypatch.delenv("HOOK")
    notify(parse_spec({**MODEL, "observe": {"notify": "env:HOOK"}}), result(), log.append)
    notify(parse_spec({**MODEL, "observe": {"notify": "http://127.0.0.1:1"}}), result(), log.append)
    assert ["HTTP 500" in log[0], "variable HOOK" in log[1], "refused" in log[2]] == [True] * 3


def test_an_end_names_its_loss_and_no_message_holds_a_secret() -> None:
    done = message(result(status="succeeded", exit_code=0, message=""))
    assert (done["event"], done["text"]) == ("end", "demo: succeeded, held-out loss 1.5000")
    assert "hunter2" not in json.dumps(message(result(message="login with --password hunter2 failed")))


@pytest.mark.parametrize(
    "wrong",
    [
        "example.org",
        "env:",
        "ftp://x/y",
        "https://hooks.slack.com/services/T01234567/B01234567/abcdefghijklmnopqrstuvwx",
    ],
)
def test_an_address_with_a_secret_or_of_another_kind_is_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"observe\.notify") as error:
        parse_spec({**MODEL, "observe": {"notify": wrong}})
    assert "abcdefghij" not in str(error.value)
