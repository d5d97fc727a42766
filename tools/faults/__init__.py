"""The fault matrix (docs/faults.md), which works with the integration tests' small chain and small project."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration"))
