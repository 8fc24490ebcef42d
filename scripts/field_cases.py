"""Write docs/field-cases.md from the marks of the tests: `python scripts/field_cases.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.field_cases import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
sys.stdout.write(f"wrote {PAGE}\n")
