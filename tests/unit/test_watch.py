"""The live view: its state from events, and the page that only this machine gets, with the token."""

from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from allranks.analysis.live import LiveState
from tests.unit.report_runs import complete_run, served
from tests.unit.test_run_status import verb


def step(rank: int, number: int, **more: object) -> dict:
    usual = {"event": "step", "rank": rank, "time": float(number), "step": number, "step_time_s": 0.5, "tokens": 100}
    return usual | more


def test_the_state_follows_the_events() -> None:
    state = LiveState()
    state.take({"event": "start", "rank": 0, "time": 0.0, "host": "n1", "attempt": 1})
    state.take({"event": "phase", "rank": 0, "time": 0.0, "name": "train", "total_steps": 10})
    for number in (1, 2, 3):
        for rank in (0, 1):
            state.take(step(rank, number, loss=4.0 - number))
    assert (state.step, state.total_steps, state.tokens_per_s, state.left_s) == (3, 10, 400.0, 3.5)
    state.take({"event": "start", "rank": 0, "time": 9.0, "host": "n1", "attempt": 2})
    assert state.ranks[0].phase == "join" and state.ranks[1].phase == "", "the ranks of attempt 1 have ended"
    state.take(step(0, 3, loss=0.5))
    state.take(step(0, 3, loss=None, tokens="x"))
    state.take({"event": "step", "rank": "x"})
    assert [n for n, _ in state.losses] == [1, 2, 3] and state.losses[-1][1] is None


def test_a_run_that_has_ended_is_shown_once(tmp_path: Path) -> None:
    code, shown = verb("watch", str(complete_run(tmp_path, "demo").root))
    assert code == 0 and "demo  succeeded" in shown and "step 10/10" in shown
    assert verb("watch", "nope", "--run-root", str(tmp_path))[0] == 2


def test_the_page_needs_the_token_and_the_name_of_this_machine(tmp_path: Path) -> None:
    with served(complete_run(tmp_path, "demo")) as address:
        parts = urlsplit(address)
        place = f"{parts.path}?{parts.query}"
        asked = {(place, parts.netloc): 200, (place[:-1], parts.netloc): 403, (place, "example.org:80"): 403}
        for (path, host), code in asked.items():
            connection = HTTPConnection(parts.netloc, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            assert answer.status == code and (b"demo" in answer.read()) == (code == 200)
            assert answer.headers["Refresh"] is None, "a run that has ended does not grow"
