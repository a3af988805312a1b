"""The distributed optimizer's state in a checkpoint that any layout reads, without any rank ever holding more than its
own part of it.

A rank of the distributed optimizer holds, of every parameter that it steps some of, one range of the parameter laid
flat, and of that range the fp32 parameter and Adam's two moments. In a checkpoint the state of a parameter has the
parameter's own shape, which is what makes it free of the layout. Megatron 0.16 gets from one to the other by gathering
the whole state on every data-parallel rank, 12 bytes a parameter, at a save and at a load ("fully_reshardable"); its
format without a gather stays within one tensor and pipeline split ("dp_reshardable"), and the one that named ranges of
flat parameters it does not write any more ("fully_sharded_model_space").

A range of a tensor laid flat is a few boxes of the tensor: of a matrix the end of a row, whole rows, and the beginning
of one. Each box is a shard of its own here, a view of the state, so a save needs the staging copy alone and a load
writes into the state itself. Names and shapes in the checkpoint are those of "fully_reshardable": each reads the other.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

#: What is stored of a range: the fp32 parameter and Adam's moments. The count of steps is the parameter group's.
STATES = ("param", "exp_avg", "exp_avg_sq")
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """(offset, size) of boxes of a tensor of ``shape`` that together are its elements ``start`` to ``stop`` - 1 in row
    order, each of them a run of that order, one after another: 2 d - 1 at most for d dimensions."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
        for offset, size in boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *size)
        return
    if start < first * row:
        for offset, size in boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *offset), (1, *size)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for offset, size in boxes(shape[1:], 0, stop - last * row):
            yield (last, *offset), (1, *size)


def shard_without_gathering(optimizer: MegatronOptimizer) -> None:
    """Have every distributed optimizer in ``optimizer`` save and load "fully_reshardable" state by boxes."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            part.sharded_param_state_fully_reshardable = types.MethodType(_shards, part)
            part.load_parameter_state_from_fully_reshardable = types.MethodType(_take, part)


def _shards(
    self: Any, model_sharded_state_dict: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[str, ShardedTensor]:
    """The shards of this rank by a name that ``_take`` finds them by; their data are views of the state."""
    entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    stored = {entry.data: entry for entry in nested_values(entries)}
    found = {}
    for number, (parameter, start, stop) in enumerate(_ranges(self)):
        states = self._get_main_param_and_optimizer_states(parameter)
        for key in STATES:
            flat = states[key].detach()
            for whole, begin in _stored_parts(stored[parameter], parameter, f"optimizer.state.{key}"):
                at = max(start, begin)
                end = min(stop, begin + math.prod(whole.local_shape))
                for offset, size in boxes(whole.local_shape, at - begin, end - begin):
                    data = flat[at - start : at - start + math.prod(size)]
                    found[f"{number}.{key}.{at - start}"] = _box(self, whole, offset, size, data)
                    at += math.prod(size)
    return found


def _take(self: Any, loaded: dict[str, Tensor]) -> None:
    """Into the state, where reading did not write there already: as ``_shards`` named it."""
    parameters = [parameter for parameter, _, _ in _ranges(self)]
    for name, value in loaded.items():
        number, key, at = name.split(".")
        flat = self._get_main_param_and_optimizer_states(parameters[int(number)])[key].detach()
        flat[int(at) : int(at) + value.numel()].copy_(value.reshape(-1))


def _ranges(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Every parameter of which this rank steps a part, and which elements of it."""
    for of_buffer in optimizer.gbuf_ranges:
        for of_buckets in of_buffer.values():
            for bucket in of_buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _stored_parts(entry: Any, parameter: Tensor, prefix: str) -> Iterator[tuple[ShardedTensor, int]]:
    """The shards that a parameter is stored as, named as optimizer state, and where each begins in it laid flat.

    A gated MLP's first matrix is two: gate and up.
    """
    entry = replace(entry, key=f"{prefix}.{entry.key}", data=parameter.detach())
    parts = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
    for part in parts:
        inside = part.data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not (inside and part.data.is_contiguous() and part.flattened_range is None):
            raise NotImplementedError(f"{part.key}: stored in parts that are no runs of the parameter")
        yield part, part.data.storage_offset() - parameter.storage_offset()


def _box(
    optimizer: Any, whole: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], data: Tensor
) -> ShardedTensor:
    """A box of ``whole`` as a shard of no regular grid. Axes that layers are stacked along have length 1 in it."""
    stacked = whole.prepend_axis_num
    local = (*(1 for _ in range(stacked)), *size)
    begin = (*(0 for _ in range(stacked)), *offset)
    return replace(
        whole,
        data=data.view(local),
        dtype=data.dtype,
        local_shape=local,
        global_offset=tuple(map(sum, zip(whole.global_offset, begin, strict=True))),
        axis_fragmentations=None,
        prepend_axis_num=0,
        # data-parallel ranks hold different boxes, no copies
        replica_id=(*whole.replica_id[:2], optimizer.distributed_optimizer_instance_id),
    )
