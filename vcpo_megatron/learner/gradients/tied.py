"""Input and output embedding as one parameter: |E_i + W_i|^2 = |E_i|^2 + |W_i|^2 + 2 <E_i, W_i>.

E_i has rows for the trajectory's own tokens only, so only these rows of the output layer's W_i are formed
once more. With pipeline stages they travel from the last stage to the first, from host to host, in the order of the
backwards: what the last stage sends in its backward must not wait on the device for the first stage's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..megatron import platform
from .pack_scores import PackScores


@dataclass(frozen=True)
class TokenPairs:
    """Distinct (trajectory, token id) of a pack in this rank's part of the vocabulary, sorted.

    owner, token  int64 [P]  trajectory; row of the embedding's shard
    tokens        int64      which tokens of all context-parallel ranks they come from
    inverse       int64      the pair of each of these tokens
    starts        ints [n+1] trajectory i's pairs are starts[i] to starts[i+1]
    """

    owner: Tensor
    token: Tensor
    tokens: Tensor
    inverse: Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(cls, scores: PackScores, first: int, rows: int) -> TokenPairs:
        """Pairs for vocabulary rows ``first`` to ``first + rows``, from the tokens that the host knows."""
        pack = scores.pack
        ids, real = pack.all_tokens - first, pack.all_segments < len(pack.samples)
        mine = np.flatnonzero((ids >= 0) & (ids < rows) & real)
        trajectory = pack.all_segments[mine] + pack.offset
        pairs, inverse = np.unique(trajectory * rows + ids[mine], return_inverse=True)
        owner, token = pairs // rows, pairs % rows
        starts = np.searchsorted(owner, np.arange(scores.n + 1))
        # one copy for all of them
        sizes = [len(owner), len(token), len(mine), len(inverse)]
        joined = torch.from_numpy(np.concatenate([owner, token, mine, inverse.reshape(-1)]).astype(np.int64))
        on_device = platform.to_device(joined, pack.tokens.device).split(sizes)
        return cls(on_device[0], on_device[1], on_device[2], on_device[3], tuple(starts.tolist()))


def token_pairs(scores: PackScores, first: int, rows: int) -> TokenPairs:
    """``TokenPairs.of``, made once a pack."""
    if (first, rows) not in scores.token_pairs:
        scores.token_pairs[first, rows] = TokenPairs.of(scores, first, rows)
    return scores.token_pairs[first, rows]


def send_tied_rows(scores: PackScores, inputs: Tensor, grads: Tensor) -> None:
    """Rows of every W_i = G_i^T A_i that E_i will meet, fp32 [P, d]: for this rank or for the first stage.

    inputs A [T, d], grads G [T, V / tp]. Under context parallelism W_i is a summand, and so is its
    product with the whole E_i.
    """
    parallel, rows = scores.parallel, scores.dense_tokens.local
    pairs = token_pairs(scores, parallel.tensor_rank * grads.shape[1], grads.shape[1])
    out = inputs.new_empty(len(pairs.token), inputs.shape[1], dtype=torch.float32)
    for i in range(scores.n)[scores.own]:
        of_i = slice(pairs.starts[i], pairs.starts[i + 1])
        picked = grads[rows.rows(i)][:, pairs.token[of_i]]
        out[of_i] = picked.float().t() @ inputs[rows.rows(i)].float()
    if parallel.pipeline_size == 1:
        scores.tied = out
    elif len(out):
        assert scores.exchange is not None
        first = parallel.stage_global_rank(0)
        scores.exchange.send(platform.start_read(out), [first], parallel.tied_group, _name(scores))


def receive_tied_rows(scores: PackScores, pairs: TokenPairs, width: int) -> Tensor:
    """What ``send_tied_rows`` made of this pack: fp32 [P, width]."""
    parallel = scores.parallel
    if parallel.pipeline_size == 1:
        assert scores.tied is not None
        rows, scores.tied = scores.tied, None
        return rows
    shape, last = (len(pairs.token), width), parallel.stage_global_rank(parallel.pipeline_size - 1)
    if not len(pairs.token):
        return torch.empty(shape, dtype=torch.float32, device=pairs.token.device)
    assert scores.exchange is not None
    arriving = scores.exchange.receive(shape, torch.float32, last, parallel.tied_group, _name(scores))
    return platform.to_device(arriving.wait(), pairs.token.device)


def _name(scores: PackScores) -> str:
    numbers = scores.pack.step_index
    return f"rows of the tied output layer's gradient of trajectories {numbers} of the batch, from the last stage"
