"""Many damaged inputs for each reader: `python scripts/fuzz.py --inputs 10000 [--only image]`. Stops at the first one
that gives anything but a result within bounds or an error in words, and prints it; says what memory was used."""

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hypothesis import HealthCheck, given, seed, settings
from support.fuzzing import TARGETS, damaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="of each kind")
    parser.add_argument("--only", choices=sorted(TARGETS), help="one kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in [options.only] if options.only else TARGETS:
        began, before = time.monotonic(), _megabytes()
        _run(name, options.inputs, options.seed)
        seconds, grown = time.monotonic() - began, _megabytes() - before
        sys.stdout.write(f"{name}: {options.inputs} inputs in {seconds:.0f} s, memory grew by {grown:.0f} MB\n")
        sys.stdout.flush()


def _run(name: str, inputs: int, start: int) -> None:
    target = TARGETS[name]
    for sound in target.seeds():
        target.check(sound)

    @seed(start)
    @settings(max_examples=inputs, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(target.seeds()))
    def run(data: bytes) -> None:
        target.check(data)

    run()


def _megabytes() -> float:
    """The most that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
