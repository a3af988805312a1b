"""Log-probs of prompts by transformers itself: the reference that a converted model is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..models.tokenizer import TokenizerError, encode_text, load_tokenizer
from .errors import ConversionError

#: Log-probs that rounding explains.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def reference_logprobs(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 [L - 1] for each prompt of L tokens: log-probs of tokens 1..L-1, in the dtype of the folder.

    To be called before the learner has prepared this process for Megatron: on CPUs that replaces functions of torch
    which transformers builds models by.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except Exception as error:  # fault boundary: whatever a foreign configuration makes another library raise
        raise ConversionError(f"transformers cannot load {folder} ({type(error).__name__}: {error})") from None
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor(prompt, dtype=torch.int64)
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            found.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    return found


def read_prompts(path: Path | None, tokenizer_folder: Path, vocab_size: int, longest: int) -> list[list[int]]:
    """Token ids of every prompt of a JSON-lines file ({"text": ...} or {"tokens": [...]}), or a fixed few.

    A prompt has 2 to ``longest`` tokens below ``vocab_size``. ConversionError names the file, the line and its fault.
    """
    if path is None:
        return [[(7919 * i + 31 * start) % vocab_size for i in range(min(16, longest))] for start in range(3)]
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a mark
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read ({error})") from None
    prompts = [
        _prompt(line, f"{path}:{number}", tokenizer_folder, vocab_size, longest)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConversionError(f"{path} holds no prompt")
    return prompts


def _prompt(line: str, place: str, tokenizer_folder: Path, vocab_size: int, longest: int) -> list[int]:
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{place}: no JSON ({error})") from None
    if not isinstance(prompt, dict) or len({"text", "tokens"} & prompt.keys()) != 1:
        raise ConversionError(f'{place}: expected an object with either "text" or "tokens"')
    if "text" in prompt and not isinstance(prompt["text"], str):
        raise ConversionError(f'{place}: "text" is {_shown(prompt["text"])}, not a string')
    tokens = prompt["tokens"] if "tokens" in prompt else _encode(tokenizer_folder, prompt["text"], place)
    if not isinstance(tokens, list):
        raise ConversionError(f'{place}: "tokens" is {_shown(tokens)}, not a list of token ids')
    for at, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ConversionError(f"{place}: token {at} is {_shown(token)}, not an id from 0 to {vocab_size - 1}")
    if not 2 <= len(tokens) <= longest:
        raise ConversionError(f"{place}: {len(tokens)} tokens, where 2 to {longest} are needed")
    return tokens


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _encode(folder: Path, text: str, place: str) -> list[int]:
    try:
        return encode_text(load_tokenizer(folder / "tokenizer.json"), text)
    except TokenizerError as error:
        raise ConversionError(f"{place}: {error}") from None
