"""One step of continuous batching: decode every running sequence, prefill the new ones, sample.

New prompts and running sequences share one forward. Sequences admitted together with the same
tokens (the samples of one group) are prefilled once, and the row is copied.

In deterministic mode every forward has a fixed shape, whatever else runs: decode always has
``max_rows`` rows and the whole context as key length, and each prompt is prefilled alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .kv_cache import SlotCache, round_length
from .model import DecodeInputs, Packed, PackedModel, padding
from .sampling import input_logprobs, sample, uniforms
from .sequence import SequenceState


class Runner:
    """Owns the cache and the batch. ``running[r]`` is the sequence of cache row r."""

    def __init__(self, model: PackedModel, max_rows: int, context_length: int, deterministic: bool) -> None:
        self.model = model
        self.max_rows = max_rows
        self.context_length = context_length
        self.deterministic = deterministic
        self.running: list[SequenceState] = []
        self._cache = SlotCache(model.shapes, model.dtype, max_rows, context_length)
        if deterministic:
            self._cache.reserve(max_rows, context_length)
        self._decode: DecodeInputs | None = None  # None: rebuild from ``running``
        self._longest = 0  # tokens of the longest running sequence, while ``_decode`` stands
        self._temperatures: torch.Tensor | None = None
        self._seeds = self._counts = np.zeros(0, dtype=np.uint64)

    @torch.inference_mode()
    def step(self, admitted: Sequence[SequenceState]) -> None:
        """Samples one token for every running and admitted sequence; the admitted ones are then running."""
        batch = len(self.running)
        if admitted:
            prompts = _distinct(admitted, first_row=batch)
            self._cache.reserve(batch + len(admitted), max(sequence.length for sequence in admitted))
        if batch and self._decode is None:
            self._decode = self._decode_inputs()
        if admitted:
            logits = self._forward_with(admitted, prompts)
            self._admit(admitted)
        else:
            logits, experts = self.model.decode(self._require_decode(), self._cache.tensors)
            logits = logits[:batch]
            self._record_experts(experts, [])
        ids, logprobs = sample(logits, self._temperatures, uniforms(self._seeds, self._counts))
        self._record(ids, logprobs)

    @torch.inference_mode()
    def remove_done(self) -> list[SequenceState]:
        """Takes the ended sequences out of the batch; the last rows move into theirs."""
        done = [(row, one) for row, one in enumerate(self.running) if one.finish is not None or one.failure]
        for row, sequence in reversed(done):
            if sequence.failure:
                self._cache.zero_row(row)
            last = len(self.running) - 1
            if row != last:
                # The newest token's key and value are written by the step that reads it.
                self._cache.copy_row(last, row, self.running[last].length - 1)
                self.running[row] = self.running[last]
            self.running.pop()
        if done:
            self._composition_changed()
        return [sequence for _, sequence in done]

    def release(self) -> list[SequenceState]:
        """Takes every sequence out of the batch, in row order; nothing of the cache is kept."""
        released, self.running = self.running, []
        self._composition_changed()
        return released

    # ------------------------------------------------------------ forward

    def _require_decode(self) -> DecodeInputs:
        if self._decode is None:
            raise RuntimeError("a step needs a running or an admitted sequence")
        return self._decode

    def _decode_inputs(self) -> DecodeInputs:
        lengths = [sequence.length for sequence in self.running]
        self._longest = max(lengths)
        last = [sequence.output_ids[-1] if sequence.output_ids else sequence.prompt[-1] for sequence in self.running]
        if self.deterministic:
            spare = self.max_rows - len(lengths)
            lengths, last = lengths + [1] * spare, last + [0] * spare
            width = self.context_length
        else:
            width = round_length(self._longest, self.context_length)
            self._cache.reserve(len(lengths), width)
        positions = torch.tensor(lengths) - 1
        seen = torch.arange(width) <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype).masked_fill_(~seen, float("-inf"))
        return DecodeInputs(torch.tensor(last), positions, torch.arange(len(last)), mask[:, None, None])

    def _advance(self, ids: torch.Tensor) -> None:
        """Decode inputs of the next step, in place, while the batch and its padded length stay the same."""
        inputs = self._decode
        if inputs is None:
            return
        batch = len(self.running)
        inputs.ids[:batch] = ids
        inputs.positions[:batch] += 1
        self._longest += 1
        if self._longest > inputs.mask.shape[3]:
            self._decode = None
        else:
            inputs.mask[inputs.rows[:batch], 0, 0, inputs.positions[:batch]] = 0

    def _forward_with(self, admitted: Sequence[SequenceState], prompts: list[_Prompt]) -> torch.Tensor:
        """Logits of the running sequences, then of the admitted ones; fills their cache rows."""
        batch = len(self.running)
        decode = self._decode
        if self.deterministic:
            parts = []
            if decode is not None:
                logits, experts = self.model.decode(decode, self._cache.tensors)
                parts.append(logits[:batch])
                self._record_experts(experts, [])
            for prompt in prompts:
                logits, experts = self.model.mixed(_packed(None, [prompt], self.model.dtype), self._cache.tensors)
                parts.append(logits)
                self._record_experts(experts, [prompt], decoded=0)
            logits = torch.cat(parts)
        else:
            logits, experts = self.model.mixed(_packed(decode, prompts, self.model.dtype), self._cache.tensors)
            self._record_experts(experts, prompts)
        return logits[self._distribute(prompts, batch, len(admitted), logits)]

    def _distribute(self, prompts: list[_Prompt], batch: int, count: int, logits: torch.Tensor) -> torch.Tensor:
        """Copies rows to the sequences that share a prompt, hands out prompt scores, and returns the row of
        ``logits`` that each sequence samples from, int64 [batch + count]."""
        source = list(range(batch)) + [0] * count
        offset = batch
        for prompt in prompts:
            first = prompt.sequences[0]
            kept = prompt.kept
            scores = logits[offset : offset + kept]
            if first.score_from is not None and first.input_logprobs is None:
                targets = torch.tensor(first.prompt[first.score_from + 1 :], dtype=torch.int64)
                first.input_logprobs = input_logprobs(scores[: len(targets)], targets).tolist()
            offset += kept
            for sequence_row in prompt.rows:
                source[sequence_row] = offset - 1
                if sequence_row != prompt.rows[0]:
                    self._cache.copy_row(prompt.rows[0], sequence_row, len(prompt.tokens))
        return torch.tensor(source)

    def _record_experts(
        self, experts: torch.Tensor | None, prompts: Sequence[_Prompt], decoded: int | None = None
    ) -> None:
        """Give the sequences what a forward of ``decoded`` rows (default: all that run) and ``prompts`` chose."""
        if experts is None:
            return
        chosen = experts.numpy()
        offset = len(self.running) if decoded is None else decoded
        for sequence, row in zip(self.running[:offset], chosen, strict=False):
            sequence.append_experts(row[None])
        for prompt in prompts:
            end = offset + len(prompt.tokens)
            for sequence in prompt.sequences:
                sequence.append_experts(chosen[offset + sequence.routed : end])
            offset = end

    # ------------------------------------------------------------ batch state

    def _admit(self, admitted: Sequence[SequenceState]) -> None:
        self.running.extend(admitted)
        self._composition_changed()

    def _composition_changed(self) -> None:
        self._decode = None
        temperatures = [sequence.sampling.temperature for sequence in self.running]
        self._temperatures = None if all(t == 1 for t in temperatures) else torch.tensor(temperatures)
        self._seeds = np.array([sequence.seed for sequence in self.running], dtype=np.uint64)
        self._counts = np.array([len(sequence.output_ids) for sequence in self.running], dtype=np.uint64)

    def _record(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        finite = bool(torch.isfinite(logprobs).all())
        for sequence, token, logprob in zip(self.running, ids.tolist(), logprobs.tolist(), strict=True):
            if not finite and logprob - logprob != 0:
                sequence.failure = f"the model's log-probs are not finite ({logprob}) after {sequence.length} tokens"
            elif sequence.sampling.max_new_tokens == 0:
                sequence.finish = {"type": "length", "length": 0}
            else:
                sequence.append(token, logprob)
        self._counts += np.uint64(1)
        self._advance(ids)


class _Prompt:
    """Tokens to prefill, and who starts from them: ``rows[i]`` is the cache row of ``sequences[i]``."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.sequences: list[SequenceState] = []
        self.rows: list[int] = []

    @property
    def kept(self) -> int:
        """How many logits are wanted, at the end of ``tokens``."""
        first = self.sequences[0]
        if first.score_from is None or first.input_logprobs is not None:
            return 1
        return len(self.tokens) - first.score_from


def _distinct(admitted: Sequence[SequenceState], first_row: int) -> list[_Prompt]:
    """Sequences that share all tokens share a prefill, but not those whose prompt is scored."""
    prompts: dict[object, _Prompt] = {}
    for row, sequence in enumerate(admitted, start=first_row):
        tokens = sequence.tokens
        key = tokens if sequence.score_from is None else row
        prompt = prompts.setdefault(key, _Prompt(tokens))
        prompt.sequences.append(sequence)
        prompt.rows.append(row)
    return list(prompts.values())


def _packed(decode: DecodeInputs | None, prompts: list[_Prompt], dtype: torch.dtype) -> Packed:
    """Inputs of one forward over the decode tokens and all of ``prompts``."""
    if decode is None:
        nothing = torch.zeros(0, dtype=torch.int64)
        decode = DecodeInputs(nothing, nothing, nothing, torch.zeros((0, 1, 1, 1), dtype=dtype))
    sizes = tuple(len(prompt.tokens) for prompt in prompts)
    pad, unpad = padding(sizes)
    batch = len(decode.ids)
    keep = list(range(batch))
    end = batch
    for prompt in prompts:
        end += len(prompt.tokens)
        keep.extend(range(end - prompt.kept, end))
    rows = torch.tensor([prompt.rows[0] for prompt in prompts]).repeat_interleave(torch.tensor(sizes))
    return Packed(
        torch.cat((decode.ids, torch.tensor([token for prompt in prompts for token in prompt.tokens]))),
        torch.cat((decode.positions, *(torch.arange(size) for size in sizes))),
        torch.cat((decode.rows, rows)),
        decode.mask,
        pad,
        unpad,
        torch.tensor(keep),
    )
