"""Any causal language model of transformers, run on packed tokens against the slot cache.

transformers' own modelling code computes everything but attention, which is registered under the
name ``vcpo_packed``: the tokens of one forward are a flat row [1, T], first one token of each
running sequence (decode), then the whole prompts of new ones (prefill), and attention knows which
token belongs to which cache row.

Python overhead dominates a small model, so the forward is traced once (``torch.jit.trace``): the
same operators without the modules around them. Traces are checked against the untraced forward on
other shapes, and dropped when they differ (data-dependent control flow, for example). The untraced
forward is checked against stock transformers at load, so an architecture that does not go through
the attention interface is refused instead of being served wrongly.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .errors import ModelError

log = logging.getLogger(__name__)

ATTENTION = "vcpo_packed"


class Packed(NamedTuple):
    """Inputs of one forward; T = B decode tokens then the prefill tokens of N new sequences.

    ids, positions, rows   int64 [T]          token, position in its sequence, cache row
    mask                   [B, 1, 1, L]       0 where a decode token sees the cached position, else -inf (model dtype)
    pad                    int64 [N, P]       prefill token that stands in each padded place
    unpad                  int64 [T - B]      flat padded place of each prefill token
    keep                   int64 [K]          tokens whose logits are wanted
    """

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor
    pad: torch.Tensor
    unpad: torch.Tensor
    keep: torch.Tensor


class DecodeInputs(NamedTuple):
    """Inputs of a forward without prefill: the first four of ``Packed``."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    mask: torch.Tensor


class Computed(NamedTuple):
    """What a forward gives: logits, and where they are captured the experts int64 [T, layers, k] of all its tokens."""

    logits: torch.Tensor
    experts: torch.Tensor | None


class SlotAttention:
    """The attention function; ``bind`` gives it the inputs of the forward that is about to run."""

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self._inputs: Packed | DecodeInputs | None = None
        self._cache: list[torch.Tensor] = []

    def bind(self, inputs: Packed | DecodeInputs | None, cache: list[torch.Tensor]) -> None:
        """``inputs`` None records the key and value shapes of each layer instead (``shapes``)."""
        self._inputs, self._cache = inputs, cache

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, V]; returns [1, T, H, V]."""
        inputs = self._inputs
        if inputs is None:
            self._record(module, key, value, options)
            return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3]), None
        keys, values = self._cache[2 * module.layer_idx], self._cache[2 * module.layer_idx + 1]
        places = (inputs.rows, slice(None), inputs.positions)
        keys[places] = key[0].transpose(0, 1)
        values[places] = value[0].transpose(0, 1)
        batch, length = inputs.mask.shape[0], inputs.mask.shape[3]
        seen = (slice(batch), slice(None), slice(length))
        output = _decode(query[0, :, :batch], keys[seen], values[seen], inputs.mask, scaling)
        if isinstance(inputs, Packed):
            prefill = _prefill(query[0, :, batch:], key[0, :, batch:], value[0, :, batch:], inputs, scaling)
            output = torch.cat((output, prefill))
        return output[None], None

    def _record(self, module: Any, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
        """Refuses what this attention does not compute, and notes the layer's shape."""
        window = options.get("sliding_window")
        if window is not None and window < self.context_length:
            raise ModelError(
                f"attention with a sliding window of {window} is supported up to that context length only: "
                f"pass --context-length {window}"
            )
        for name in ("softcap", "s_aux"):
            if options.get(name) is not None:
                raise ModelError(f"attention with {name!r} is not supported")
        if key.shape[:3] != value.shape[:3]:
            raise ModelError("attention with other numbers of keys than values is not supported")
        self.shapes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """query [H, B, D], keys [B, Hkv, L, D], values [B, Hkv, L, V], mask [B, 1, 1, L]; returns [B, H, V].

    The heads of one key-value group are treated as queries of one head: nothing is repeated.
    """
    kv_heads = keys.shape[1]
    grouped = query.unflatten(0, (kv_heads, query.shape[0] // kv_heads)).permute(2, 0, 1, 3)
    spread = mask.expand(-1, 1, query.shape[0] // kv_heads, -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=spread, scale=scaling).flatten(1, 2)


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, inputs: Packed, scaling: float | None
) -> torch.Tensor:
    """query [H, S, D], key [Hkv, S, D], value [Hkv, S, V] of S prefill tokens; returns [S, H, V].

    Prompts are padded at the end, where causal attention of real tokens never looks.
    """
    groups = query.shape[0] // key.shape[0]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1)[inputs.pad].transpose(1, 2)

    keys, values = padded(key.repeat_interleave(groups, 0)), padded(value.repeat_interleave(groups, 0))
    output = F.scaled_dot_product_attention(padded(query), keys, values, is_causal=True, scale=scaling)
    return output.transpose(1, 2).flatten(0, 1)[inputs.unpad]


class RouterCapture:
    """Watches the routers of a model; ``take`` gives what the last forward chose.

    A layer without experts is answered with zeros, as SGLang answers it.
    """

    def __init__(self, model: Any) -> None:
        """ModelError when the model has no router that says which experts it chose."""
        self._chosen: dict[int, torch.Tensor] = {}
        layers = model.model.layers
        routers = {
            number: router
            for number, layer in enumerate(layers)
            if (router := getattr(layer.mlp, "gate", None)) is not None and hasattr(router, "top_k")
        }
        if not routers:
            raise ModelError("--enable-return-routed-experts: the model has no experts, or no routers that name them")
        self._layers = len(layers)
        for number, router in routers.items():
            router.register_forward_hook(self._watch(number))

    def _watch(self, number: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not isinstance(output, tuple) or len(output) != 3:
                raise ModelError(f"--enable-return-routed-experts: {type(module).__name__} does not name its experts")
            self._chosen[number] = output[2]

        return hook

    def take(self) -> torch.Tensor:
        """int64 [T, layers, k] of the T tokens of the last forward."""
        found, self._chosen = self._chosen, {}
        none = torch.zeros_like(next(iter(found.values())))
        return torch.stack([found.get(number, none) for number in range(self._layers)], dim=1)


class _PassThrough:
    """Stands where transformers expects a Cache: attention itself writes to the slots."""

    is_compileable = False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


class _Forward(torch.nn.Module):
    """The model as a function of plain tensors, in a form that can be traced."""

    def __init__(self, model: Any, attention: SlotAttention, packed: bool, routers: RouterCapture | None) -> None:
        super().__init__()
        self.model = model
        self.routers = routers
        self.attention = attention
        self.kind: type[Packed] | type[DecodeInputs] = Packed if packed else DecodeInputs
        names = inspect.signature(model.forward).parameters
        # transformers renamed the argument in version 5.
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    def forward(self, inputs: Any, cache: Any) -> tuple[torch.Tensor, ...]:
        """(logits,), or (logits, experts) where they are captured."""
        bound = self.kind(*inputs)
        self.attention.bind(bound, cache)
        logits = self.call(bound.ids, bound.positions, bound.keep if isinstance(bound, Packed) else 0)
        return (logits,) if self.routers is None else (logits, self.routers.take())

    def call(self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int) -> torch.Tensor:
        output = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=keep,
            return_dict=True,
            **{self.cache_name: _PassThrough()},
        )
        return output.logits[0]


@dataclass
class PackedModel:
    """A loaded model that answers ``decode`` and ``mixed``; made by ``build``.

    vocab_size is the number of logits; shapes are (kv_heads, dimensions of a key, of a value) a layer, for the
    cache.
    """

    model: Any
    vocab_size: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, int, int], ...]
    _decode: Any
    _mixed: Any

    def decode(self, inputs: DecodeInputs, cache: list[torch.Tensor]) -> Computed:
        """Logits [B, V] of one token a row; writes its keys and values."""
        return self._computed(self._decode(tuple(inputs), cache))

    def mixed(self, inputs: Packed, cache: list[torch.Tensor]) -> Computed:
        """Logits [K, V] at ``inputs.keep`` of decode and prefill tokens; writes keys and values."""
        return self._computed(self._mixed(tuple(inputs), cache))

    @staticmethod
    def _computed(found: tuple[torch.Tensor, ...]) -> Computed:
        return Computed(found[0], found[1] if len(found) > 1 else None)


def keep_fp32_logits(model: Any) -> None:
    """Have the output layer of a transformers model answer in float32, from hidden states and weights as they are.
    Before ``build``. ModelError when it is no linear layer without bias."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise ModelError(f"--enable-fp32-lm-head: the output layer is a {type(head).__name__} that it is not known for")
    head.forward = lambda hidden: hidden.float() @ head.weight.float().t()


def build(model: Any, context_length: int, *, routed_experts: bool = False) -> PackedModel:
    """Wraps a transformers model; ModelError when its architecture cannot be run exactly, or has no experts to
    return."""
    from transformers import AttentionInterface

    attention = SlotAttention(context_length)
    AttentionInterface.register(ATTENTION, attention)
    routers = RouterCapture(model) if routed_experts else None
    decode, mixed = (_Forward(model, attention, packed, routers) for packed in (False, True))
    with torch.inference_mode():
        probe = torch.arange(6) % model.config.vocab_size
        reference = model(input_ids=probe[None], use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION)
        attention.bind(None, [])
        mixed.call(probe[:2], torch.arange(2), 0)
        if routers is not None:
            routers.take()
        layers = sorted(attention.shapes)
        if not layers or layers != list(range(len(layers))):
            raise ModelError(f"only layers {layers} go through transformers' attention interface")
        shapes = tuple(attention.shapes[layer] for layer in layers)
        packed = PackedModel(model, reference.shape[-1], model.dtype, shapes, decode, mixed)
        _check_against_stock(packed, probe, reference)
        packed._decode, packed._mixed = _traced(packed, decode), _traced(packed, mixed)
    return packed


def _probe_inputs(packed: PackedModel, sizes: tuple[int, ...], batch: int) -> tuple[Packed, list[torch.Tensor]]:
    """A forward of ``batch`` decode tokens at position 1 and new prompts of ``sizes`` tokens, on an empty cache."""
    total = batch + sum(sizes)
    ids = torch.arange(total) % packed.vocab_size
    positions = torch.cat([torch.ones(batch, dtype=torch.int64), *(torch.arange(size) for size in sizes)])
    rows = torch.cat(
        [torch.arange(batch), torch.arange(batch, batch + len(sizes)).repeat_interleave(torch.tensor(sizes))]
    )
    mask = torch.full((batch, 1, 1, 32), float("-inf"), dtype=packed.dtype)
    mask[..., :2] = 0
    pad, unpad = padding(sizes)
    cache = [
        torch.zeros(batch + len(sizes), heads, 32, dim, dtype=packed.dtype)
        for heads, *dims in packed.shapes
        for dim in dims
    ]
    return Packed(ids, positions, rows, mask, pad, unpad, torch.arange(total)), cache


def padding(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices ``pad`` [N, P] and ``unpad`` [sum(sizes)] of ``Packed`` for prompts of ``sizes`` tokens."""
    lengths = torch.tensor(sizes)
    starts = lengths.cumsum(0) - lengths
    width = torch.arange(int(lengths.max()))
    inside = width < lengths[:, None]
    pad = torch.where(inside, starts[:, None] + width, 0)
    return pad, inside.flatten().nonzero()[:, 0]


def _check_against_stock(packed: PackedModel, probe: torch.Tensor, reference: torch.Tensor) -> None:
    """Prefill of all but the last token, then one decode step, must give stock transformers' logits."""
    size = len(probe) - 1
    inputs, cache = _probe_inputs(packed, (size,), 0)
    logits = packed.mixed(inputs._replace(ids=probe[:size]), cache).logits
    mask = torch.full((1, 1, 1, 32), float("-inf"), dtype=packed.dtype)
    mask[..., : size + 1] = 0
    step = DecodeInputs(probe[size:], torch.tensor([size]), torch.tensor([0]), mask)
    logits = torch.cat((logits, packed.decode(step, cache).logits)).float()
    tolerance = 1e-3 if packed.dtype == torch.float32 else 0.1
    difference = float((logits - reference).abs().max())
    if not difference <= tolerance * max(1.0, float(reference.abs().max())):
        raise ModelError(f"its logits differ from transformers' by {difference:.2g} under packed attention")


#: (prompt sizes, decode batch) on which traces must equal the untraced forward; the first one is traced.
_TRACE_SHAPES = (((3, 5), 2), ((4,), 3), ((2, 7, 1), 1), ((5, 5), 6))


def _traced(packed: PackedModel, forward: _Forward) -> Any:
    """A trace of ``forward``, or ``forward`` itself when a trace does not reproduce it on other shapes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs, cache = _forward_inputs(packed, forward, *_TRACE_SHAPES[0])
            trace = torch.jit.trace(forward, (inputs, cache), check_trace=False)
            same = all(_same(packed, forward, trace, sizes, batch) for sizes, batch in _TRACE_SHAPES)
    except (RuntimeError, ValueError, TypeError) as error:
        log.info("the model runs untraced: %s", error)
        return forward
    return trace if same else forward


def _forward_inputs(
    packed: PackedModel, forward: _Forward, sizes: tuple[int, ...], batch: int
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Arguments of ``forward``: a plain tuple of its inputs, and a cache."""
    inputs, cache = _probe_inputs(packed, sizes, batch)
    if forward.kind is Packed:
        return tuple(inputs), cache
    return (inputs.ids[:batch], inputs.positions[:batch], inputs.rows[:batch], inputs.mask), cache


def _same(packed: PackedModel, forward: _Forward, trace: Any, sizes: tuple[int, ...], batch: int) -> bool:
    """True when both give the same logits and write the same cache, bit for bit."""
    results = []
    for function in (forward, trace):
        inputs, cache = _forward_inputs(packed, forward, sizes, batch)
        results.append([*function(inputs, cache), *cache])
    return all(map(torch.equal, *results))
