"""What every rank of a test world imports; done once, by the process that ranks are forked from (``world.py``)."""

from vcpo_megatron.learner.megatron import platform

platform.prepare()

from vcpo_megatron.learner.checkpoint import checkpoints, convert  # noqa: E402, F401
from vcpo_megatron.learner.megatron import parallel, training  # noqa: E402, F401
from vcpo_megatron.learner.step import vcpo_step  # noqa: E402, F401
from vcpo_megatron.learner.weights import gather  # noqa: E402, F401
