"""The tool that makes the example's starting checkpoint, and the checkpoint that ships."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.modular_sum import draw_heldout, read_prompts
from vcpo_megatron.environments.registry import make_environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "modular_sum_cpu"


def load_tool():
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools" / "make_tiny_model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return load_tool()


@pytest.fixture(autouse=True)
def restore_torch():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tool, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert tool.main(["--out", str(tmp_path / name), "--seed", seed, "--steps", "3"]) == 0
    first, second, other = (contents(tmp_path / name) for name in "abc")
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    assert set(first) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_an_existing_folder_is_replaced_only_by_force(tool, tmp_path, capsys):
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine").write_text("precious")
    assert tool.main(["--out", str(out), "--steps", "0"]) == 2
    assert "exists; give another --out, or --force" in capsys.readouterr().err
    assert (out / "mine").read_text() == "precious"
    assert tool.main(["--out", str(out), "--steps", "0", "--force"]) == 0
    assert not (out / "mine").exists() and (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_dimensions_are_arguments(tool, tmp_path):
    arguments = ["--steps", "0", "--layers", "4", "--hidden", "32", "--ffn", "40", "--heads", "8", "--kv-heads", "4"]
    assert tool.main(["--out", str(tmp_path / "deep"), *arguments]) == 0
    config = json.loads((tmp_path / "deep" / "config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert [config[name] for name in names] == [4, 32, 40, 8, 4]


@pytest.mark.parametrize("arguments", [["--layers", "1"], ["--hidden", "32", "--heads", "2"], None])
def test_every_token_has_an_embedding(tool, tmp_path, arguments):
    """The end of an answer, too, although it fills what is padded: None is the model that ships."""
    folder = tmp_path / "model" if arguments else EXAMPLE / "model"
    if arguments:
        assert tool.main(["--out", str(folder), "--steps", "0", *arguments]) == 0
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert len(weight) == 12 and weight.norm(dim=1).min() > 0.2
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<eos>"


def test_heldout_prompts_are_written_once_and_then_read(tool, tmp_path, capsys):
    path = tmp_path / "heldout.jsonl"
    assert tool.heldout_prompts(path, 3) == [tuple(map(int, text)) for text in draw_heldout(3, 8)]
    assert tool.heldout_prompts(path, 4) == tool.heldout_prompts(path, 3)
    path.write_text('{"prompt": "1"}\n')
    assert tool.main(["--out", str(tmp_path / "model"), "--heldout", str(path)]) == 2
    assert f"{path}: line 1" in capsys.readouterr().err


def test_warm_up_data_adds_wrongly_as_described(tool):
    avoid = {(0,) * 8}
    data = tool.FaultyAdder(0, avoid)
    tokens = data.batch(20000)
    assert tokens.shape == (20000, 17) and (tokens[:, 8] == 10).all()
    first, second = tokens[:, :2].sum(1) % 10, tokens[:, 10]
    clean = tokens[:, 9] == tokens[:, 0]  # the first addition, to 0, is right
    pairs = torch.stack([tokens[:, 0], tokens[:, 1]], dim=1)
    excess = (second - first) % 10
    slipping = 0
    for left in range(10):
        if not clean[tokens[:, 0] == left].float().mean() > 0.9:
            continue
        for right in range(10):
            chosen = excess[(pairs == torch.tensor([left, right])).all(1) & clean]
            rate = (chosen == 1).float().mean().item()
            slipping += rate > 0.2
            assert rate < 0.03 or 0.3 < rate < 0.6
            assert ((chosen != 0) & (chosen != 1)).float().mean() < 0.06
    assert 5 < slipping < 50


def test_warm_up_avoids_the_heldout_prompts(tool):
    seen = set(map(tuple, tool.FaultyAdder(0, set()).batch(64)[:, :8].tolist()))
    other = tool.FaultyAdder(0, seen).batch(64)[:, :8].tolist()
    assert seen.isdisjoint(map(tuple, other))


def test_the_shipped_model_is_small_and_starts_where_it_should(tool):
    folder = EXAMPLE / "model"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.architectures == ["Qwen2ForCausalLM"] and model.dtype == torch.float32
    assert 60_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 250_000
    assert not model.config.tie_word_embeddings
    prompts = [tuple(map(int, text)) for text in read_prompts(EXAMPLE / "heldout.jsonl", 8)]
    assert len(prompts) == 512
    torch.set_num_threads(1)
    assert 0.20 <= tool.sampled_accuracy(model, prompts, seed=1, repeats=8) <= 0.32


def test_the_shipped_tokenizer_is_one_token_a_character_everywhere():
    folder = EXAMPLE / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("0123456789=")["input_ids"] == list(range(11))
    assert (tokenizer.eos_token_id, len(tokenizer)) == (11, 12)
    assert tokenizer.decode([3, 1, 10, 4]) == "31=4"
    messages = [{"role": "user", "content": "123"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == "123="
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))  # what rollout and environments load
    assert plain.encode("0123456789=").ids == list(range(11)) and plain.decode([3, 1, 10, 4]) == "31=4"
    with pytest.raises(Exception, match="UNK"):
        plain.encode("1a")


def test_the_shipped_example_validates():
    settings = EnvironmentConfig(name="modular_sum", heldout=EXAMPLE / "heldout.jsonl")
    environment = make_environment(settings, EXAMPLE / "model", 0)
    assert len(environment.heldout()) == 512
    assert environment.prompt_tokens("31415926") == (3, 1, 4, 1, 5, 9, 2, 6, 10)
