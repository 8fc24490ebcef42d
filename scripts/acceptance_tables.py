"""Measure the tables of docs/acceptance.md and write them between its markers.

    python scripts/acceptance_tables.py FOLDER               # write tables from the JSON that lies in FOLDER
    python scripts/acceptance_tables.py FOLDER --measure     # run what is missing there first, then write
    python scripts/acceptance_tables.py FOLDER --measure --prompts 2 --page other.md    # a trial

A block of the page lies between `<!-- table: NAME -->` and `<!-- /table -->`, and holds its commands too. Exit code 1
if any token of a table differs from the run without drafts.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "acceptance.md"
DEPTHS = "1,2,3,4,5,6,auto"
DEEPEST = 6
HEADS = "acceptance --prompts 100 --depths 1 --temperatures 0 --kinds image --policies see,placeholder,skip"
RUNS = {  # options of `foreglance bench ...` by the name of the file that holds what it said
    "image": f"acceptance --weights q8 --prompts 100 --depths {DEPTHS} --kinds image --figure docs",
    "text": f"acceptance --weights q8 --prompts 40 --depths {DEPTHS} --kinds text",
    "tiny-step": f"acceptance --weights q8 --model tiny-step --prompts 60 --depths {DEPTHS}",
    "tiny-gemma": f"acceptance --weights q8 --model tiny-gemma --prompts 60 --depths {DEPTHS}",
    "tiny-text": f"acceptance --weights q8 --draft tiny-text --prompts 30 --depths {DEPTHS}",
    "tiny-qwen-own": HEADS,
    "tiny-qwen-control": f"{HEADS} --head tests/data/tiny-qwen-skip-head.safetensors",
    "tiny-step-own": f"{HEADS} --model tiny-step",
    "tiny-step-control": f"{HEADS} --model tiny-step --head tests/data/tiny-step-skip-modules.safetensors",
    "holes": "holes --prompts 60",
    "holes-3": "holes --prompts 30 --images 3",
    "holes-10": "holes --prompts 30 --before 10",
}
CONTROLS = ("tiny-qwen-own", "tiny-qwen-control", "tiny-step-own", "tiny-step-control")
OTHERS, HOLES = ("tiny-step", "tiny-gemma", "tiny-text"), ("holes", "holes-3", "holes-10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where what each run said lies as NAME.json")
    parser.add_argument("--measure", action="store_true", help="run what is missing")
    parser.add_argument("--prompts", type=int, help="of each run; fewer than the page says, for a trial")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, command in RUNS.items():
        path = options.folder / f"{name}.json"
        if options.measure and not path.is_file():
            measure(path, command, options.prompts)
    found = {name: told for name in RUNS if (told := read(options.folder / f"{name}.json")) is not None}
    page = options.page.read_text(encoding="utf-8")
    for name, make in BLOCKS.items():
        if all(run in found for run in NEEDED[name]):
            page = put(page, name, make(found))
            say(f"{name}: written")
        else:
            say(f"{name}: left as it is, {', '.join(run for run in NEEDED[name] if run not in found)} not measured")
    options.page.write_text(page, encoding="utf-8")
    if differing := sum(row["differing"] for run in found.values() for row in run if "differing" in row):
        sys.exit(f"{differing} tokens differ")


def measure(path: Path, command: str, prompts: int | None) -> None:
    """Run one command of `RUNS`; its JSON is there whole or not at all."""
    words = command.split()
    if prompts is not None:
        words[words.index("--prompts") + 1] = str(prompts)
    if "--figure" in words and prompts is not None:  # a trial draws nothing into the pages
        at = words.index("--figure")
        del words[at : at + 2]
    say(f"foreglance bench {' '.join(words)}")
    made = subprocess.run(
        [sys.executable, "-c", "from foreglance.cli import main; main()", "bench", *words, "--json"],
        cwd=PAGE.parents[1],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    path.write_text(made.stdout.strip().splitlines()[-1], encoding="utf-8")


def read(path: Path) -> list[dict] | None:
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else None


def put(page: str, name: str, block: str) -> str:
    begin, end = f"<!-- table: {name} -->", "<!-- /table -->"
    if page.count(begin) != 1:
        sys.exit(f"the page needs one line {begin}, and {end} behind it")
    return re.sub(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{block}\n{end}", page, count=1, flags=re.DOTALL
    )


def commands(*runs: str) -> str:
    return "\n".join(f"    foreglance bench {RUNS[run]}" for run in runs)


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    head, rule = f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def by_depth(row: dict) -> str:
    return " ".join(number(rate) for rate in row["acceptance_by_depth"][:DEEPEST]) or "-"


def drafter(row: dict) -> str:
    """What a row is told apart by: the policy of a head that has rows of its own for an image, else the kind."""
    return row["policy"] if row["draft"] == "mtp" else row["draft"]


def cells(row: dict, with_interval: bool) -> list[str]:
    steps = number(row["tokens_per_step"])
    if with_interval and row["tokens_per_step_ci"]:
        steps += " ({:.2f} to {:.2f})".format(*row["tokens_per_step_ci"])
    return [
        f"{row['temperature']:g}",
        str(row["depth"]),
        by_depth(row),
        number(row["content_acceptance"]),
        steps,
        number(row["speedup"]),
        f"{row['differing']} of {row['tokens']:,}",
    ]


NAMES = ["T", "depth", "acceptance by depth", "content words", "tokens/step", "speed, on / off", "differing tokens"]


def policies(run: str, rows: list[dict]) -> str:
    names = ["policy", *NAMES[:4], "tokens/step (95 %)", *NAMES[5:]]
    return f"{commands(run)}\n\n{markdown(names, [[drafter(row), *cells(row, True)] for row in rows])}"


def of_text(found: dict[str, list[dict]]) -> str:
    """All policies have the same rows without an image: `see` stands for them."""
    return policies("text", [row for row in found["text"] if drafter(row) in ("see", "ngram")])


def others(found: dict[str, list[dict]]) -> str:
    kinds = {"tiny-gemma": "tiny-gemma-assistant", "tiny-text": "tiny-text"}
    rows = [
        [row["model"], kinds.get(run, row["policy"]), "image" if row["image"] else "text", *cells(row, False)]
        for run in OTHERS
        for row in found[run]
        if row["draft"] != "ngram" and (row["image"] or row["policy"] == "see")
    ]
    return f"{commands(*OTHERS)}\n\n{markdown(['model', 'draft', 'prompts', *NAMES], rows)}"


def controls(found: dict[str, list[dict]]) -> str:
    """First guesses of heads that learnt with image rows and of those that did not, with intervals."""

    def cell(rate: float | None, interval: list[float] | None) -> str:
        return "-" if rate is None or interval is None else "{:.2f} ({:.2f} to {:.2f})".format(rate, *interval)

    rows = [
        [
            *(run.rsplit("-", 1)),
            row["policy"],
            cell(row["content_acceptance"], row["content_ci"]),
            cell(row["acceptance_by_depth"][0], row["acceptance_ci"]),
            f"{row['differing']} of {row['tokens']:,}",
        ]
        for run in CONTROLS
        for row in found[run]
        if row["draft"] == "mtp"
    ]
    names = ["model", "head", "policy", "content words (95 %)", "all first guesses (95 %)", "differing tokens"]
    return f"{commands(*CONTROLS)}\n\n{markdown(names, rows)}"


def holes(found: dict[str, list[dict]]) -> str:
    def cell(row: dict) -> str:
        if row["acceptance"] is None:
            return "beyond the model's positions"
        return "{:.2f} ({:.2f} to {:.2f}); ".format(*row["acceptance"]) + number(row["tokens_per_step"][0])

    rows = [
        [trio[0]["variant"], *(cell(row) for row in trio)] for trio in zip(*(found[run] for run in HOLES), strict=True)
    ]
    names = ["draft rows of the image", "one image", "three images", "one image behind ten text turns"]
    return f"{commands(*HOLES)}\n\n{markdown(names, rows)}"


def total(found: dict[str, list[dict]]) -> str:
    rows = [row for run in NEEDED["total"] for row in found[run]]
    tokens, differing = sum(row["tokens"] for row in rows), sum(row["differing"] for row in rows)
    return f"{tokens:,} tokens of these tables were compared with the same prompt without drafts: {differing} differ."


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


BLOCKS = {
    "image": lambda found: policies("image", found["image"]),
    "text": of_text,
    "controls": controls,
    "holes": holes,
    "others": others,
    "total": total,
}
NEEDED = {
    "image": ("image",),
    "text": ("text",),
    "controls": CONTROLS,
    "holes": HOLES,
    "others": OTHERS,
    "total": ("image", "text", *OTHERS),
}

if __name__ == "__main__":
    main()
