"""What the extension was compiled from. Used by setup.py too, so it imports nothing of the package."""

import hashlib
from pathlib import Path

FOLDER = Path(__file__).with_name("csrc")


def digest(folder: Path = FOLDER) -> str | None:
    """Of the C sources in a folder; None where there are none, as in an installed wheel."""
    files = sorted(folder.glob("*.[ch]"))
    if not files:
        return None
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:16]
