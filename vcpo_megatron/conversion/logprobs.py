"""Log-probs of prompts by transformers itself: the reference that a converted model is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .errors import ConversionError

#: Log-probs that rounding explains.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}


def reference_logprobs(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """float32 [L - 1] for each prompt of L tokens: log-probs of tokens 1..L-1, in the dtype of the folder."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor(prompt, dtype=torch.int64)
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            found.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    return found


def read_prompts(path: Path | None, tokenizer_folder: Path, vocab_size: int) -> list[list[int]]:
    """Token ids of every prompt of a JSON-lines file ({"text": ...} or {"tokens": [...]}), or a fixed few."""
    if path is None:
        return [[(7919 * i + 31 * start) % vocab_size for i in range(16)] for start in range(3)]
    prompts = []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: not readable as JSON lines ({error})") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not ({"text", "tokens"} & row.keys()):
            raise ConversionError(f'{path}: line {number} has neither "text" nor "tokens"')
        tokens = row["tokens"] if "tokens" in row else _encode(tokenizer_folder, row["text"])
        if len(tokens) < 2 or not all(isinstance(token, int) and 0 <= token < vocab_size for token in tokens):
            raise ConversionError(f"{path}: line {number} needs at least 2 tokens below {vocab_size}")
        prompts.append(list(tokens))
    if not prompts:
        raise ConversionError(f"{path} holds no prompt")
    return prompts


def _encode(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConversionError(f"{file} is needed for prompts given as text")
    return list(Tokenizer.from_file(str(file)).encode(text).ids)
