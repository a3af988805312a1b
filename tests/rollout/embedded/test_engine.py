"""The engine's parts in this process: draws, unpickling, batches against transformers, refusals."""

from __future__ import annotations

import base64
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vcpo_megatron.rollout.client.protocol import SamplingParams, Span
from vcpo_megatron.rollout.embedded import model as packed_model
from vcpo_megatron.rollout.embedded.errors import ModelError, RequestError
from vcpo_megatron.rollout.embedded.runner import Runner
from vcpo_megatron.rollout.embedded.sampling import sample, splitmix64, uniforms
from vcpo_megatron.rollout.embedded.scheduler import Scheduler
from vcpo_megatron.rollout.embedded.sequence import SequenceState
from vcpo_megatron.rollout.embedded.weights import Parameters, UpdateSession, decode_bucket

VOCABULARY = 97
CONTEXT = 256


# ---------------------------------------------------------------- draws


def test_splitmix64_known_answers() -> None:
    """First outputs of the reference implementation for seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * gamma) % 2**64 for i in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniforms_are_pure_and_uniform() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.uint64), 100)
    numbers = uniforms(seeds, positions)
    assert len(set(numbers.tolist())) == 10_000 and 0 <= numbers.min() and numbers.max() < 1
    assert uniforms(seeds[777:778], positions[777:778])[0] == numbers[777]
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi-square of 19 degrees: 50 is one in ten thousand


def test_sample_is_the_inverse_cdf() -> None:
    logits = torch.tensor([[0.1, 0.0, 0.2, 0.7]]).log().repeat(6, 1)
    ids, logprobs = sample(logits, None, np.array([0.0, 0.09, 0.11, 0.29, 0.31, 1 - 2**-53]))
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.2, 0.7, 0.7]))
    impossible_first = torch.tensor([[0.0, 0.4, 0.6]]).log()
    assert sample(impossible_first, None, np.zeros(1))[0].tolist() == [1]
    ids, logprobs = sample(logits, torch.tensor([0.0, 2.0, 0.0, 0.5, 1.0, 1.0]), np.full(6, 0.15))
    assert ids.tolist() == [3, 0, 3, 3, 2, 2]
    halved = 0.1**0.5 / (0.1**0.5 + 0.2**0.5 + 0.7**0.5)
    squared = 0.49 / (0.01 + 0.04 + 0.49)
    assert torch.allclose(logprobs.exp(), torch.tensor([0.7, halved, 0.7, squared, 0.2, 0.2]))


# ---------------------------------------------------------------- weights


def bucket(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


class Evil:
    """Runs a command when it is unpickled; ``nested`` hides it in a storage's bytes."""

    def __init__(self, command: str, nested: bool) -> None:
        self.command, self.nested = command, nested

    def __reduce__(self) -> Any:
        if self.nested:
            return torch.storage._load_from_bytes, (pickle.dumps(Evil(self.command, False)),)
        return os.system, (self.command,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("nested", [False, True])
def test_a_bucket_cannot_run_code(tmp_path: Path, nested: bool) -> None:
    flag = tmp_path / "ran"
    with pytest.raises(RequestError):
        decode_bucket(bucket([("a", Evil(f"touch {flag}", nested))]))
    assert not flag.exists()
    pickle.loads(pickle.dumps(Evil(f"touch {flag}", nested=False)))
    assert flag.exists()  # so the attack is a real one


@pytest.mark.parametrize("text", [None, 5, "!", "AAAA", bucket("x"), bucket([("a", 1)]), bucket([(1, torch.ones(1))])])
def test_a_bucket_is_a_list_of_named_tensors(text: Any) -> None:
    with pytest.raises(RequestError, match="serialized_named_tensors"):
        decode_bucket(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_tensors_and_parameters(dtype: torch.dtype) -> None:
    values = torch.arange(6, dtype=dtype).reshape(2, 3)
    decoded = dict(decode_bucket(bucket([("a", values), ("view", values.T[1:]), ("p", torch.nn.Parameter(values))])))
    assert torch.equal(decoded["a"], values) and torch.equal(decoded["view"], values.T[1:])
    assert torch.equal(decoded["p"], values)


def test_session_stages_and_hands_over_once() -> None:
    target = torch.zeros(2)
    session = UpdateSession(Parameters({"a": target}))
    session.begin()
    session.stage([("a", torch.ones(2))], "1")
    assert session.begin() == 1
    session.stage([("a", torch.full((2,), 2.0))], None)
    tensors, version, _ = session.end()
    assert [name for name, _ in tensors] == ["a"] and version is None and not session.open
    assert target.tolist() == [0, 0]
    with pytest.raises(RequestError, match="begin_weight_update"):
        session.require_open("/x")


# ---------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def model(versions: Any) -> packed_model.PackedModel:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(versions.folder, dtype=torch.float32).eval()
    return packed_model.build(loaded, CONTEXT)


def request(index: int, prompt: Any, new: int, temperature: float = 1.0, score: int | None = None) -> SequenceState:
    return SequenceState(str(index), tuple(prompt), SamplingParams(new, temperature), frozenset(), 1000 + index, score)


def random_requests(count: int) -> list[SequenceState]:
    draw = random.Random(0)
    made = []
    for index in range(count):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 70))]
        made.append(request(index, prompt, draw.randint(0, 90), draw.choice([1.0, 0.7]), draw.choice([None, None, 0])))
    return made


def run(runner: Runner, waiting: list[SequenceState], seed: int = 1) -> list[SequenceState]:
    """All of ``waiting``, admitted a few at a time."""
    draw = random.Random(seed)
    ended: list[SequenceState] = []
    while waiting or runner.running:
        room = min(draw.randint(0, 5), runner.max_rows - len(runner.running), len(waiting))
        if not room and not runner.running:
            continue
        runner.step(waiting[:room])
        waiting = waiting[room:]
        ended += runner.remove_done()
    return ended


@pytest.mark.parametrize("deterministic", [False, True])
def test_batches_of_all_shapes_are_exact(model: Any, versions: Any, deterministic: bool) -> None:
    """Log-probs of mixed batches, scored prompts and shared prompts against transformers' own forward."""
    group = [request(100 + index, (5, 6, 7, 8), 30) for index in range(6)]
    waiting = random_requests(30)
    ended = run(Runner(model, 12, CONTEXT, deterministic), waiting[:10] + group + waiting[10:])
    assert len(ended) == 36 and len({tuple(sample.output_ids) for sample in group}) == 6
    for generation in ended:
        assert len(generation.output_ids) == generation.sampling.max_new_tokens
        tokens, start = [*generation.prompt, *generation.output_ids], len(generation.prompt)
        expected = versions.logprobs("0", tokens, generation.sampling.temperature)[start - 1 :]
        assert np.allclose(generation.logprobs, expected, atol=1e-5, rtol=0)
        if generation.score_from is not None:
            prompt = versions.logprobs("0", list(generation.prompt))
            assert np.allclose(generation.input_logprobs, prompt, atol=1e-5, rtol=0)


def test_bfloat16_is_the_rounded_model_to_its_rounding() -> None:
    """Log-probs of a bf16 engine against transformers in fp32 on the same, rounded weights.

    8 bits through two layers (seen: 0.001 at most); the start-up probe allows 0.05 between engine and learner.
    """
    oracle = tiny("Qwen3").bfloat16().float()
    runner = Runner(packed_model.build(tiny("Qwen3").bfloat16(), CONTEXT), 4, CONTEXT, False)
    differences = []
    for generation in run(runner, [request(index, range(1, 3 + index), 40) for index in range(6)]):
        with torch.no_grad():
            table = torch.log_softmax(oracle(input_ids=torch.tensor([generation.tokens])).logits[0], -1)
        start = len(generation.prompt)
        expected = [float(table[start - 1 + i, token]) for i, token in enumerate(generation.output_ids)]
        differences += np.abs(np.array(generation.logprobs) - expected).tolist()
    assert len(differences) == 240
    assert 0 < max(differences) < 0.01


@pytest.mark.parametrize("kept", [False, True])
def test_logits_of_a_bfloat16_model_stay_in_float32_where_that_is_asked_for(kept: bool) -> None:
    """They follow the weights as they are loaded, traced or not."""
    model = tiny("Qwen3").bfloat16()
    if kept:
        packed_model.keep_fp32_logits(model)
    packed, found = packed_model.build(model, CONTEXT), []
    for scale in (1.0, 2.0):
        with torch.inference_mode():
            model.get_output_embeddings().weight.mul_(scale)
            found.append(packed.mixed(*packed_model._probe_inputs(packed, (5,), 0)).logits)
        assert found[-1].dtype is (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(found[-1].bfloat16().float(), found[-1].float()) is not kept
    assert torch.equal(found[1], 2 * found[0])


def test_deterministic_mode_gives_the_same_bits_in_any_batch(model: Any) -> None:
    def results(ended: list[SequenceState]) -> dict[str, Any]:
        return {generation.rid: (generation.output_ids, generation.logprobs) for generation in ended}

    first = results(run(Runner(model, 12, CONTEXT, True), random_requests(20), seed=1))
    assert results(run(Runner(model, 12, CONTEXT, True), random_requests(20), seed=1)) == first
    assert results(run(Runner(model, 12, CONTEXT, True), random_requests(20)[::-1], seed=2)) == first


def test_a_trace_that_is_wrong_is_not_used(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    real = torch.jit.trace

    def wrong(forward: Any, *args: Any, **kwargs: Any) -> Any:
        traced = real(forward, *args, **kwargs)
        return lambda inputs, cache: traced(inputs, cache) + 1e-6

    monkeypatch.setattr(torch.jit, "trace", wrong)
    loaded = AutoModelForCausalLM.from_pretrained(versions.folder, dtype=torch.float32).eval()
    built = packed_model.build(loaded, CONTEXT)
    assert isinstance(built._decode, packed_model._Forward) and isinstance(built._mixed, packed_model._Forward)


def tiny(kind: str) -> Any:
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "head_dim": 4,
    }
    extra: dict[str, Any] = {
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "Mistral": {"sliding_window": 8},
        "DeepseekV3": {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 6,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
        },
    }.get(kind, {})
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**common, **extra})
    return getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_other_architectures_are_exact(kind: str) -> None:
    loaded = tiny(kind)
    generations = [request(index, range(1, 3 + index), 12) for index in range(4)]
    oracle = tiny(kind)
    for generation in run(Runner(packed_model.build(loaded, CONTEXT), 4, CONTEXT, False), generations):
        with torch.no_grad():
            table = torch.log_softmax(oracle(input_ids=torch.tensor([generation.tokens])).logits[0], -1)
        start = len(generation.prompt)
        expected = [float(table[start - 1 + i, token]) for i, token in enumerate(generation.output_ids)]
        assert np.allclose(generation.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "message"), [("Gemma2", "softcap"), ("Mistral", "--context-length 8")])
def test_attention_that_is_not_computed_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        packed_model.build(tiny(kind), CONTEXT)


def test_retract_keeps_order_and_spans(model: Any) -> None:
    scheduler = Scheduler(Runner(model, 2, CONTEXT, False), "a")
    generations = [request(index, (1, 2, 3), 6) for index in range(3)]
    scheduler.submit(generations)
    for _ in range(2):
        scheduler.step()
    scheduler.pause("retract")
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.runnable) == (0, 3, False)
    assert scheduler.can_update
    scheduler.set_version("b")
    scheduler.resume()
    while scheduler.runnable:
        scheduler.step()
    assert [generation.rid for generation in scheduler.ended] == ["0", "1", "2"]
    assert [generation.spans for generation in generations] == [
        [Span(0, 2, "a"), Span(2, 6, "b")],
        [Span(0, 2, "a"), Span(2, 6, "b")],
        [Span(0, 6, "b")],
    ]
    assert [generation.retractions for generation in generations] == [1, 1, 0]


def test_held_lets_running_end_and_admits_nobody(model: Any) -> None:
    scheduler = Scheduler(Runner(model, 1, CONTEXT, False), "a")
    scheduler.submit([request(0, (1,), 3), request(1, (1,), 3)])
    scheduler.step()
    scheduler.held = True
    while scheduler.runnable:
        scheduler.step()
    assert [generation.rid for generation in scheduler.ended] == ["0"] and scheduler.num_waiting == 1
    assert scheduler.can_update


def test_a_row_that_was_not_finite_does_not_poison_the_next(versions: Any) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(versions.folder, dtype=torch.float32).eval()
    runner = Runner(packed_model.build(loaded, CONTEXT), 2, CONTEXT, False)
    parameters = Parameters(loaded.state_dict())
    good = [(name, tensor.clone()) for name, tensor in parameters.items()]
    parameters.load([(name, torch.full_like(tensor, float("nan"))) for name, tensor in good])
    runner.step([request(0, range(1, 30), 5), request(1, range(1, 20), 5)])
    failed = runner.remove_done()
    assert len(failed) == 2 and all("not finite" in generation.failure for generation in failed)
    parameters.load(good)
    (ended,) = run(runner, [request(2, (5, 6), 10)])
    assert ended.failure == "" and len(ended.output_ids) == 10
    expected = versions.logprobs("0", [5, 6, *ended.output_ids])[1:]
    assert np.allclose(ended.logprobs, expected, atol=1e-5, rtol=0)
