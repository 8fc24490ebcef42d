"""Servers that may be killed at any moment, each a process of its own that is there at once.

Run as a program it loads the embedded model once and then forks a server for each line that it reads: JSON with the
slots' `folder`, the `port` (0: any) and a `limit` of bytes for each file that the server writes (null: none). A server
says where it is on a line of its own, with its `pid`. A line with the fields of an `Aim` has the program kill the
server that it forked last, and say on a line `within` which phases that was.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODEL = "tiny-qwen"
SLOTS = 2
PHASES = {"prefill": b"p", "plain step": b"d", "step with drafts": b"v", "save": b"s", "restore": b"r", "stream": b"t"}
NAMES = {letter: phase for phase, letter in PHASES.items()}
PAUSE = 0.0003  # seconds before each tensor of a save
UNSEEN = 0.01  # seconds that a phase is thought to take before one was seen
PATIENCE = 60.0  # seconds after which a server is killed though its phase did not come


@dataclass(frozen=True)
class Aim:
    """Kill when a phase has begun `nth` times, after this share of the time that it took before."""

    phase: str
    nth: int
    share: float


class Mortal:
    """One server. `url` is the same after a restart at its `port`."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path, port: int = 0, limit: int | None = None):
        self._launcher = launcher
        told = self._order({"folder": str(folder), "port": port, "limit": limit})
        self.url, self.pid = told["url"], told["pid"]
        self.port = int(self.url.rpartition(":")[2])

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        self._launcher.stdin.write(json.dumps(order) + "\n")
        self._launcher.stdin.flush()
        line = self._launcher.stdout.readline()
        assert line, "the servers' program has ended"
        return json.loads(line)

    def kill(self) -> None:
        """At once, and gone when this returns."""
        _kill(self.pid)

    def shoot(self, aim: Aim) -> list[str]:
        """Kill it in a phase that is still to come; -> the phases that it was in."""
        return self._order(asdict(aim))["within"]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        while True:
            os.kill(pid, 0)


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
    took: dict[str, float] = {}
    child = seen = -1
    for line in sys.stdin:
        order = json.loads(line)
        if "phase" in order:
            print(json.dumps({"within": _shoot(child, seen, Aim(**order), took)}), flush=True)
            continue
        if seen >= 0:
            os.close(seen)
        seen, marks = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(seen)
            _mark(engine, marks)
            _serve(engine, **order)
            os._exit(0)
        os.close(marks)


def _shoot(pid: int, marks: int, aim: Aim, took: dict[str, float]) -> list[str]:
    """Kill a server in a phase; -> the phases that it was in. Keeps how long phases `took`."""
    is_open, began, num_begun = Counter[str](), {}, 0
    deadline = time.monotonic() + PATIENCE

    def hear(heard: bytes) -> int:
        """-> how often the phase has begun."""
        now = time.monotonic()
        for letter in heard.decode():
            phase = NAMES[letter.lower().encode()]
            is_open[phase] += 1 if letter.isupper() else -1
            if letter.isupper():
                began[phase] = now
            else:
                took[phase] = now - began[phase]
        return heard.decode().count(PHASES[aim.phase].decode().upper())

    while select.select([marks], [], [], 0)[0]:  # of before
        hear(os.read(marks, 1 << 16))
    while num_begun < aim.nth and select.select([marks], [], [], max(0.0, deadline - time.monotonic()))[0]:
        num_begun += hear(os.read(marks, 1))
    time.sleep(aim.share * took.get(aim.phase, UNSEEN))
    _kill(pid)
    while rest := os.read(marks, 1 << 16):
        hear(rest)
    return sorted(+is_open)


def _mark(engine, marks: int) -> None:
    """Have the phases of a server told: a capital letter where one begins, a small one where it ends. Saves take their
    time, so that a kill meets them between two tensors."""
    from foreglance.cache import files, whole
    from foreglance.serve.stream import EventStream

    def begin(phase: str) -> None:
        os.write(marks, PHASES[phase].upper())

    def end(phase: str) -> None:
        os.write(marks, PHASES[phase])

    def wrapped(phase: str, work):
        def call(*args):
            begin(phase)
            try:
                return work(*args)
            finally:
                end(phase)

        return call

    def run_rows(works, refuse):
        if works:
            phase = "step with drafts" if any(work.sequence.draft for work in works) else "plain step"
            steps.append("prefill" if any(work.chunk for work in works) else phase)
            begin(steps[-1])
        return runner_run(works, refuse)

    def step():
        try:
            return engine_step()
        finally:
            if steps:
                end(steps.pop())

    async def stream(self, send):
        begin("stream")
        try:
            await send_all(self, send)
        finally:
            end("stream")

    def slowly(tensor):
        time.sleep(PAUSE)
        return raw(tensor)

    raw, whole.raw = whole.raw, slowly
    steps: list[str] = []
    runner, engine_step, send_all = engine._runner, engine.step, EventStream._send_all
    runner_run = runner.run
    runner.run, engine.step, EventStream._send_all = run_rows, step, stream
    files.save, files.load = wrapped("save", files.save), wrapped("restore", files.load)


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
