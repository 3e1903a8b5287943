"""Run the preflight's programs on a host for ``allranks doctor``; started manually, starts no ranks.

``python -m allranks.launch.host_agent CHANNEL --node N --name HOST``; CHANNEL is the file with the address of the doctor. Only the
programs of `nodes.probes` are run, as they are on this host. No torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from allranks.errors import EXIT_ENVIRONMENT, EXIT_OK
from allranks.launch.channel import ChannelClient
from allranks.launch.channel_protocol import ENDED, AgentReport, Endpoint
from allranks.launch.host_nodes import ProbeAnswers
from allranks.rundir.files import read_json
from allranks.utils.machine import host_name

POLL_S = 0.05
REACH_S = 60.0
KEEP_S = 20.0  # without the doctor
DELIVER_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="allranks.launch.host_agent")
    parser.add_argument("channel", type=Path)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    found = read_json(args.channel)
    if found is None:
        sys.exit(
            f"allranks: {args.channel} is missing or unreadable on {host_name()}: the doctor has ended, or its run_root is not a folder that "
            "all hosts share"
        )
    sys.exit(serve(msgspec.convert(found, Endpoint), args.node, args.name))


def serve(endpoint: Endpoint, node: int, name: str) -> int:
    """Answer until the doctor has finished; return the exit code."""
    report = AgentReport(node=node, host=name, machine=host_name(), pid=os.getpid())
    channel = ChannelClient(endpoint, report)
    channel.start()
    say = f"{name}: the doctor at {channel.where}"
    answers, code = ProbeAnswers(node, name), EXIT_OK
    while not channel.orders.end:
        if (answered := answers.take(channel.orders.probe)) is not None:
            report = msgspec.structs.replace(report, answer=answered)
            channel.publish(report)
        if channel.silent_s > (KEEP_S if channel.ever_connected else REACH_S):
            what = "no longer answers" if channel.ever_connected else f"was not reached within {REACH_S:.0f} s"
            sys.stderr.write(f"allranks: {say} {what}: {channel.why}\n")
            code = EXIT_ENVIRONMENT
            break
        time.sleep(POLL_S)
    if code == EXIT_OK:
        channel.publish(msgspec.structs.replace(report, state=ENDED))
        channel.wait_delivered(DELIVER_S)
        sys.stderr.write(f"{say} has what it asked for\n")
    channel.close()
    return code


if __name__ == "__main__":
    main()
