"""The helpers of this folder and those of the backends' tests are modules beside it."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "backends"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
