"""The same as ``vcpo convert``: python tools/convert_checkpoint.py import HF OUT."""

from __future__ import annotations

import sys

from vcpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
