"""The file of metrics of a run whose report is served live, and a client of the server."""

import http.client
import json
from pathlib import Path

from async_flowrl.report.live import Server


def write_steps(folder: Path, count: int) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "reward/mean": step / 10, "images": 4}) + "\n" for step in range(count))
    )


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
