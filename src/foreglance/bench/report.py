"""What benchmarks share: intervals, tables, the machine's name, and the JSON line that ends a run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from foreglance.request import RequestError

BOOTSTRAPS = 2000


def interval(counts: np.ndarray) -> tuple[float, float, float] | None:
    """Ratio of sums and its 95 % bootstrap interval over prompts; counts [prompts, 2]: numerator, denominator."""
    counts = np.asarray(counts, float).reshape(-1, 2)
    if counts[:, 1].sum() == 0:
        return None
    rng = np.random.default_rng(0)
    drawn = counts[rng.integers(0, len(counts), (BOOTSTRAPS, len(counts)))].sum(axis=1)
    drawn = drawn[drawn[:, 1] > 0]
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(counts[:, 0].sum() / counts[:, 1].sum()), float(low), float(high)


def plotter() -> ModuleType:
    """pyplot, drawing into files. Raises `RequestError` where matplotlib is not installed, so ask before measuring."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise RequestError("--figure needs matplotlib; install foreglance[bench]", param="figure") from None

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def machine(threads: int | None = None) -> str:
    """Processor, torch and thread count, in a few words; `threads` are those of other processes that were measured."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {capability}, torch {torch.__version__}, {threads or torch.get_num_threads()} thread(s)"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> object:
    """A rich table; numbers are given formatted."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def shown(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)


Progress = Callable[[int, int], None]  # (done, of)


def silent(done: int, of: int) -> None:
    """No progress bar."""
