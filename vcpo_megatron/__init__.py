"""vcpo_megatron: asynchronous RL for LLMs on Megatron-core, stable far off-policy (VCPO)."""

__version__ = "0.1.0"
