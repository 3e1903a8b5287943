"""Send a message to a webhook when a run ends, fails or starts again (``observe.notify``). It never ends a run."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from allranks.launch.outcome import RunResult
from allranks.spec.records import RunSpec
from allranks.spec.validation import VARIABLE_PREFIX
from allranks.utils.machine import host_name
from allranks.utils.redaction import redact

TIMEOUT_S = 10.0
SLACK_HOST = "hooks.slack.com"


def notify(spec: RunSpec, result: RunResult, log: Callable[[str], object]) -> None:
    """Send what became of an attempt to the spec's webhook, if it has one; say in the log why it was not sent.

    The body is JSON: ``event`` (end, failure, restart), ``run``, ``folder``, ``status``, ``message``, ``attempt``,
    ``rank``, ``host``, ``steps``, ``train_loss``, ``eval_loss``, ``sent_by`` (host name) and ``text`` (one sentence).
    Slack gets only ``text``, the one field that its webhooks know.
    """
    if spec.observe.notify is None:
        return
    name = spec.observe.notify.removeprefix(VARIABLE_PREFIX)
    address = os.environ.get(name, "") if name != spec.observe.notify else name
    if not address.startswith(("https://", "http://")):
        log(f"observe.notify: nothing was sent: the variable {name} has no http(s) address on {host_name()}")
        return
    body = message(result)
    if urlsplit(address).hostname == SLACK_HOST:
        body = {"text": body["text"]}
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked
        address, json.dumps(body).encode(), {"Content-Type": "application/json", "User-Agent": "allranks"}
    )
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()  # noqa: S310
    except (OSError, ValueError) as error:  # also an HTTP status, and what no address may hold
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else getattr(error, "reason", error)
        log(f"observe.notify: the message could not be sent: {redact(str(reason))}")


def message(result: RunResult) -> dict[str, Any]:
    """Return the body of a notification."""
    again, metrics = result.restart, result.metrics
    restarts = again is not None and again.action == "restart"
    event = "restart" if restarts else "failure" if result.exit_code else "end"
    failure = metrics.get("failure") or {}
    losses = {"train_loss": metrics.get("train_loss_last"), "eval_loss": metrics.get("eval_loss")}
    text = f"{result.run}: {result.status}"
    if result.message:
        text += f". {result.message}"
    elif losses["eval_loss"] is not None:
        text += f", held-out loss {losses['eval_loss']:.4f}"
    if again is not None and restarts:
        text = f"{result.run} starts again. {again.message}; {again.reason}"
    return {
        "event": event,
        "run": result.run,
        "folder": result.folder,
        "status": result.status,
        "message": redact(result.message),
        "attempt": again.attempt if again is not None else metrics.get("attempts"),
        "rank": failure.get("rank"),
        "host": failure.get("host"),
        "steps": metrics.get("steps"),
        **losses,
        "sent_by": host_name(),
        "text": redact(text),
    }
