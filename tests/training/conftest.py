"""`training` is not installed with the package; these tests find it in the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
