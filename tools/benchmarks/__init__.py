"""Shared code of the tools, not installed. Through it a tool of a plain checkout finds the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
