"""An update by a folder on a shared disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.fake_servers import (
    DistributedLearner,
    run_distributed,
)
from vcpo_megatron.orchestrator.peers.weight_sync import WeightSync
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.transport.messages import (
    WeightsReady,
)
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(30)


def test_the_disk_path_gives_its_folders_back(tmp_path: Path) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        for number in range(3):
            folder = tmp_path / f"1.{number}"
            folder.mkdir()
            sync.offer(WeightsReady(PolicyVersion(1, number), "disk", path=str(folder)))
            await sync.all_loaded(number)
        await fleet.changes.until(lambda: [f.name for f in tmp_path.iterdir()] == ["1.2"] or None, 5)
        assert clients[0].session is None and sender.log == []

    run_distributed(work, wave=1)
