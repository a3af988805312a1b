"""``python -m vcpo_megatron.rollout.embedded``."""

import sys

from .server import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
