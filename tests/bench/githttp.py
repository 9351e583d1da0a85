"""`python -m tests.bench.githttp FOLDER`: repositories over smart HTTP by git's own backend, connections kept alive.

Prints its port. A process of its own, so that it takes no time of the one that measures.
"""

import http.server
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.actors import answer_by_git


class Handler(http.server.BaseHTTPRequestHandler):
    """One CGI process a request, as a web server in front of Git does it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer_by_git(self, Path(sys.argv[1]), body, self.headers.get("Git-Protocol", ""))
        self.wfile.flush()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL under which the repositories of a folder are, for as long as this lasts."""
    command = [sys.executable, "-m", "tests.bench.githttp", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


if __name__ == "__main__":
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        print(server.server_address[1], flush=True)
        server.serve_forever()
