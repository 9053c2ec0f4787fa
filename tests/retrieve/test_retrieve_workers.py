"""The processes of a server with workers: each may go without the others. `test_retrieve_serve` asks workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from serving import SRC, X, made, run_server

from tigon.retrieve import Index
from tigon.retrieve.filters import attributes
from tigon.retrieve.server import frames, requests, run, worker, worker_pool
from tigon.retrieve.server.service import Limits, Service

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are counted in /proc")


def test_frames_come_whole_out_of_any_pieces():
    draw = np.random.default_rng(0)
    sent = [("a",), ("b", 1, [2, 3]), ("c", draw.bytes(3000), None)]
    whole = b"".join(frames.pack_frame(*call) for call in sent)
    for size in (1, 5, 16, 17, 100, 10_000):
        reader, received = frames.FrameReader(), []
        for start in range(0, len(whole), size):
            received += reader.feed(whole[start : start + size])
        assert received == sent


@pytest.mark.parametrize("dtype", [np.float16, bool])
def test_arrays_and_tables_go_through_a_frame(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    table = {"a": list(range(40_000)), "b": [None, ["x", "\ud800"], 2**70, 1.5], "c": []}
    call = frames.encode_arrays({"x": array, "texts": ["a"]}), frames.split_table(table), frames.split_table(None)
    ((features, pieces, nothing),) = frames.FrameReader().feed(frames.pack_frame(*call))
    features = frames.decode_arrays(features)
    assert features["texts"] == ["a"]
    assert features["x"].dtype == dtype
    assert np.array_equal(features["x"], array)
    assert (frames.join_table(pieces), frames.join_table(nothing)) == (table, None)


def test_string_ids_go_through_a_frame():
    hits = made(strings=True).search(torch.ones(2, len(X[0])), 200, "part < 30")
    arrays = hits.scores.numpy(), hits._keys.numpy(), hits.exact.numpy()
    result = worker_pool.MergedSearch.convert(None, *arrays, hits._ids)
    ((*arrays, names),) = frames.FrameReader().feed(frames.pack_frame(*result))
    ids = worker._decode_strings(frames.decode_arrays(arrays[1]), names)
    assert ids[0, -1] is None
    assert np.array_equal(ids, hits.ids)


def test_what_a_worker_knows_of_the_operator_is_so():
    from tigon.retrieve.scan import MOST

    assert requests.MAX_K == MOST
    assert attributes.MOST_FILTERS >= requests.MAX_FILTERS


def test_a_worker_has_no_torch():
    code = "import sys, tigon.retrieve.server.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SRC}, stdout=subprocess.PIPE)
    loaded = {name.partition(".")[0] for name in done.stdout.decode().split()}
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "pyarrow"}


def list_workers(pid=None):
    pid = pid or os.getpid()
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if "server.worker" in Path(f"/proc/{child}/cmdline").read_text()]


@linux
def test_a_worker_that_is_killed_is_started_again(tmp_path, capfd):
    made().save(tmp_path / "index")
    service = Service(Index.open(tmp_path / "index"), key="k")

    def act(port):
        url = f"http://127.0.0.1:{port}"
        clients = [httpx.Client(base_url=url, headers={"x-api-key": "k"}, timeout=60) for _ in range(8)]
        # The system deals out connections: of eight, both workers have some, but once in 128 times.
        search = {"vectors": X * 4, "k": 3}
        wanted = [client.post("/search", json=search).json()["ids"] for client in clients]
        assert all(ids == wanted[0] for ids in wanted)
        assert httpx.post(f"{url}/search", json=search).status_code == 401
        with socket.create_connection(("127.0.0.1", port)) as leaver:  # a client that does not wait for its answer
            body = json.dumps(search).encode()
            head = b"POST /search HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: %d\r\n\r\n" % len(body)
            leaver.sendall(head + body)
        first = list_workers()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        os.kill(first[1], signal.SIGTERM)  # as where the whole group gets the signal: workers obey the index process
        end = time.monotonic() + 20
        while len(set(list_workers()) - {first[0]}) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        answered = 0
        for client in clients:
            try:
                answered += client.post("/search", json=search).json()["ids"] == wanted[0]
            except httpx.HTTPError:  # its worker was killed; the next connection is had again
                assert client.post("/search", json=search).json()["ids"] == wanted[0]
            client.close()
        assert answered >= 1
        table = {"part": [1], "kind": ["late"]}
        late = {"ids": [5000], "vectors": X, "table": table}
        assert httpx.post(f"{url}/upsert", json=late, headers={"x-api-key": "k"}).status_code == 200

    run_server(service, act, workers=2)
    assert "exited with status -9, and is restarted" in capfd.readouterr().err
    again = Index.open(tmp_path / "index")
    assert 5000 in again
    again.close()


@linux
def test_a_worker_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(worker_pool, "PATIENCE", 0.1)
    stopped = []

    def act(port):
        stopped.extend(list_workers())
        os.kill(stopped[0], signal.SIGSTOP)

    assert run_server(Service(made()), act, workers=2, grace=0.0) < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in stopped)


def test_a_worker_ends_with_the_process_of_the_index():
    (bound,) = run.bind_sockets("127.0.0.1", 0, 1)
    here, there = socket.socketpair()
    with bound, here, there:
        arguments = map(str, (there.fileno(), bound.fileno(), 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "tigon.retrieve.server.worker", *arguments], env=os.environ | {"PYTHONPATH": SRC},
            pass_fds=(there.fileno(), bound.fileno()), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        there.close()
        service = Service(made())
        hello = tuple(service.info), None, tuple(service.limits), None, 1
        here.sendall(frames.pack_frame("hello", *hello))
        service.close()
        assert list(frames.FrameReader().feed(here.recv(1000))) == [("ready",)]
        process.send_signal(signal.SIGTERM)
        assert process.poll() is None
    said = process.communicate(timeout=30)[1]
    assert said == "tigon: retrieve serve: the index process has exited, and the workers exit with it\n"
    assert process.returncode == 1


def test_a_port_is_had_by_one_server():
    for count in (1, 2):
        sockets = run.bind_sockets("127.0.0.1", 0, count)
        port = sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in sockets} == {port}
        for other in (1, 2):
            with pytest.raises(OSError, match="in use"):
                run.bind_sockets("127.0.0.1", port, other)
        for each in sockets:
            each.close()


@linux
def test_workers_that_do_not_start_end_the_server(monkeypatch, capfd):
    def start(port):
        monkeypatch.setattr(worker_pool.sys, "executable", "/bin/false")
        os.kill(list_workers()[0], signal.SIGKILL)

    with pytest.raises(worker_pool.WorkerError, match="exited 3 times right after its start"):
        run.serve(Service(made()), "127.0.0.1", 0, started=start, workers=2)
    assert capfd.readouterr().err.count("is restarted") in (2, 3)  # by how long it lived
    with pytest.raises(worker_pool.WorkerError, match="a worker exited before it was ready"):
        run.serve(Service(made()), "127.0.0.1", 0, workers=2)


@linux
def test_metrics_are_of_all_workers():
    def act(port):
        url = f"http://127.0.0.1:{port}"
        clients = [httpx.Client(base_url=url, timeout=60) for _ in range(6)]
        for client in clients:  # the system deals out their connections
            assert client.post("/search", json={"vectors": X * 2}).status_code == 200
        clients[2].post("/search", content="{")
        for already in range(2):  # an earlier request of /metrics counts, too
            values = dict(line.rsplit(" ", 1) for line in clients[already].get("/metrics").text.splitlines())
            assert float(values['tigon_requests_total{path="/search",status="200"}']) == 6
            assert float(values['tigon_requests_total{path="/search",status="422"}']) == 1
            assert float(values['tigon_request_seconds_count{path="/search"}']) == 7
            assert float(values["tigon_queries_total"]) == 12
            assert float(values.get('tigon_requests_total{path="/metrics",status="200"}', 0)) == already
        for client in clients:
            client.close()

    run_server(Service(made(), limits=Limits()), act, workers=3)
