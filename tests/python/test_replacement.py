"""A process whose device is lost is replaced by a new one that keeps its sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support import Server, fp32_body, infer_url, serve, wait_for

FAULTS = 3
REPLACEMENTS = int(os.environ.get("ATOLL_TEST_REPLACEMENTS", "3"))


def replaced(server: Server, times: int) -> bool:
    return server.log_text().count("serving again in a new process") >= times


def inject(server: Server, fault: str) -> None:
    assert server.process is not None and server.process.stdin is not None
    server.process.stdin.write(f"inject {fault}\n".encode())
    server.process.stdin.flush()


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ["--model-control-mode", "explicit", "--load-model", "slow"]
    flags += ["--until-input-ends", "--inject-faults"]
    running = serve(repository, tmp_path / "log", *flags)
    yield running
    if running.process is not None:
        running.assert_alive()
        running.stop()


class Client(threading.Thread):
    """Sends until it is stopped; every request gets one reply, right or 503."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.stopped = server, threading.Event()
        self.right, self.refused, self.wrong = 0, 0, []

    def run(self) -> None:
        session = requests.Session()
        while not self.stopped.is_set():
            url = infer_url(self.server, "identity_fp32")
            try:
                reply = session.post(url, json=fp32_body(4, 2), timeout=30)
            except requests.ConnectionError as error:
                # A connection that was closed while it was idle takes no request.
                if "Connection aborted" not in str(error):
                    self.wrong.append(str(error))
                continue
            if reply.status_code == 200 and reply.json()["outputs"][0]["data"] == [4, 2]:
                self.right += 1
            elif reply.status_code == 503 and "Retry-After" in reply.headers:
                self.refused += 1
            else:
                self.wrong.append(f"{reply.status_code} {reply.text[:200]}")
            time.sleep(0.002)


def test_a_server_without_a_device_serves_again(server: Server) -> None:
    """Models that were loaded on request are served again, counters of faults go on, and no request
    gets anything but its answer or 503."""
    assert requests.post(f"{server.url}/v2/repository/models/identity_fp32/load").ok
    assert server.process is not None
    process = server.process.pid
    clients = [Client(server) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        for number in range(FAULTS):
            before = [client.right for client in clients]
            inject(server, "lost")
            assert wait_for(lambda number=number: replaced(server, number + 1))
            both = list(zip(clients, before, strict=True))
            assert wait_for(lambda both=both: all(c.right > b + 5 for c, b in both))
    finally:
        for client in clients:
            client.stopped.set()
        for client in clients:
            client.join()
    assert [client.wrong for client in clients] == [[], []]
    assert server.process.poll() is None and server.process.pid == process
    index = requests.post(f"{server.url}/v2/repository/index", json={"ready": True}).json()
    assert {entry["name"] for entry in index} == {"slow", "identity_fp32"}
    metrics = requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics").text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("atoll_device_") and "{" in line
    }
    assert values["atoll_device_faults_total"] == FAULTS
    assert values["atoll_device_recoveries_total"] == FAULTS
    assert values["atoll_device_out_of_service_seconds_total"] > 0


def test_requests_of_a_lost_device_are_answered(server: Server) -> None:
    """A request that runs when the device is lost gets 503 and the time to try again."""
    replies: list[requests.Response] = []
    body = fp32_body(*range(64))
    send = lambda: replies.append(requests.post(infer_url(server, "slow"), json=body, timeout=60))
    # If the machine stalls, a request may be done before the fault.
    for number in range(5):
        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.05)
        inject(server, "lost")
        thread.join()
        assert wait_for(lambda number=number: replaced(server, number + 1))
        if replies[-1].status_code != 200:
            break
    assert replies[-1].status_code == 503, replies[-1].text
    assert int(replies[-1].headers["Retry-After"]) >= 1


def test_a_signal_replaces_the_process(server: Server) -> None:
    """SIGUSR2 starts the program again on the same sockets; nothing in flight is cut off."""
    assert server.process is not None
    replies: list[requests.Response] = []
    body = fp32_body(*range(16))
    send = lambda: replies.append(requests.post(infer_url(server, "slow"), json=body, timeout=60))
    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.05)
    server.process.send_signal(signal.SIGUSR2)
    assert wait_for(lambda: replaced(server, 1))
    thread.join()
    assert replies[0].status_code == 200, replies[0].text
    assert requests.post(infer_url(server, "slow"), json=fp32_body(1)).ok


class Socket(threading.Thread):
    """Sends one request after the other, without ever repeating one: on a connection of its own
    each, or on one for as long as the server keeps it."""

    def __init__(self, server: Server, keeps: bool) -> None:
        super().__init__()
        self.server, self.keeps, self.stopped = server, keeps, threading.Event()
        self.right, self.wrong = 0, []
        self.body = json.dumps(fp32_body(4, 2)).encode()

    def run(self) -> None:
        connection = self.connect()
        while not self.stopped.is_set():
            if not self.keeps or is_readable(connection):
                # What the server has closed takes no request.
                connection.close()
            try:
                connection.request("POST", "/v2/models/identity_fp32/infer", self.body)
                reply = connection.getresponse()
                text = reply.read()
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(repr(error))
                connection.close()
                continue
            if reply.status == 200 and json.loads(text)["outputs"][0]["data"] == [4, 2]:
                self.right += 1
            elif reply.status == 503 and b"is loading" in text and "Retry-After" in reply.headers:
                # The new process answers before its models are there.
                time.sleep(0.05)
            else:
                self.wrong.append(f"{reply.status} {text[:200]!r}")
            time.sleep(0.001)

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.server.http.split(":")
        return http.client.HTTPConnection(host, int(port), timeout=60)


def is_readable(connection: http.client.HTTPConnection) -> bool:
    return bool(connection.sock and select.select([connection.sock], [], [], 0)[0])


@contextlib.contextmanager
def busy_machine(count: int) -> Iterator[None]:
    """Other processes that compute all the time."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_no_request_is_lost_while_the_process_is_replaced(server: Server) -> None:
    """Whatever has reached a socket is answered, by the old process or by the new one."""
    assert requests.post(f"{server.url}/v2/repository/models/identity_fp32/load").ok
    assert server.process is not None
    clients = [Socket(server, keeps=number % 2 == 0) for number in range(6)]
    with busy_machine(os.cpu_count() or 1):
        for client in clients:
            client.start()
        try:
            for number in range(REPLACEMENTS):
                before = [client.right for client in clients]
                server.process.send_signal(signal.SIGUSR2)
                assert wait_for(lambda number=number: replaced(server, number + 1))
                pairs = list(zip(clients, before, strict=True))
                assert wait_for(lambda pairs=pairs: all(c.right > b for c, b in pairs))
        finally:
            for client in clients:
                client.stopped.set()
            for client in clients:
                client.join()
    assert [client.wrong for client in clients] == [[]] * len(clients)


def test_a_lost_device_stops_at_the_end_of_input(server: Server) -> None:
    """The new process still ends with its input."""
    inject(server, "lost")
    assert wait_for(lambda: replaced(server, 1))
    assert server.process is not None and server.process.stdin is not None
    server.process.stdin.close()
    assert server.wait() == 0
    server.process = None
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{server.url}/v2/health/live", timeout=5)
