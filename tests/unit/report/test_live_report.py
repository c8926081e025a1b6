"""Tests of the live report over real HTTP: access, contents, how often files are read, start and end."""

import base64
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from async_flowrl.config.listening import ServeError
from async_flowrl.observability.run_directory import RunDirectory, is_held
from async_flowrl.report import live, live_document
from async_flowrl.report.command import main
from async_flowrl.report.live import Access, Server, listening, serve
from async_flowrl.report.live_document import LiveDocument, begun
from async_flowrl.report.live_files import open_picture

ROOT = Path(__file__).parents[3]


def write_steps(folder: Path, count: int) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward/mean": step / 10, "images": 4}) + "\n" for step in range(count))
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps with one picture."""
    folder = tmp_path / "run"
    (folder / "images/step_000000").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: run\ntotal_steps: 9\n")
    write_steps(folder, 3)
    Image.fromarray(np.full((4, 4, 3), 9, dtype=np.uint8)).save(folder / "images/step_000000/000_0.png")
    return folder


class Client:
    """Asks a server in a thread of this process."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., Client]]:
    servers: list[Server] = []

    def start(folder: Path, access: Access | None = None, **options: Any) -> Client:
        server = listening(("127.0.0.1", 0), LiveDocument([folder], **options), access or Access())
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return Client(server)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_page_its_document_and_its_pictures(run: Path, serving: Callable[..., Client]) -> None:
    client = serving(run)
    status, headers, page = client.ask("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8" and b"uPlot" in page
    status, headers, content = client.ask("/document.json")
    assert status == 200 and json.loads(content)["runs"][0]["name"] == "run"
    status, headers, picture = client.ask("/images/0/step_000000/000_0.png")
    assert (status, headers["Content-Type"]) == (200, "image/png")
    assert picture == (run / "images/step_000000/000_0.png").read_bytes()
    assert client.ask("/favicon.ico")[0] == 204
    assert client.ask("/config.yaml")[0] == client.ask("/nothing")[0] == 404


@pytest.mark.parametrize("path", ["/", "/document.json", "/images/0/step_000000/000_0.png"])
def test_what_the_browser_has_is_not_sent_again(run: Path, serving: Callable[..., Client], path: str) -> None:
    client = serving(run)
    _, headers, content = client.ask(path)
    assert content and "Access-Control-Allow-Origin" not in headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["X-Frame-Options"] == "DENY"
    assert client.ask(path, If_None_Match=headers["ETag"])[0::2] == (304, b"")
    assert client.ask(path, If_None_Match='"another"')[0::2] == (200, content)
    status, head, nothing = client.ask(path, "HEAD")
    assert (status, nothing, head["Content-Length"]) == (200, b"", str(len(content)))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:9000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8765", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(
    run: Path, serving: Callable[..., Client], host: str, status: int
) -> None:
    client = serving(run)
    for path in ("/", "/document.json", "/images/0/step_000000/000_0.png"):
        assert client.ask(path, Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(run: Path, serving: Callable[..., Client], method: str) -> None:
    status, headers, _ = serving(run).ask("/document.json", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "below",
    [
        "../config.yaml",
        "step_000000/../../config.yaml",
        "step_000000/../../secret.png",
        "%2e%2e/secret.png",
        "..%2fsecret.png",
        "/etc/passwd",
        "step_000000//000_0.png",
        "step_000000/.hidden.png",
        "step_000000/notes.txt",
        "step_000000/link.png",
        "linked/secret.png",
        "step_000000/pipe.png",
        "step_000000/folder.png",
        "step_000000/000_0.png%00",
        "step_000000\\..\\secret.png",
        "",
    ],
)
def test_only_pictures_below_images_and_no_links(run: Path, serving: Callable[..., Client], below: str) -> None:
    folder = run / "images/step_000000"
    (run / "secret.png").write_bytes(b"secret")
    (folder / ".hidden.png").write_bytes(b"secret")
    (folder / "notes.txt").write_bytes(b"secret")
    (folder / "link.png").symlink_to(run / "secret.png")
    (run / "images/linked").symlink_to(run)
    os.mkfifo(folder / "pipe.png")
    (folder / "folder.png").mkdir()
    client = serving(run)
    client.ask("/document.json")
    status, _, content = client.ask(f"/images/0/{below}")
    assert status == 404 and b"secret" not in content
    assert open_picture(run / "images", below) is None
    for number in ("1", "-1", "x", "٣", "9" * 400):
        assert (
            client.ask(f"/images/{number.encode().hex() if number == '٣' else number}/step_000000/000_0.png")[0] == 404
        )


def test_a_token_where_others_reach_it(run: Path, serving: Callable[..., Client]) -> None:
    with pytest.raises(
        ServeError, match=r"--host 0\.0\.0\.0 is not this machine alone: .* --token-env or --token-file"
    ):
        serve([run], host="0.0.0.0", port=0, token=None)
    client = serving(run, Access("0.0.0.0", "s3cret"))
    basic = base64.b64encode(b"me:s3cret").decode()
    asked = [{}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}, {"Authorization": "Basic !"}]
    for headers in asked:
        status, answered, _ = client.ask("/document.json", **headers)
        assert status == 401 and answered["WWW-Authenticate"].startswith("Basic")
    for header in ("Bearer s3cret", f"Basic {basic}"):
        assert client.ask("/", Host="gpu-node:8765", Authorization=header)[0] == 200


def test_files_are_read_when_they_change_and_not_too_often(run: Path) -> None:
    now = [0.0]
    document = LiveDocument([run], lambda: now[0])
    first = document.content()
    for _ in range(50):
        assert document.content() == first
    assert document.readings == 1
    write_steps(run, 4)
    assert document.content() == first, "less than a second ago"
    now[0] += live_document.MIN_SECONDS
    assert document.content() != first and document.readings == 2
    now[0] += 60.0
    document.content()
    assert document.readings == 2, "nothing has changed"


def test_a_long_run_is_read_less_often(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(runs: Any) -> dict[str, Any]:
        now[0] += 3.0
        return {"runs": [str(path) for path in runs], "at": now[0]}

    monkeypatch.setattr(live_document, "document", slow)
    document = LiveDocument([run], lambda: now[0])
    document.content()
    for second in range(29):
        write_steps(run, 4 + second)
        now[0] += 1.0
        document.content()
    assert document.readings == 1
    now[0] += 2.0
    document.content()
    assert document.readings == 2


def test_many_browsers_are_one_reading(run: Path, serving: Callable[..., Client]) -> None:
    client = serving(run, clock=lambda: 0.0)
    threads = [threading.Thread(target=client.ask, args=("/document.json",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.server.live.readings == 1


def test_a_run_that_is_only_starting_and_one_that_ends(tmp_path: Path, serving: Callable[..., Client]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\ntotal_steps: 9\n")
    now = [0.0]
    client = serving(folder, clock=lambda: now[0])
    assert b"The run is starting" in client.ask("/")[2]
    assert client.ask("/document.json")[0] == 503
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_steps(folder, 0)
        now[0] += 1.0
        assert b"uPlot" in client.ask("/")[2]
        write_steps(folder, 2)
        now[0] += 10.0
        assert json.loads(client.ask("/document.json")[2])["runs"][0]["state"] == "running"
    now[0] += 10.0
    assert json.loads(client.ask("/document.json")[2])["runs"][0]["state"] == "unfinished", (
        "killed: no file has changed"
    )


def test_a_file_that_is_being_written_keeps_the_last_document(run: Path, serving: Callable[..., Client]) -> None:
    now = [0.0]
    client = serving(run, clock=lambda: now[0])
    _, _, before = client.ask("/document.json")
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n')
    now[0] += 60.0
    assert client.ask("/document.json")[0::2] == (200, before)
    for known in ({}, {"If_None_Match": client.ask("/document.json")[1]["ETag"]}):
        told = unquote(client.ask("/document.json", **known)[1][live.TROUBLE])
        assert "metrics.jsonl:2: not JSON" in told, "the page can say that what it shows is not the newest"
    write_steps(run, 5)
    now[0] += 60.0
    _, headers, newest = client.ask("/document.json")
    assert newest != before and live.TROUBLE not in headers


def test_a_run_that_cannot_be_read_is_not_one_that_is_starting(run: Path, serving: Callable[..., Client]) -> None:
    (run / "metrics.jsonl").write_text("<b>\n{}\n")
    page = serving(run).ask("/")[2].decode()
    assert "cannot be read" in page and "metrics.jsonl:1: not JSON" in page and "starting" not in page


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", "[::1", 403),
        ("/images/0/%ff%fe.png", "localhost", 404),
        ("http://[x/", "localhost", 404),
        (f"/images/{'9' * 5000}/x.png", "localhost", 404),
    ],
)
def test_what_is_no_address_gets_an_answer(
    run: Path, serving: Callable[..., Client], path: str, host: str, status: int
) -> None:
    assert serving(run).ask(path, Host=host)[0] == status


def test_runs_of_a_sweep_appear_one_by_one(tmp_path: Path, run: Path) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "1").mkdir(parents=True)
    (sweep / "1/config.yaml").write_text("name: a\n")
    assert begun([sweep]) == []
    write_steps(sweep / "1", 1)
    assert begun([sweep, run]) == [sweep / "1", run]


def test_a_controller_can_start_while_somebody_looks(run: Path) -> None:
    directory = RunDirectory(run)
    (run / ".lock").touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(run / ".lock")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            directory._take_lock()
            assert is_held(run / ".lock")
            directory.release()
    finally:
        stop.set()
        looking.join()


def test_a_port_in_use_and_a_folder_that_is_no_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(run), "--live", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} is in use: --port " in said and "is free, --port 0 takes any" in said
    assert main([str(tmp_path / "none"), "--live", "--port", "0"]) == 2
    assert "is no run directory and holds none" in capsys.readouterr().err
    assert main([str(run), "--live", "--port", "70000"]) == 2
    assert "port 70000" in capsys.readouterr().err


def test_ctrl_c_ends_it_at_once(run: Path) -> None:
    command = [sys.executable, "-m", "async_flowrl.report", str(run), "--live", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline()
    assert address.startswith(f"live report of {run} at http://127.0.0.1:")
    port = int(address.split(":")[2].split("/")[0])
    open_connection = socket.create_connection(("127.0.0.1", port))  # a browser that says nothing holds nobody up
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    open_connection.close()
    assert (process.returncode, err) == (0, ""), out


def test_no_extra_package_is_needed() -> None:
    assert live.PORT == 8765
    asked = (
        "import sys, async_flowrl.report.live; print(sorted({'fastapi', 'uvicorn', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
