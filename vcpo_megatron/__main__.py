"""``python -m vcpo_megatron`` is ``vcpo``."""

import sys

from .cli.main import main

sys.exit(main())
