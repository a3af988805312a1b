"""What every rank of a test world imports; done once, by the process that ranks are forked from (``world.py``)."""

from vcpo_megatron.learner import platform

platform.prepare()

from vcpo_megatron.learner import checkpoint, convert, parallel, step, training, weights  # noqa: E402, F401
