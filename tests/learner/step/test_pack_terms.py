"""Sums over the sampled tokens of a pack."""

from __future__ import annotations

import math
from typing import Any

import torch

from vcpo_megatron.learner.batch.packing import Share, make_pack
from vcpo_megatron.learner.step.pack_terms import PackTerms

from .test_batch_state import samples_of_groups, state_of


def test_what_is_masked_is_in_no_sum() -> None:
    """Two answers of two sampled tokens each, behind prompts of one token, which has no label; and padding."""
    (group,) = samples_of_groups((1.0, 0.0))
    pack = make_pack(group, Share(multiple=8), torch.device("cpu"))
    assert pack.mask.tolist() == [True] * 4 + [False] * 4
    terms: Any = PackTerms.__new__(PackTerms)
    per_token = torch.tensor([1.0, 2.0, 4.0, 8.0] + [math.nan] * 4)
    assert float(terms.normalized(state_of((1.0, 0.0)), pack, per_token)) == 15 / 4  # c_i = 1 / (2 answers 2 tokens)
