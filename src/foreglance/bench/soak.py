"""A server under mixed load for a time: does it answer everybody, stay as large as it is, and lose no slot?

The server is a process of its own, started as `foreglance serve`, so that its memory is its own too. Clients
(`bench.clients`) ask it without pause, more of them than it has slots; half of their requests go without drafts, at
random, so that both kinds meet the same load. After the time is up, open requests end, and then nothing may run.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpcore2 as httpcore
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from foreglance.bench import clients
from foreglance.bench.clients import Outcome
from foreglance.bench.report import Progress, plotter, silent
from foreglance.request import RequestError

WARM_UP = 0.25  # of the time
IDLE_SECONDS = 30.0  # that the server has to become idle
STOP_SECONDS = 60.0  # that it has to end when told to
PAUSE = 0.5  # seconds after which a client comes again that was refused or failed
PERCENTILES = (50, 90, 99)
LAST_WORDS = 500  # characters of what a server that died had said
COMMAND = "from foreglance.cli import main; main()"


@dataclass(frozen=True)
class Plan:
    """How long, who asks, and what is served."""

    minutes: float
    model: str = "tiny-qwen"
    weights: str = "auto"
    slots: int = 4
    clients: int = 6
    prefix_cache_bytes: int = 64 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minutes", "slots", "clients"):
            if not self.__dict__[name] > 0:
                raise RequestError(f"--{name} must be more than 0, got {self.__dict__[name]}", param=name)

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    def command(self) -> list[str]:
        options = {
            "model": self.model,
            "weights": self.weights,
            "slots": self.slots,
            "prefix-cache-bytes": self.prefix_cache_bytes,
            "port": 0,
        }
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-c", COMMAND, "serve", *given, "--json"]


@dataclass(frozen=True)
class Reading:
    """The server at a moment: seconds since the beginning, resident memory in MB, sequences in slots and waiting."""

    at: float
    rss_mb: float
    running: int
    waiting: int


@dataclass(frozen=True)
class Idle:
    """The server once nobody asks. `rows_kept` lie ready for conversations that go on; `rows_after_erase` are left when
    each slot was erased. `lost_slots` are those that are still at work."""

    running: int
    waiting: int
    slots: int
    lost_slots: int
    rows_kept: int
    rows_after_erase: int

    @property
    def is_clean(self) -> bool:
        return not (self.running or self.waiting or self.lost_slots or self.rows_after_erase)


@dataclass
class Report:
    """Everything that was seen. Memory in MB, latencies in milliseconds. `lost`: why the server could not be looked at
    any more, which ended the run. `exit_code`: of its process once told to stop; None if it did not."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    start_rss_mb: float = 0.0
    idle: Idle | None = None
    lost: str | None = None
    exit_code: int | None = None

    @property
    def failures(self) -> list[str]:
        found = [f"{one.kind}, {one.at:.1f} s: {one.why}" for one in self.outcomes if one.end == "failed"]
        if self.lost is not None:
            found.append(f"the server cannot be looked at: {self.lost}")
        if self.idle is not None and not self.idle.is_clean:
            found.append(f"something is held when nobody asks: {self.idle}")
        if self.exit_code is None:
            found.append(f"the server did not end within {STOP_SECONDS:.0f} seconds after it was told to")
        elif self.exit_code:
            found.append(f"the server's process ended with code {self.exit_code}")
        return found

    @property
    def memory(self) -> dict[str, float]:
        """`growth_mb`: from the end of the warm-up (a quarter of the time) to the end; `mb_per_minute`: the slope of a
        line through all readings between."""
        warm = [one for one in self.readings if one.at >= WARM_UP * self.plan.seconds]
        rss = [one.rss_mb for one in warm] or [self.start_rss_mb]
        slope = np.polyfit([one.at / 60 for one in warm], rss, 1)[0] if len(warm) > 1 else 0.0
        return {
            "start_mb": self.start_rss_mb,
            "after_warm_up_mb": rss[0],
            "end_mb": rss[-1],
            "growth_mb": rss[-1] - rss[0],
            "mb_per_minute": float(slope),
        }

    def latencies(self, drafts: bool) -> dict[str, Any]:
        mine = [one for one in self.outcomes if one.is_timed and one.drafts == drafts]
        return {
            "answers": len(mine),
            "tokens": sum(one.tokens for one in mine),
            "first_token_ms": percentiles([one.first for one in mine if one.first is not None]),
            "whole_ms": percentiles([one.whole for one in mine if one.whole is not None]),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan),
            "requests": len(self.outcomes),
            "by_kind": clients.counts(self.outcomes),
            "latency": {"drafts": self.latencies(True), "no_drafts": self.latencies(False)},
            "memory": self.memory,
            "most_running": max((one.running for one in self.readings), default=0),
            "most_waiting": max((one.waiting for one in self.readings), default=0),
            "idle": None if self.idle is None else asdict(self.idle),
            "exit_code": self.exit_code,
            "failures": self.failures,
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """In milliseconds, and the largest; None of nothing."""
    if not seconds:
        return None
    found = {f"p{percent}": float(np.percentile(seconds, percent)) * 1e3 for percent in PERCENTILES}
    return found | {"max": max(seconds) * 1e3}


def resident_mb(pid: int) -> float:
    """Resident memory of a process; where the system has no /proc, `ps` is asked."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
        return int(shown.strip() or 0) / 1024
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0.0)


@contextmanager
def serving(plan: Plan, report: Report) -> Iterator[tuple[str, str, int]]:
    """A server's address, its model's name and its process; told to stop at the end. Raises `RequestError` with its
    last words if it does not start."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(plan.command(), stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline() or "{}")
            if "url" not in told:
                process.wait(STOP_SECONDS)
                log.seek(0)
                said = told["error"]["message"] if "error" in told else log.read().decode(errors="replace")
                raise RequestError(
                    f"the server did not start: {said[-LAST_WORDS:].strip()}", param="model", code="server_not_started"
                )
            yield told["url"], told["model"], process.pid
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                report.exit_code = process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()


def run(plan: Plan, progress: Progress = silent) -> Report:
    """Start the server, ask it for the time of the plan, and see what it holds afterwards."""
    report = Report(plan)
    with serving(plan, report) as (url, model, pid):
        report.start_rss_mb = resident_mb(pid)
        asyncio.run(_soak(report, url, model, pid, progress))
    return report


async def _soak(report: Report, url: str, model: str, pid: int, progress: Progress) -> None:
    async with clients.connections() as looking:
        try:
            images = json.loads(await _get(looking, f"{url}/props"))["modalities"]["vision"]
            began = time.perf_counter()
            asking = [_client(report, url, model, images, began, number) for number in range(report.plan.clients)]
            await asyncio.gather(_watch(report, looking, url, pid, began, progress), *asking)
            report.idle = await _when_idle(looking, url)
            report.readings.append(await _reading(looking, url, pid, began))
        except clients.LOST as error:
            report.lost = str(error) or type(error).__name__


async def _client(report: Report, url: str, model: str, images: bool, began: float, number: int) -> None:
    """One client after another, in a row, until the time is up."""
    rng = random.Random(f"{report.plan.seed} {number}")
    async with clients.connections() as usual, clients.connections(slow=True) as slow:
        while time.perf_counter() - began < report.plan.seconds:
            wish = clients.draw(rng, model, images)
            outcome = await clients.ask(slow if wish.slow else usual, url, wish, began)
            report.outcomes.append(outcome)
            if outcome.end in ("refused", "failed"):
                await asyncio.sleep(PAUSE)


async def _watch(
    report: Report, pool: httpcore.AsyncConnectionPool, url: str, pid: int, began: float, progress: Progress
) -> None:
    total = report.plan.seconds
    while (passed := time.perf_counter() - began) < total:
        report.readings.append(await _reading(pool, url, pid, began))
        progress(int(passed), int(total))
        await asyncio.sleep(min(1.0, total / 20))
    progress(int(total), int(total))


async def _get(pool: httpcore.AsyncConnectionPool, url: str, method: str = "GET") -> bytes:
    response = await pool.request(method, url, extensions=clients.TIMEOUTS)
    if response.status != 200:
        raise clients.Broken(f"{method} {url} answered {response.status}: {response.content[:200]!r}")
    return response.content


async def _reading(pool: httpcore.AsyncConnectionPool, url: str, pid: int, began: float) -> Reading:
    running, waiting = await _load(pool, url)
    return Reading(time.perf_counter() - began, resident_mb(pid), running, waiting)


async def _load(pool: httpcore.AsyncConnectionPool, url: str) -> tuple[int, int]:
    """Sequences in slots, and those that wait for one."""
    text = (await _get(pool, f"{url}/metrics")).decode()
    values = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
    return int(values["foreglance_requests_running"]), int(values["foreglance_requests_waiting"])


async def _when_idle(pool: httpcore.AsyncConnectionPool, url: str) -> Idle:
    """What is held once nothing runs, or when the patience for that has ended."""
    deadline = time.perf_counter() + IDLE_SECONDS
    while any(await _load(pool, url)) and time.perf_counter() < deadline:
        await asyncio.sleep(0.05)
    running, waiting = await _load(pool, url)
    slots = json.loads(await _get(pool, f"{url}/slots"))
    idle = [one for one in slots if one["state"] == "idle"]
    for one in idle:
        await _get(pool, f"{url}/slots/{one['id']}?action=erase", "POST")
    left = sum(one["n_past"] for one in json.loads(await _get(pool, f"{url}/slots")))
    return Idle(running, waiting, len(slots), len(slots) - len(idle), sum(one["n_past"] for one in slots), left)


def draw(report: Report, path: Path, title: str) -> None:
    """Memory over time above the latency of whole answers. Needs matplotlib (the extra `bench`)."""
    pyplot = plotter()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=(2, 3))
    figure.patch.set_facecolor("white")
    above.plot([one.at for one in report.readings], [one.rss_mb for one in report.readings], color="#1b6ca8")
    above.axvline(WARM_UP * report.plan.seconds, color="#8a8a8a", linestyle=":", label="end of warm-up")
    above.set(ylabel="resident memory, MB", ylim=(0, None), title=title)
    above.legend(frameon=False, loc="lower right")
    for drafts, words, colour in ((False, "drafts off", "#8a8a8a"), (True, "drafts on", "#1b6ca8")):
        mine = [one for one in report.outcomes if one.is_timed and one.drafts == drafts]
        below.plot(
            [one.at for one in mine], [one.whole for one in mine], ".", ms=4, alpha=0.5, color=colour, label=words
        )
    below.set(xlabel="seconds since the beginning", ylabel="whole answer, s", yscale="log")
    below.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, markerscale=2)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
