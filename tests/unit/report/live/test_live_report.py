"""Tests of the live report over real HTTP: access, contents, how often files are read, start and end."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl.config.listening import ServeError
from async_flowrl.report import live
from async_flowrl.report.command import main
from async_flowrl.report.live import Access, serve
from async_flowrl.report.live_files import open_picture
from tests.unit.report.live.served import Client

ROOT = Path(__file__).parents[4]


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
