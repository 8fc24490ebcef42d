"""Servers that may be killed at any moment, each a process of its own that is there at once.

Run as a program it loads the embedded model once and then forks a server for each line that it reads: JSON with the
slots' `folder`, the `port` (0: any) and a `limit` of bytes for each file that the server writes (null: none). A server
says where it is on a line of its own, with its `pid`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODEL = "tiny-qwen"
SLOTS = 2


class Mortal:
    """One server. `url` is the same after a restart at its `port`."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path, port: int = 0, limit: int | None = None):
        launcher.stdin.write(json.dumps({"folder": str(folder), "port": port, "limit": limit}) + "\n")
        launcher.stdin.flush()
        line = launcher.stdout.readline()
        assert line, "the server did not start"
        told = json.loads(line)
        self.url, self.pid = told["url"], told["pid"]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """At once, and gone when this returns."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            while True:
                os.kill(self.pid, 0)


@contextmanager
def launching() -> Iterator[subprocess.Popen[str]]:
    """What `Mortal` starts servers with."""
    command = [sys.executable, __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.stdin.close()
            launcher.wait()


def main() -> None:
    from foreglance import Engine, Settings

    engine = Engine.load(MODEL, Settings(weights="fp32", slots=SLOTS, prefix_cache_bytes=1 << 26, try_drafts=False))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    for line in sys.stdin:
        if os.fork() == 0:
            _serve(engine, **json.loads(line))
            os._exit(0)


def _serve(engine, folder: str, port: int, limit: int | None) -> None:
    from foreglance.serve.app import create_app
    from foreglance.serve.run import bind, run
    from foreglance.serve.settings import ServerSettings

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    bound = bind("127.0.0.1", port)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    told = {"url": f"http://127.0.0.1:{bound.getsockname()[1]}", "pid": os.getpid()}
    app = create_app(engine, ServerSettings(slot_save_path=Path(folder)))
    run(app, bound, grace=1.0, ready=lambda: print(json.dumps(told), flush=True))


if __name__ == "__main__":
    main()
