"""The control channel: authentication, damaged and foreign peers, delivery, reconnection. Real sockets on loopback."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from unittest.mock import Mock

import msgspec
import pytest

from allranks.launch import channel_protocol
from allranks.launch.channel import CLOSED, HANDSHAKE_S, AgentLink, ChannelClient, ChannelServer, send_request
from allranks.launch.channel_protocol import ENDED, AgentReport, Endpoint, Orders
from allranks.launch.monitor.records import NodeEvidence
from tests.dist.harness import until


class Recorder:
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

    def request_checkpoint(self) -> None:
        self.requests.append(("checkpoint", ""))


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


@pytest.fixture
def client() -> Iterator[Callable[..., ChannelClient]]:
    clients: list[ChannelClient] = []

    def start(endpoint: Endpoint, node: int = 0, pid: int = 1) -> ChannelClient:
        clients.append(ChannelClient(endpoint, AgentReport(node=node, host=f"n{node}", pid=pid)))
        clients[-1].start()
        return clients[-1]

    yield start
    for one in clients:
        one.close()


Start = Callable[..., ChannelClient]


def test_reports_arrive_and_orders_come_back(hub: ChannelServer, recorder: Recorder, client: Start) -> None:
    agents = [client(hub.endpoint, n) for n in range(4)]
    until(lambda: len(hub.links) == 4)
    recorder.orders = Orders(stop="the time limit", interval_s=0.05)
    until(lambda: all(a.orders.stop == "the time limit" for a in agents))
    agents[2].publish(AgentReport(node=2, host="n2", pid=1, state=ENDED))
    assert agents[2].wait_delivered(20.0)
    assert hub.links[2].report.state == ENDED
    assert agents[2].silent_s < 5
    send_request(hub.endpoint, "stop", "allranks cancel")  # a person may ask for the end
    send_request(hub.endpoint, "checkpoint", "")  # or for a save
    assert recorder.requests == [("stop", "allranks cancel"), ("checkpoint", "")]
    for agent in agents:
        agent.close()
    until(lambda: all(link.closed == CLOSED for link in hub.links.values()))


def test_a_client_with_another_token_is_refused(
    hub: ChannelServer, client: Start, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = msgspec.structs.replace(hub.endpoint, token=channel_protocol.new_token())
    with pytest.raises((channel_protocol.ChannelError, OSError)):
        send_request(wrong, "kill", "an attack", timeout_s=5)
    client(wrong)
    until(lambda: "does not know the token" in caplog.text)
    assert not hub.links


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


def test_garbage_pickles_and_silence_do_no_harm(hub: ChannelServer, recorder: Recorder, client: Start) -> None:
    good = client(hub.endpoint, 1)
    until(lambda: 1 in hub.links)
    place = ("127.0.0.1", hub.endpoint.port)
    for data in (b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(os.system) * 40, b"\0" * 100_000, os.urandom(300)):
        with socket.create_connection(place, timeout=5) as stranger:
            stranger.sendall(data)
    silent = [socket.create_connection(place, timeout=5) for _ in range(300)]
    recorder.orders = Orders(stop="still here", interval_s=0.05)
    until(lambda: good.orders.stop == "still here")
    send_request(hub.endpoint, "stop", "allranks cancel", timeout_s=HANDSHAKE_S / 2)  # a stranger makes room for it
    for stranger in silent:
        stranger.close()
    assert set(hub.links) == {1}


def test_a_frame_that_is_forged_repeated_or_of_the_other_direction_ends_the_connection() -> None:
    token, sent = channel_protocol.new_token(), channel_protocol.new_challenge()
    answered = channel_protocol.answer_challenge(token, sent)
    channel_protocol.verify_server(token, sent, answered, channel_protocol.verify_answer(token, sent, answered))
    sealer, _ = channel_protocol.open_session(token, sent, answered, server=False)
    openers = [channel_protocol.open_session(token, sent, answered, server=True) for _ in range(4)]
    frame = sealer.seal(b"one")
    assert openers[0][1].feed(frame[:10]) == []
    assert openers[0][1].feed(frame[10:]) == [b"one"]
    forged = bytearray(sealer.seal(b"two"))
    forged[-1] ^= 1
    assert openers[1][1].feed(frame) == [b"one"]
    reflected = openers[2][0].seal(b"reflected")
    for (_, opener), data, why in (
        (openers[0], frame, "HMAC"),  # a replay
        (openers[1], bytes(forged), "HMAC"),
        (openers[2], reflected, "HMAC"),
        (openers[3], b"\xff" * 40, "announces"),
    ):
        with pytest.raises(channel_protocol.ChannelError, match=why):
            opener.feed(data)


def test_an_agent_reconnects_and_sends_its_evidence_again(recorder: Recorder, client: Start) -> None:
    first = ChannelServer(recorder, 1)
    first.start()
    agent = client(first.endpoint)
    until(lambda: first.links)
    first.close()
    until(lambda: agent.silent_s > 0.5)
    agent.send_evidence(NodeEvidence(node=0, host="n0", time=1.0, ranks=[]))
    second = ChannelServer(recorder, 1, port=first.endpoint.port)
    second._token = first.endpoint.token
    second.start()
    until(lambda: recorder.found and 0 in second.links)
    until(lambda: agent.silent_s < 0.5)
    assert agent.wait_delivered(20.0)
    agent.close()
    second.close()


def test_a_second_agent_of_the_same_node_is_refused(hub: ChannelServer, client: Start) -> None:
    client(hub.endpoint, 0, pid=10)
    until(lambda: 0 in hub.links)
    second = client(hub.endpoint, 0, pid=11)
    until(lambda: second.ever_connected)
    time.sleep(0.3)
    assert (hub.links[0].report.pid, hub.links[0].closed) == (10, "")


def test_an_unexpected_error_in_the_supervisor_does_not_end_the_channel(
    hub: ChannelServer, recorder: Recorder, client: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "tick", Mock(side_effect=ZeroDivisionError))
        agent = client(hub.endpoint)
        time.sleep(0.3)
    until(lambda: 0 in hub.links and agent.orders.interval_s == 0.05)


DRIVER = """
import sys, time
from allranks.launch.channel import ChannelServer
from tests.unit.test_channel import Recorder
hub = ChannelServer(Recorder(), 1); hub.start()
print(hub.endpoint.port, hub.endpoint.token, flush=True)
time.sleep(60)
"""


def test_a_stopped_driver_is_silence_and_a_killed_one_too(client: Start) -> None:
    """`silent_s` grows where the driver is there but does not answer, and where it is gone."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        agent = client(Endpoint(address="127.0.0.1", port=int(port), token=token))
        until(lambda: agent.ever_connected and agent.orders.interval_s == 0.05)
        process.send_signal(signal.SIGSTOP)
        until(lambda: agent.silent_s > 0.6)
        process.send_signal(signal.SIGCONT)
        until(lambda: agent.silent_s < 0.3)
        process.kill()
        until(lambda: agent.silent_s > 0.6)
    finally:
        process.kill()
        process.wait(10)
