"""Fused kernels of TransformerEngine and Apex, where they are installed, against what stands for them elsewhere."""

from __future__ import annotations

from tests.gpu.checklist import NEEDS_A_GPU, Found, Place, Skipped, require

from .steps import norm_difference, relative


def fused_adam(place: Place) -> Found:
    """Megatron's choice of Adam against torch's, five steps."""
    import torch

    from vcpo_megatron.learner.megatron import platform

    if platform.kernels().adam == "torch":
        raise Skipped("torch's Adam is the one in use")
    from megatron.core.optimizer import Adam

    start = torch.randn(1000, 37, device="cuda")
    ours, plain = (torch.nn.Parameter(start.clone()) for _ in range(2))
    keys = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pairs = [(ours, Adam([ours], adam_w_mode=True, **keys)), (plain, torch.optim.AdamW([plain], **keys))]
    for _ in range(5):
        gradient = torch.randn_like(start)
        for parameter, optimizer in pairs:
            parameter.grad = gradient.clone()
            optimizer.step()
    worst = float((ours - plain).detach().abs().max())
    return Found(require(worst, 1e-5, f"{platform.kernels().adam}'s Adam: parameter"))


def fused_weight_gradients(place: Place) -> Found:
    """Apex's kernel against a product in fp32."""
    import torch

    from vcpo_megatron.learner.megatron import platform
    from vcpo_megatron.learner.megatron.platform import add_product

    if not platform.kernels().adds_products:
        raise Skipped("Apex's kernel is not installed, or there is no GPU for it")
    inputs, grads = (torch.randn(777, d, device="cuda", dtype=torch.bfloat16) for d in (256, 384))
    total = torch.randn(384, 256, device="cuda")
    expected = total + grads.float().t() @ inputs.float()
    add_product(total, grads, inputs)
    return Found(require(float((total - expected).abs().max() / expected.abs().max()), 1e-4, "product"))


def transformer_engine(place: Place) -> Found:
    """A step with its attention over packs, and one with its matrices: norms and gradients of the local layers."""
    from vcpo_megatron.learner.megatron.layer_specs import engine_layers

    from .bench import Bench

    if not place.large:
        raise Skipped(NEEDS_A_GPU)
    try:
        engine_layers()
    except RuntimeError as error:
        raise Skipped(str(error)) from error
    found = []
    for model in ({}, {"core_attention": "transformer_engine"}, {"transformer_impl": "transformer_engine"}):
        bench = Bench(place, "bfloat16", **model)
        found.append(bench.gradient({}, 4096))
        bench.close()
    texts, figures = [], {}
    for name, (result, gradients) in zip(("attention", "matrices"), found[1:], strict=True):
        own = {"gradient": relative(gradients, found[0][1]), "norm": norm_difference(result, found[0][0])}
        figures[name] = own
        texts.append(f"{name}: " + ", ".join(require(value, 0.05, key) for key, value in own.items()))
    return Found("; ".join(texts), figures)
