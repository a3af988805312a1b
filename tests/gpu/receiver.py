"""One server's end of a weight broadcast, as a process of its own that can be killed.

    python -m tests.gpu.receiver NAME PORT BACKEND TIMEOUT_S DEVICE SIZE... [stay]

It joins the group as rank 1 of 2 and takes one bucket of each SIZE; for every one it writes a line "bucket CHECKSUM",
and "waiting" before each. With "stay" it then remains a member that takes nothing, until it is killed or the timeout
has passed. Exit status 3, and a line "group: ...", when the group fails.
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch

from vcpo_megatron.weight_sync.wire import GroupError, WeightGroup, find_store

STAY = "stay"


def checksum(flat: torch.Tensor) -> str:
    """Of the bytes of a bucket."""
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()[:16]


def main() -> int:
    name, port, backend, timeout_s, device, *sizes = sys.argv[1:]
    if backend == "nccl":
        torch.cuda.set_device(int(device))
    try:
        group = WeightGroup(find_store("127.0.0.1", int(port), float(timeout_s)), name, 1, 2, backend, float(timeout_s))
        print("joined", flush=True)
        for size in (int(size) for size in sizes if size != STAY):
            flat = torch.zeros(size, dtype=torch.uint8, device=group.device)
            print("waiting", flush=True)
            group.broadcast(flat)
            print(f"bucket {checksum(flat)}", flush=True)
    except GroupError as error:
        print(f"group: {error}", flush=True)
        return 3
    if sizes[-1] == STAY:
        time.sleep(float(timeout_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
