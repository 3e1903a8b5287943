"""``allranks watch``: live view of a run in the terminal, or as a page. Leaving it never ends the run."""

from __future__ import annotations

import hmac
import http.server
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import click

from allranks.cli.options import complete_runs, echo, root_option
from allranks.errors import EXIT_FAILED, EXIT_OK, AllranksError, EnvironmentNotAble

if TYPE_CHECKING:
    from rich.console import RenderableType

    from allranks.analysis.live import LiveState
    from allranks.rundir.paths import RunDir

LOOK_S = 1.0
PAGE_S = 5  # a page is made anew at most this often
SHOWN_RANKS = 16
BARS = "▁▂▃▄▅▆▇█"


@click.command("watch")
@click.argument("run", default="latest", shell_complete=complete_runs)
@click.option("--once", is_flag=True, help="Show the state once and return.")
@click.option("--web", is_flag=True, help="Serve the run's page on 127.0.0.1, with its charts growing.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of --web (default: a free one).")
@root_option
def watch_command(run: str, once: bool, web: bool, port: int | None, run_root: Path) -> int:
    """Show RUN live: loss, tokens/s and memory by rank, phase, warnings, time left. Ctrl-C leaves; the run goes on.

    Of a run that has ended it shows the last state. It works over SSH, and for a run that another process follows.
    """
    from allranks.rundir.paths import find_run

    folder = find_run(run, run_root)
    if web:
        return _serve(folder, port)
    watch = _Watch(folder)
    if once or not sys.stdout.isatty():
        return watch.show_once()
    return watch.follow()


class _Watch:
    """Reads a run and draws it."""

    def __init__(self, run: RunDir) -> None:
        from allranks.analysis.live import LiveState
        from allranks.rundir.events import EventTail
        from allranks.rundir.files import read_record
        from allranks.utils.text import finite_int

        self._run, self.state = run, LiveState()
        self._plan = read_record(run.plan)
        self._tail = EventTail(run, finite_int(self._plan.get("world_size")) or 1)
        self.status = "unknown"
        self.look(everything=True)

    def look(self, *, everything: bool = False) -> None:
        """Read new events, and whether the run still runs."""
        from allranks.launch.runs import running
        from allranks.rundir.paths import status_of

        for event in self._tail.rest() if everything else self._tail.new():
            self.state.take(event)
        alive = running(self._run)
        if not alive and self.status == "running":
            for event in self._tail.rest():
                self.state.take(event)
        self.status = status_of(self._run, alive=alive)

    def show_once(self) -> int:
        from allranks.cli.console import SafeConsole

        SafeConsole().print(self.view())
        return EXIT_OK if self.status in ("running", "succeeded") else EXIT_FAILED

    def follow(self) -> int:
        """Redraw until the run has ended."""
        from rich.live import Live

        from allranks.cli.console import SafeConsole

        console = SafeConsole()
        with Live(self.view(), console=console, auto_refresh=False, transient=False) as live:
            try:
                while self.status == "running":
                    time.sleep(LOOK_S)
                    self.look()
                    live.update(self.view(), refresh=True)
            except KeyboardInterrupt:
                live.stop()
                echo(f"left; the run goes on. End it with: allranks cancel {self._run.argument}", message=True)
                return EXIT_OK
        return EXIT_OK if self.status == "succeeded" else EXIT_FAILED

    def view(self) -> RenderableType:
        """Return everything to show, at most as wide as the terminal."""
        from rich.console import Group
        from rich.markup import escape
        from rich.text import Text

        state = self.state
        lines: list[RenderableType] = []
        strategy = self._plan.get("strategy") if self._plan.get("batch") else "own program"
        attempt = f", attempt {state.attempt}" if (state.attempt or 1) > 1 else ""
        title = f"[bold]{escape(self._run.name)}[/bold]  {self.status}{attempt}"
        lines.append(Text.from_markup(title, overflow="ellipsis"))
        lines.append(
            Text(f"{strategy}, {len(state.ranks)} of {self._plan.get('world_size')} ranks have started", "dim")
        )
        lines += _progress(state, running=self.status == "running")
        if state.ranks:
            lines.append(_rank_table(state, running=self.status == "running"))
        lines += [Text(f"! {note}", style="yellow", overflow="fold") for note in state.notes]
        if message := self._message():
            lines.append(Text(message, overflow="fold"))
        return Group(*lines)

    def _message(self) -> str:
        from allranks.rundir.files import read_record
        from allranks.utils.text import sanitize

        text = read_record(self._run.metrics).get("message") if self.status != "running" else None
        return sanitize(text) if text else ""


def _progress(state: LiveState, *, running: bool) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from allranks.utils.text import format_duration, format_loss, format_rate

    facts = []
    if state.step is not None:
        facts.append(f"step {state.step}" + (f"/{state.total_steps}" if state.total_steps else ""))
    if state.losses:
        facts.append(f"loss {format_loss(state.losses[-1][1])}")
    if state.held_out:
        facts.append(f"held out {format_loss(state.held_out[1])} (step {state.held_out[0]})")
    if state.tokens_per_s is not None:
        facts.append(f"{format_rate(state.tokens_per_s)} tokens/s")
    if state.checkpoint is not None:
        facts.append(f"checkpoint {state.checkpoint}")
    if state.started is not None:
        end = time.time() if running else state.last or state.started
        facts.append(f"{format_duration(end - state.started)} so far")
    if running and state.left_s is not None:
        facts.append(f"about {format_duration(state.left_s)} left")
    lines: list[RenderableType] = []
    if state.total_steps and state.step is not None:
        lines.append(Padding(ProgressBar(state.total_steps, min(state.step, state.total_steps)), 0))  # ends the line
    lines.append(Text("  ".join(facts) or "no rank has reported yet"))
    if len(state.losses) > 2:
        lines.append(_LossLine([loss for _, loss in state.losses]))
    return lines


class _LossLine:
    """The train loss over all steps as a line of bars, as wide as the terminal."""

    def __init__(self, losses: list[float | None]) -> None:
        self._losses = losses

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        width = max(min(options.max_width - 6, len(self._losses)), 1)
        groups = [
            self._losses[i * len(self._losses) // width : (i + 1) * len(self._losses) // width] for i in range(width)
        ]
        means = [sum(known) / len(known) if (known := [v for v in g if v is not None]) else None for g in groups]
        values = [mean for mean in means if mean is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        span = (high - low) or 1.0
        bars = "".join(" " if m is None else BARS[min(int((m - low) / span * len(BARS)), len(BARS) - 1)] for m in means)
        yield Text.assemble(("loss  ", "dim"), (bars, "cyan"), overflow="crop")


def _rank_table(state: LiveState, *, running: bool) -> RenderableType:
    from allranks.cli.console import FittedColumn, fitted_table
    from allranks.utils.text import NO_VALUE, format_bytes, format_duration, format_rate

    columns = [
        FittedColumn("rank", right=True),
        FittedColumn("host", fold_to=16, drop=3),
        FittedColumn("phase", fold_to=12),
        FittedColumn("step", right=True),
        FittedColumn("step time", right=True, drop=2),
        FittedColumn("tokens/s", right=True, drop=1),
        FittedColumn("memory", right=True, drop=4),
        FittedColumn("peak", right=True),
        FittedColumn("last event", right=True, drop=5),
    ]
    rows = []
    ranks = sorted(state.ranks.items())
    for rank, one in ranks[:SHOWN_RANKS]:
        silent = f"{format_duration(max(time.time() - one.seen, 0))} ago" if running and one.seen else NO_VALUE
        at = [one.host, one.phase, NO_VALUE if one.step is None else str(one.step)]
        speed = [format_duration(one.step_time_s), format_rate(one.tokens_per_s)]
        memory = [format_bytes(one.memory_bytes), format_bytes(one.peak_bytes)]
        rows.append([str(rank), *at, *speed, *memory, silent])
    more = f"{len(ranks) - SHOWN_RANKS} more ranks are not shown" if len(ranks) > SHOWN_RANKS else None
    table, _ = fitted_table(columns, rows, shutil.get_terminal_size().columns, caption=more, caption_justify="left")
    return table


def _serve(run: RunDir, port: int | None) -> int:
    """Serve the page of a run until Ctrl-C, to this machine only and only with the token."""
    token = secrets.token_urlsafe(24)
    page = _LivePage(run)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page. The host is checked so that another site's name cannot be pointed here."""
            parts, host = urlsplit(self.path), (self.headers.get("Host") or "").rpartition(":")[0]
            given = parse_qs(parts.query).get("token", [""])[0]
            allowed = host in ("127.0.0.1", "localhost") and hmac.compare_digest(given.encode(), token.encode())
            body, code = b"open the address that allranks watch has printed\n", 403
            if allowed:
                try:
                    body, code = page.html(), 200
                except AllranksError as error:  # a record is damaged, or not yet written
                    body, code, allowed = f"{error}\n".encode(), 503, False
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8" if allowed else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            if allowed and page.running:
                self.send_header("Refresh", str(PAGE_S))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no access log: it would hold the token."""

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port or 0), Handler)
    except OSError as error:
        raise EnvironmentNotAble(f"--port {port}: {error.strerror}; choose another") from None
    address = f"http://127.0.0.1:{server.server_address[1]}/?token={token}"
    echo(f"{run.name}: {address}\nCtrl-C ends this server; the run goes on.", message=True)
    with server:
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return EXIT_OK
    return EXIT_OK


class _LivePage:
    """The report of a run, made anew when it is asked for and older than `PAGE_S`."""

    def __init__(self, run: RunDir) -> None:
        from threading import Lock

        self._run, self._made, self._html, self.running = run, float("-inf"), b"", True
        self._lock = Lock()

    def html(self) -> bytes:
        from allranks.analysis.report.page import render
        from allranks.analysis.report.run_data import read_run_data
        from allranks.launch.outcome import current_metrics
        from allranks.launch.runs import running

        with self._lock:
            if time.monotonic() - self._made >= PAGE_S and (self.running or not self._html):
                self.running = running(self._run)
                metrics = current_metrics(self._run, alive=True) if self.running else None
                self._html = render(read_run_data(self._run, metrics)).encode()
                self._made = time.monotonic()
            return self._html
