"""Kills the server's engine under load again and again: clients get a clear error, memory and files stay.

    python -m bench.serve_kills [kills, 12]

Prints after each restart the resident memory of both processes, open files and listening ports of the server.
"""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import openai

from tests.serve.serve_support import STORY, Server, wait

CLIENTS = 6


def engine_of(pid: int) -> int:
    """The server's one child."""
    children = [
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _parent(path) == pid
    ]
    assert len(children) == 1, children
    return children[0]


def _parent(path: Path) -> int:
    try:
        return int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:  # gone meanwhile
        return 0


def memory(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def kill_under_load(server: Server) -> list[str]:
    """Clients stream; the engine dies in the middle. -> what each client was told."""
    told: list[str] = []
    started = threading.Barrier(CLIENTS + 1)

    def client() -> None:
        waiting = True
        try:
            for _ in server.chat(STORY, stream=True, max_tokens=400):
                if waiting:
                    waiting = False
                    started.wait(60)
            told.append("whole answer")
        except openai.APIError as error:
            told.append(str(error)[:100])
            if waiting:
                started.wait(60)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    started.wait(120)
    os.kill(engine_of(server.process.pid), signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert len(told) == CLIENTS, "a client hangs"
    return told


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        pid = server.process.pid
        print("kill  HTTP MB  engine MB  open files  what clients were told")
        for number in range(kills + 1):
            told = kill_under_load(server) if number else []
            wait(lambda: server.raw("GET", "/ready")[0] == 200, 60)
            answer = server.chat().choices[0].message.content
            assert "85" in answer, answer
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            sizes = [memory(p) / 1e6 for p in (pid, engine_of(pid))]
            print(
                f"{number:4}  {sizes[0]:7.1f}  {sizes[1]:9.1f}  {files:10}  {sorted(set(told))}", flush=True
            )


if __name__ == "__main__":
    main()
