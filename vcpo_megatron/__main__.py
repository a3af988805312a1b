"""``python -m vcpo_megatron`` is ``vcpo``."""

import sys

from .cli import main

sys.exit(main())
