"""The control channel: authentication, damaged and foreign peers, delivery, reconnection. Real sockets on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec
import pytest

from allranks.launch import channel_protocol
from allranks.launch.channel import CLOSED, AgentLink, ChannelClient, ChannelServer, send_request
from allranks.launch.channel_protocol import ENDED, AgentReport, Endpoint, Orders
from allranks.launch.monitor.records import NodeEvidence

LIMIT_S = 20.0


class Recorder:
    """A supervisor that only records."""

    def __init__(self) -> None:
        self.orders = Orders(interval_s=0.05)
        self.found: list[NodeEvidence] = []
        self.requests: list[tuple[str, str]] = []

    def tick(self, links: Mapping[int, AgentLink], now: float) -> Orders:
        return self.orders

    def evidence(self, found: NodeEvidence) -> None:
        self.found.append(found)

    def request(self, order: str, reason: str) -> None:
        self.requests.append((order, reason))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def hub(recorder: Recorder) -> Iterator[ChannelServer]:
    hub = ChannelServer(recorder, 4)
    hub.start()
    yield hub
    hub.close()
    assert not hub.is_alive()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def client(hub: ChannelServer, node: int = 0, pid: int = 1) -> ChannelClient:
    found = ChannelClient(hub.endpoint, AgentReport(node=node, host=f"n{node}", pid=pid))
    found.start()
    return found


def test_reports_arrive_and_orders_come_back(hub: ChannelServer, recorder: Recorder) -> None:
    agents = [client(hub, n) for n in range(4)]
    until(lambda: len(hub.links) == 4)
    recorder.orders = Orders(stop="the time limit", interval_s=0.05)
    until(lambda: all(a.orders.stop == "the time limit" for a in agents))
    agents[2].publish(AgentReport(node=2, host="n2", pid=1, state=ENDED))
    assert agents[2].wait_delivered(LIMIT_S)
    assert hub.links[2].report.state == ENDED
    assert agents[2].silent_s < 5
    for agent in agents:
        agent.close()
    until(lambda: all(link.closed == CLOSED for link in hub.links.values()))


def test_a_client_with_another_token_is_refused(hub: ChannelServer, caplog: pytest.LogCaptureFixture) -> None:
    wrong = msgspec.structs.replace(hub.endpoint, token=channel_protocol.new_token())
    with pytest.raises((channel_protocol.ChannelError, OSError)):
        send_request(wrong, "kill", "an attack", timeout_s=5)
    stranger = ChannelClient(wrong, AgentReport(node=0, host="evil", pid=1))
    stranger.start()
    until(lambda: "does not know the token" in caplog.text)
    assert not hub.links
    stranger.close()


def test_a_server_that_does_not_know_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(channel_protocol.new_challenge())
                peer.recv(channel_protocol.ANSWER_BYTES)
                peer.sendall(b"x" * channel_protocol.MAC_BYTES)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = Endpoint(address="127.0.0.1", port=server.getsockname()[1], token=channel_protocol.new_token())
        with pytest.raises(channel_protocol.ChannelError, match="does not know the token"):
            send_request(endpoint, "kill", "x", timeout_s=5)
        thread.join(5)


def test_garbage_pickles_and_silence_do_no_harm(hub: ChannelServer, recorder: Recorder) -> None:
    import pickle

    good = client(hub, 1)
    until(lambda: 1 in hub.links)
    for data in (b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(os.system) * 40, b"\0" * 100_000, os.urandom(300)):
        with socket.create_connection(("127.0.0.1", hub.endpoint.port), timeout=5) as stranger:
            stranger.sendall(data)
    silent = [socket.create_connection(("127.0.0.1", hub.endpoint.port), timeout=5) for _ in range(300)]
    recorder.orders = Orders(stop="still here", interval_s=0.05)
    until(lambda: good.orders.stop == "still here")
    for stranger in silent:
        stranger.close()
    assert set(hub.links) == {1}
    good.close()


def test_a_forged_or_repeated_frame_ends_the_connection() -> None:
    token, sent = channel_protocol.new_token(), channel_protocol.new_challenge()
    answered = channel_protocol.answer_challenge(token, sent)
    channel_protocol.verify_server(token, sent, answered, channel_protocol.verify_answer(token, sent, answered))
    sealer, _ = channel_protocol.open_session(token, sent, answered, server=False)
    _, opener = channel_protocol.open_session(token, sent, answered, server=True)
    frame = sealer.seal(b"one")
    assert opener.feed(frame[:10]) == []
    assert opener.feed(frame[10:]) == [b"one"]
    with pytest.raises(channel_protocol.ChannelError, match="HMAC"):
        opener.feed(frame)  # a replay
    second = bytearray(sealer.seal(b"two"))
    second[-1] ^= 1
    _, opener = channel_protocol.open_session(token, sent, answered, server=True)
    opener.feed(frame)
    with pytest.raises(channel_protocol.ChannelError, match="HMAC"):
        opener.feed(bytes(second))
    with pytest.raises(channel_protocol.ChannelError, match="announces"):
        channel_protocol.open_session(token, sent, answered, server=True)[1].feed(b"\xff" * 40)


def test_frames_of_the_other_direction_are_not_accepted() -> None:
    token, sent = channel_protocol.new_token(), channel_protocol.new_challenge()
    answered = channel_protocol.answer_challenge(token, sent)
    mine, _ = channel_protocol.open_session(token, sent, answered, server=True)
    _, opener = channel_protocol.open_session(token, sent, answered, server=True)
    with pytest.raises(channel_protocol.ChannelError, match="HMAC"):
        opener.feed(mine.seal(b"reflected"))


def test_an_agent_reconnects_and_sends_its_evidence_again(recorder: Recorder) -> None:
    first = ChannelServer(recorder, 1)
    first.start()
    agent = client(first)
    until(lambda: first.links)
    first.close()
    until(lambda: agent.silent_s > 0.5)
    agent.send_evidence(NodeEvidence(node=0, host="n0", time=1.0, ranks=[]))
    second = ChannelServer(recorder, 1, port=first.endpoint.port)
    second._token = first.endpoint.token
    second.start()
    until(lambda: recorder.found and 0 in second.links)
    until(lambda: agent.silent_s < 0.5)
    assert agent.wait_delivered(LIMIT_S)
    agent.close()
    second.close()


def test_a_second_agent_of_the_same_node_is_refused(hub: ChannelServer) -> None:
    first = client(hub, 0, pid=10)
    until(lambda: 0 in hub.links)
    second = client(hub, 0, pid=11)
    until(lambda: second.ever_connected)
    time.sleep(0.3)
    assert hub.links[0].report.pid == 10
    assert hub.links[0].closed == ""
    first.close()
    second.close()


def test_a_person_can_ask_for_the_end(hub: ChannelServer, recorder: Recorder) -> None:
    send_request(hub.endpoint, "stop", "allranks cancel")
    assert recorder.requests == [("stop", "allranks cancel")]


def test_an_unexpected_error_in_the_supervisor_does_not_end_the_channel(hub: ChannelServer, recorder: Recorder) -> None:
    def fail(links: Mapping[int, AgentLink], now: float) -> Orders:
        raise ZeroDivisionError

    good, recorder.tick = recorder.tick, fail  # type: ignore[method-assign]
    agent = client(hub)
    time.sleep(0.3)
    recorder.tick = good  # type: ignore[method-assign]
    until(lambda: 0 in hub.links and agent.orders.interval_s == 0.05)
    agent.close()


def test_a_stopped_driver_is_silence_and_a_killed_one_too() -> None:
    """`silent_s` grows where the driver is there but does not answer, and where it is gone."""
    code = (
        "import sys, time\n"
        "from allranks.launch.channel import ChannelServer\n"
        "from tests.unit.test_channel import Recorder\n"
        "hub = ChannelServer(Recorder(), 1); hub.start()\n"
        "print(hub.endpoint.port, hub.endpoint.token, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        agent = ChannelClient(
            Endpoint(address="127.0.0.1", port=int(port), token=token), AgentReport(node=0, host="a", pid=1)
        )
        agent.start()
        until(lambda: agent.ever_connected and agent.orders.interval_s == 0.05)
        process.send_signal(19)
        until(lambda: agent.silent_s > 0.6)
        process.send_signal(18)
        until(lambda: agent.silent_s < 0.3)
        process.kill()
        until(lambda: agent.silent_s > 0.6)
        agent.close()
    finally:
        process.kill()
        process.wait(10)
