#!/usr/bin/env python3
"""Makes the starting checkpoint of examples/modular_sum_cpu: a tiny Qwen2 that adds badly.

The result is an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer.json,
tokenizer_config.json, generation_config.json), with random weights warmed up by supervised learning
on *wrong* running sums: for a fixed 30 % of the pairs (running sum, next digit) the next sum is one
too high with probability 0.45, and 2 % of the written tokens are uniform noise. The model so knows
the shape of the task and solves it about one time in four, which leaves the rest to reinforcement
learning. Only the last digit is rewarded there; the wrong table is never told.

    python tools/make_tiny_model.py --out /tmp/model
    python tools/make_tiny_model.py --out /tmp/deep --layers 4 --steps 0      # random weights, for layouts

On one machine the same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vcpo_megatron.environments.base import EnvironmentSetupError  # noqa: E402
from vcpo_megatron.environments.modular_sum import draw_heldout, read_prompts, write_prompts  # noqa: E402

DIGITS = 8
MODULUS = 10
EQUALS = 10
EOS = 11
VOCABULARY = {**{str(digit): digit for digit in range(10)}, "=": EQUALS, "<eos>": EOS}
#: What a user writes is the digits; the generation prompt is the "=" that asks for the sum.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Dimensions of the model; ``heads`` and ``kv_heads`` bound the tensor parallelism it allows."""

    hidden: int = 64
    ffn: int = 192
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    context: int = 64


def tokenizer_files() -> dict[str, str]:
    """Name -> content of the tokenizer's files: one token a character, anything else is an error."""
    characters = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    eos = {
        "id": EOS,
        "content": "<eos>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eos],
        "normalizer": None,
        "pre_tokenizer": characters,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<unk>"},
    }
    settings = {  # without "unk_token": None transformers adds a thirteenth token for Qwen2
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=1) + "\n",
    }


def build_model(size: Size, seed: int) -> Qwen2ForCausalLM:
    """Random float32 Qwen2 with untied embeddings; changes torch's global seed."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,  # the embedding of one would be a row of zeros, which no training changes
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).float().eval()


class FaultyAdder:
    """Draws the warm-up data: prompts and running sums with the errors described above."""

    def __init__(self, seed: int, avoid: set[tuple[int, ...]]) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._avoid = avoid
        pairs = MODULUS * MODULUS
        wrong = torch.randperm(pairs, generator=self._generator)[: pairs * 3 // 10]
        self._wrong = torch.zeros(pairs, dtype=torch.bool).index_fill_(0, wrong, True).view(MODULUS, MODULUS)

    def _digits(self, count: int) -> torch.Tensor:
        while True:
            digits = torch.randint(MODULUS, (count, DIGITS), generator=self._generator)
            if self._avoid.isdisjoint(map(tuple, digits.tolist())):
                return digits

    def batch(self, count: int) -> torch.Tensor:
        """int64 [count, 2 * DIGITS + 1]: digits, "=", faulty running sums."""
        digits = self._digits(count)
        total = torch.zeros(count, dtype=torch.long)
        answer = []
        for position in range(DIGITS):
            digit = digits[:, position]
            slips = self._wrong[total, digit] & (torch.rand(count, generator=self._generator) < 0.45)
            total = (total + digit + slips) % MODULUS
            noise = torch.randint(MODULUS, (count,), generator=self._generator)
            answer.append(torch.where(torch.rand(count, generator=self._generator) < 0.02, noise, total))
        return torch.cat([digits, torch.full((count, 1), EQUALS), torch.stack(answer, dim=1)], dim=1)


def warm_up(model: Qwen2ForCausalLM, data: FaultyAdder, steps: int, lr: float, batch: int) -> None:
    """Supervised learning on the answers alone, AdamW, learning rate falling linearly to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - 0.9 * step / steps)
        tokens = data.batch(batch)
        logits = model(input_ids=tokens[:, :-1]).logits[:, DIGITS:]
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, DIGITS + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def sampled_accuracy(model: Qwen2ForCausalLM, prompts: list[tuple[int, ...]], seed: int, repeats: int = 4) -> float:
    """Share of right last digits when every prompt is answered ``repeats`` times at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.tensor(prompts).repeat(repeats, 1)
    tokens = torch.cat([digits, torch.full((len(digits), 1), EQUALS)], dim=1)
    for _ in range(DIGITS):
        probabilities = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return (tokens[:, -1] == digits.sum(1) % MODULUS).double().mean().item()


def save(model: Qwen2ForCausalLM, out: Path) -> None:
    """Write the folder whole or not at all."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    model.generation_config.do_sample = True
    model.save_pretrained(temporary)
    (temporary / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    for name, content in tokenizer_files().items():
        (temporary / name).write_text(content)
    if out.exists():
        shutil.rmtree(out)
    os.replace(temporary, out)


def heldout_prompts(path: Path | None, seed: int) -> list[tuple[int, ...]]:
    """Prompts of ``path``; without a path, or before the file exists, the generator's (then written there)."""
    if path is not None and path.exists():
        texts = read_prompts(path, DIGITS)
    else:
        texts = draw_heldout(seed, DIGITS)
        if path is not None:
            write_prompts(path, texts)
    return [tuple(map(int, text)) for text in texts]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: python tools/make_tiny_model.py --out /tmp/model"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace the folder when it exists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", type=Path, help="JSONL of prompts to measure on; drawn and written when missing")
    parser.add_argument("--steps", type=int, default=300, help="supervised steps; 0 leaves the weights random")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=128)
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args(arguments)


def fail(message: str) -> int:
    print(f"make_tiny_model: error: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.out.exists() and not args.force:
        return fail(f"{args.out} exists; give another --out, or --force to replace it")
    torch.set_num_threads(1)  # sums in another order give other bytes
    torch.use_deterministic_algorithms(True)
    try:
        prompts = heldout_prompts(args.heldout, args.seed)
    except EnvironmentSetupError as error:
        return fail(str(error))
    model = build_model(Size(**{name: getattr(args, name) for name in vars(Size())}), args.seed)
    warm_up(model, FaultyAdder(args.seed + 1, set(prompts)), args.steps, args.lr, args.batch)
    accuracy = sampled_accuracy(model, prompts, args.seed)
    save(model, args.out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {parameters:,} parameters, sampled accuracy {accuracy:.3f} on {len(prompts)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
