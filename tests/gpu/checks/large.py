"""More elements than 32 bits can number: what a kernel that counts in 32 bits would pass over in silence."""

from __future__ import annotations

from typing import Any

from tests.gpu.checklist import Found, Missed, Place, Skipped, require

#: Elements of a gradient buffer of 2.1 billion parameters.
LARGE, SMALL = 2**31 + 4099, 2**16 + 4099


def finite_gradients(place: Place) -> Found:
    """The learner's check of its gradients, on a buffer of Megatron's own: one element that is not finite is seen
    wherever it is, and the norm of all of them is right."""
    import torch
    from megatron.core import parallel_state  # noqa: F401 - before the parts of it that import one another
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from vcpo_megatron.learner.megatron.training import Trainable, squared_sum

    from .bench import Bench

    count = LARGE if place.large else SMALL
    _want_memory(count * (2 + 4) + 2**30)
    bench = Bench(place, "bfloat16")
    device = next(bench.trainable.chunks[0].parameters()).device

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device=device))

    config = bench.trainable.chunks[0].config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), One())
    trainable = Trainable((), (wrapped,), bench.trainable.optimizer, bench.trainable.schedule, *_model_of(bench))
    (gradient,) = [buffer.grad_data for buffer in wrapped.buffers]
    if not gradient.numel() >= count:
        raise Missed(f"the buffer has {gradient.numel():,} elements, the parameter {count:,}")
    gradient.zero_()
    gradient[:count].fill_(2.0**-16)
    unseen = [] if trainable.gradients_are_finite() else ["a finite gradient"]
    expected = count * 2.0**-32
    norm = abs(float(squared_sum([gradient])) / expected - 1)
    for at in (0, count // 2 + 1, count - 1):
        for value in (float("nan"), float("inf"), float("-inf")):
            kept = gradient[at].clone()
            gradient[at] = value
            if trainable.gradients_are_finite():
                unseen.append(f"{value} at {at:,}")
            gradient[at] = kept
    bench.close()
    if unseen:
        raise Missed(f"{count:,} elements: judged wrongly: {', '.join(unseen)}")
    return Found(f"{count:,} elements: 9 of 9 seen, {require(norm, 1e-12, 'squared sum')}", {"elements": count})


def _model_of(bench: Any) -> tuple[Any, Any]:
    return bench.trainable.family, bench.trainable.shape


def many_logits(place: Place) -> Found:
    """Log-probs, entropy and their gradient from logits of more than 2^31 elements: the first and last rows by fp64."""
    import torch
    import torch.distributed as dist

    from vcpo_megatron.learner.megatron.logprobs import token_logprobs

    from .bench import Bench

    vocabulary = 151936 if place.large else 251
    tokens = (LARGE if place.large else SMALL) // vocabulary + 3
    _want_memory(tokens * vocabulary * 4 + 2**31)
    bench = Bench(place, "bfloat16")
    device = next(bench.trainable.chunks[0].parameters()).device
    torch.manual_seed(2)
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device=device)
    for part in logits.split(512):  # no fp32 copy of all of them
        part.copy_(torch.randn(part.shape, device=device))
    ends = [slice(0, 4), slice(tokens - 4, tokens)]
    kept = [logits[rows].double() for rows in ends]  # a backward may write over its logits
    logits.requires_grad_()
    labels = torch.arange(tokens, device=device) % vocabulary
    group: dist.ProcessGroup = bench.parallel.tensor_group
    found, entropy = token_logprobs(logits, labels, 0.9, vocabulary, group)
    (gradient,) = torch.autograd.grad(found.sum() + 0.25 * entropy.sum(), logits)
    worst = {"log-prob": 0.0, "entropy": 0.0, "gradient": 0.0}
    for rows, exact in zip(ends, kept, strict=True):
        exact.requires_grad_()
        logs = torch.log_softmax(exact / 0.9, -1)
        own = logs.gather(1, labels[rows, None])[:, 0]
        spread = -(logs.exp() * logs).sum(-1)
        (expected,) = torch.autograd.grad(own.sum() + 0.25 * spread.sum(), exact)
        pairs = {
            "log-prob": (found[rows], own),
            "entropy": (entropy[rows], spread),
            "gradient": (gradient[rows], expected),
        }
        for name, (a, b) in pairs.items():
            worst[name] = max(worst[name], float((a.detach().double() - b.detach()).norm() / b.detach().norm()))
    bench.close()
    limits = {"log-prob": 1e-5, "entropy": 1e-5, "gradient": 0.01}
    text = ", ".join(require(worst[name], limit, name) for name, limit in limits.items())
    return Found(f"{tokens * vocabulary:,} logits: {text}", {"elements": tokens * vocabulary, **worst})


def _want_memory(wanted: int) -> None:
    """Skipped where the device has less memory left than ``wanted`` bytes."""
    import torch

    if not torch.cuda.is_available():
        return
    free, _ = torch.cuda.mem_get_info()
    if free < wanted:
        raise Skipped(f"needs {wanted / 2**30:.0f} GiB of the device's memory; {free / 2**30:.0f} GiB are free")
