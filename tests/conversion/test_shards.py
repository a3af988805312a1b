"""HF -> tensor-parallel shards -> HF on tiny random models of every family, made by transformers itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.families.registry import open_model
from vcpo_megatron.conversion.hf import HFFolder
from vcpo_megatron.conversion.ops import joined
from vcpo_megatron.conversion.shards import load_shard, unconsumed
from vcpo_megatron.conversion.table import OUTPUT, Family, ModelShape

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PADDED = 48

MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=10)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama-mha": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 6}, head_dim=6)),
}


@dataclass
class Opened:
    folder: HFFolder
    family: Family
    shape: ModelShape

    def shards(self, tp: int, padded: int = PADDED) -> dict[str, list[Tensor]]:
        """Every parameter's shards of all ranks."""
        names = self.family.megatron_names(self.shape)
        ranks = [dict(load_shard(self.folder, self.family, self.shape, names, r, tp, padded)) for r in range(tp)]
        return {name: [rank[name] for rank in ranks] for name in names}


def make(kind: str, path: Path, **save: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    model_class, config = MODELS[kind]
    model = model_class(config)
    for parameter in model.parameters():  # biases and norms start as constants: a mix-up must show
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path, **save)
    return model


def opened(path: Path) -> Opened:
    folder = HFFolder(path)
    return Opened(folder, *open_model(folder.config))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in MODELS:
        make(kind, root / kind)
    return root


@pytest.fixture
def qwen2(saved, tmp_path) -> Path:
    """A Qwen2 folder to damage."""
    return Path(shutil.copytree(saved / "qwen2", tmp_path / "qwen2"))


def edit(path: Path, **changes: Tensor | None) -> None:
    """Replace (None: remove) tensors of a folder; ``__`` stands for a dot."""
    tensors = load_file(path / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_is_bit_equal_and_complete(saved, kind, tp):
    model = opened(saved / kind)
    back: dict[str, Tensor] = {}
    for name, shards in model.shards(tp).items():
        for hf_name, tensor in model.family.to_hf(name, shards, model.shape):
            assert hf_name not in back, "written twice"
            back[hf_name] = tensor
    original = load_file(saved / kind / "model.safetensors")
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor), name
    assert unconsumed(model.folder, model.family, model.shape) == {}


@pytest.mark.parametrize("kind", MODELS)
def test_shards_put_together_along_partition_dim_are_the_unsharded_parameter(saved, kind):
    model = opened(saved / kind)
    whole, halves = model.shards(1), model.shards(2)
    for name, (full,) in whole.items():
        dim = model.family.partition_dim(name)
        if dim is None:
            assert torch.equal(halves[name][0], full) and torch.equal(halves[name][1], full)
        elif name.endswith("linear_fc1.weight"):  # [gate_r; up_r] on every rank: halves of each, by the definition
            gate, up = full.chunk(2)
            for rank, half in enumerate(halves[name]):
                assert torch.equal(half, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
        else:
            assert torch.equal(torch.cat(halves[name], dim=dim), full), name
        assert all(half.is_contiguous() for half in halves[name])


def test_which_parameters_are_cut_and_where(saved):
    """Literal: Megatron's column-parallel layers are cut by rows, its row-parallel ones by columns."""
    model = opened(saved / "qwen3")
    layer = "decoder.layers.0."
    expected: dict[str, tuple[int | None, list[int]]] = {  # dimension, shape of a rank's part at TP 2
        "embedding.word_embeddings.weight": (0, [24, 24]),
        layer + "input_layernorm.weight": (None, [24]),
        layer + "self_attention.linear_qkv.weight": (0, [50, 24]),
        layer + "self_attention.q_layernorm.weight": (None, [10]),
        layer + "self_attention.k_layernorm.weight": (None, [10]),
        layer + "self_attention.linear_proj.weight": (1, [24, 30]),
        layer + "pre_mlp_layernorm.weight": (None, [24]),
        layer + "mlp.linear_fc1.weight": (0, [20, 24]),
        layer + "mlp.linear_fc2.weight": (1, [24, 10]),
        "decoder.final_layernorm.weight": (None, [24]),
        OUTPUT: (0, [24, 24]),
    }
    shards = model.shards(2)
    assert {name for name in shards if ".layers." not in name or layer in name} == expected.keys()
    for name, (dim, size) in expected.items():
        assert (model.family.partition_dim(name), list(shards[name][1].shape)) == (dim, size), name
    qwen2 = opened(saved / "qwen2").shards(2)
    assert list(qwen2[layer + "self_attention.linear_qkv.bias"][0].shape) == [20]


def test_qkv_rows_lie_by_query_group(saved):
    model = opened(saved / "qwen3")
    hf = load_file(saved / "qwen3" / "model.safetensors")
    q, k, v = (hf[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    # Two key heads of 10 rows, three query heads each: [q0 q1 q2 k0 v0 | q3 q4 q5 k1 v1]
    expected = torch.cat([q[:30], k[:10], v[:10], q[30:], k[10:], v[10:]])
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(model.shards(1)[name][0], expected)
    # A group is a rank's share at TP 2; at TP 4 a share is half a group, as Megatron lays it out.
    assert torch.equal(model.shards(2)[name][1], expected[50:])
    assert torch.equal(model.shards(4)[name][2], expected[50:75])


def test_vocabulary_is_padded_with_zero_rows(saved):
    model = opened(saved / "llama")
    hf = load_file(saved / "llama" / "model.safetensors")
    first, second = model.shards(2)[OUTPUT]
    assert first.shape == second.shape == (24, 24)
    assert torch.equal(first, hf["lm_head.weight"][:24])
    assert torch.equal(second[:13], hf["lm_head.weight"][24:])
    assert second[13:].abs().max() == 0
    # A rank may hold padding only.
    assert opened(saved / "llama").shards(4, padded=80)[OUTPUT][3].abs().max() == 0


def test_padding_never_comes_back(saved):
    model = opened(saved / "llama")
    shards = [torch.full_like(shard, 7.0) for shard in model.shards(2)[OUTPUT]]
    ((name, tensor),) = model.family.to_hf(OUTPUT, shards, model.shape)
    assert name == "lm_head.weight" and tensor.shape == (37, 24)


def test_tied_output_layer_is_made_of_the_embedding_and_exports_nothing(saved):
    model = opened(saved / "qwen2-tied")
    assert model.shape.tie_word_embeddings and OUTPUT not in model.family.megatron_names(model.shape)
    # The last of several pipeline stages holds a copy of its own.
    ((_, shard),) = load_shard(model.folder, model.family, model.shape, [OUTPUT], 1, 2, PADDED)
    assert torch.equal(shard, model.shards(2)["embedding.word_embeddings.weight"][1])
    assert list(model.family.to_hf(OUTPUT, [shard, shard], model.shape)) == []


def test_stages_are_loaded_separately_and_in_order(saved):
    model = opened(saved / "qwen2")
    wanted = ["decoder.layers.2.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"]
    loaded = list(load_shard(model.folder, model.family, model.shape, iter(wanted), 0, 1, PADDED))
    assert [name for name, _ in loaded] == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_file_is_kept(tmp_path, dtype):
    make("qwen2", tmp_path).to(dtype).save_pretrained(tmp_path)
    assert {s.dtype for shards in opened(tmp_path).shards(2).values() for s in shards} == {dtype}


def test_several_files_with_an_index(tmp_path):
    make("qwen3", tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = opened(tmp_path)
    whole = opened_single(tmp_path / "single", model)
    for name, (shard,) in model.shards(1).items():
        assert torch.equal(shard, whole.shards(1)[name][0])


def opened_single(path: Path, model: Opened) -> Opened:
    make("qwen3", path)
    return replace(model, folder=HFFolder(path))


def test_all_missing_tensors_are_named_before_any_is_read(qwen2):
    edit(qwen2, model__layers__0__mlp__up_proj__weight=None, model__layers__2__self_attn__k_proj__bias=None)
    model = opened(qwen2)
    message = r"misses 2 tensors: model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.2\.self_attn\.k_proj\.bias"
    with pytest.raises(ConversionError, match=message):
        load_shard(model.folder, model.family, model.shape, model.family.megatron_names(model.shape), 0, 1, PADDED)
    with pytest.raises(ConversionError, match=message):
        unconsumed(model.folder, model.family, model.shape)


def test_wrong_shape_is_named(qwen2):
    edit(qwen2, model__norm__weight=torch.zeros(25))
    model = opened(qwen2)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight is \[25\], expected \[24\]"):
        load_shard(model.folder, model.family, model.shape, ["decoder.final_layernorm.weight"], 0, 1, PADDED)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_refused_by_name(qwen2, bad):
    weight = torch.zeros(24, 20)
    weight[3, 4] = bad
    edit(qwen2, model__layers__1__mlp__down_proj__weight=weight)
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds 1 nan or infinite"):
        opened(qwen2).shards(1)


def test_quantised_weights_are_refused_by_name(qwen2):
    edit(qwen2, model__layers__1__mlp__down_proj__weight=torch.zeros(24, 20, dtype=torch.float8_e4m3fn))
    with pytest.raises(ConversionError, match=r"down_proj\.weight is torch\.float8_e4m3fn"):
        opened(qwen2).shards(1)


def test_tensors_without_a_place_are_refused(qwen2):
    edit(qwen2, model__layers__0__self_attn__o_proj__bias=torch.zeros(24))
    model = opened(qwen2)
    with pytest.raises(ConversionError, match=r"holds 1 tensors .* model\.layers\.0\.self_attn\.o_proj\.bias"):
        unconsumed(model.folder, model.family, model.shape)


def test_layers_beyond_the_configuration_are_refused(qwen2):
    edit_config(qwen2, num_hidden_layers=2, layer_types=None)
    model = opened(qwen2)
    with pytest.raises(ConversionError, match=r"with 2 layers does not have: model\.layers\.2\."):
        unconsumed(model.folder, model.family, model.shape)
    with pytest.raises(ConversionError, match=r"layers\.2\.mlp.*has 2 layers"):
        load_shard(model.folder, model.family, model.shape, ["decoder.layers.2.mlp.linear_fc2.weight"], 0, 1, PADDED)


def test_skipped_tensors_have_a_reason(saved, tmp_path):
    tied = Path(shutil.copytree(saved / "qwen2-tied", tmp_path / "tied"))
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    edit(tied, lm_head__weight=embedding.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))
    model = opened(tied)
    assert unconsumed(model.folder, model.family, model.shape) == {
        "lm_head.weight": "tied to the embedding",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "computed from rope_theta",
    }
    edit(tied, lm_head__weight=embedding + 1)
    model = opened(tied)
    with pytest.raises(ConversionError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        unconsumed(model.folder, model.family, model.shape)


def test_unknown_parameter_and_bad_layouts(saved):
    model = opened(saved / "llama")
    arguments = model.folder, model.family, model.shape
    with pytest.raises(ConversionError, match=r"no conversion .* decoder\.layers\.0\.self_attention\.linear_qkv\.bias"):
        load_shard(*arguments, ["decoder.layers.0.self_attention.linear_qkv.bias"], 0, 1, PADDED)
    with pytest.raises(ConversionError, match="rank 2 is not one of 2"):
        load_shard(*arguments, [OUTPUT], 2, 2, PADDED)
    for padded in (36, 49):
        with pytest.raises(ConversionError, match=f"padded vocabulary of {padded} rows"):
            load_shard(*arguments, [OUTPUT], 0, 2, padded)
    with pytest.raises(ConversionError, match="cannot be cut into 3"):
        dict(load_shard(*arguments, ["decoder.layers.0.mlp.linear_fc1.weight"], 0, 3, PADDED))


def test_export_of_wrong_shards_is_refused(saved):
    model = opened(saved / "qwen2")
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    one_of_two = model.shards(2)[name][:1]
    with pytest.raises(ConversionError, match=r"down_proj\.weight of shape \[24, 10\], expected \[24, 20\]"):
        list(model.family.to_hf(name, one_of_two, model.shape))


def test_a_whole_shard_is_not_copied_and_a_part_keeps_nothing_alive() -> None:
    shard = torch.arange(12.0).view(6, 2)
    assert joined([shard]).data_ptr() == shard.data_ptr()
    for parts in ([shard[:4]], [shard[:4], shard[4:]]):
        found = joined(parts)
        assert found.untyped_storage().nbytes() == found.nbytes and found.data_ptr() != shard.data_ptr()
        assert found.tolist() == shard[: len(found)].tolist()
