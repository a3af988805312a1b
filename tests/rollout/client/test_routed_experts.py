"""Routed experts: answered by both engines as transformers chooses them, parsed strictly, laid beside the tokens."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.environments.in_process import play
from tests.learner.families import SIZES, make_family
from tests.rollout.conftest import Running
from tests.rollout.test_agent_loop import Script, Server
from vcpo_megatron.conversion.families.registry import open_model
from vcpo_megatron.environments.base import Observation, Outcome
from vcpo_megatron.rollout.client.http import ServerClient
from vcpo_megatron.rollout.client.protocol import GenerateResult, ProtocolError, SamplingParams, Span
from vcpo_megatron.rollout.client.replies import UnsupportedServer
from vcpo_megatron.rollout.client.routed_experts import RoutingShape, encode
from vcpo_megatron.rollout.embedded import model as packed_model
from vcpo_megatron.rollout.embedded.errors import ModelError
from vcpo_megatron.rollout.embedded.loading import load_model
from vcpo_megatron.rollout.embedded.runner import Runner
from vcpo_megatron.rollout.embedded.sequence import SequenceState
from vcpo_megatron.rollout.embedded.weights import Parameters, named_tensors
from vcpo_megatron.weight_sync.expected_checksums import ExpectedChecksums

pytestmark = pytest.mark.timeout(600)
SHAPE = RoutingShape(layers=2, top_k=2, experts=4)
FLAG = "--enable-return-routed-experts"
PROMPTS = [[5, 6, 7, 8], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3-moe", "mixtral", "qwen2-moe-mixed")
    return {name: make_family(name, tmp_path_factory.mktemp(name)) for name in names}


def chosen(folder: Path, tokens: list[int]) -> np.ndarray:
    """Experts [L, layers, k] by transformers, ascending; 0 in layers without experts."""
    model = load_model(folder, "float32")
    model.config._experts_implementation = "eager"
    found: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            gate.register_forward_hook(lambda _, __, output, number=number: found.update({number: output[2]}))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    none = torch.zeros_like(next(iter(found.values())))
    layers = [found.get(number, none) for number in range(len(model.model.layers))]
    return np.sort(torch.stack(layers, dim=1).numpy(), axis=-1)


# --- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def server(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Running:
    start = request.getfixturevalue("start_server" if request.param == "embedded" else "start_sglang")
    return start(folders["qwen3-moe"], FLAG, "--weight-version", "0")


async def sample(url: str, prompts: list[list[int]], length: int = 20) -> list[GenerateResult]:
    client = ServerClient(url, SIZES["vocab_size"], 200.0, SHAPE)
    try:
        await client.check_capabilities()
        one = SamplingParams(max_new_tokens=length, ignore_eos=True)
        return await asyncio.gather(*(client.generate(p, one, f"r{i}") for i, p in enumerate(prompts)))
    finally:
        await client.close()


def test_an_engine_answers_the_experts_that_transformers_chooses(server: Running, folders: dict[str, Path]) -> None:
    results = asyncio.run(sample(server.url, PROMPTS))
    for prompt, result in zip(PROMPTS, results, strict=True):
        experts = result.routed_experts
        assert experts is not None and experts.dtype == np.uint8 and len(result.output_ids) == 20
        tokens = [*prompt, *result.output_ids]
        expected = chosen(folders["qwen3-moe"], tokens)
        assert np.array_equal(np.sort(experts, axis=-1), expected[:-1])


def test_an_engine_answers_the_checksums_of_the_experts_that_it_was_sent(
    server: Running, folders: dict[str, Path]
) -> None:
    """In the order of the learner's stream; none of the server's parameters is left out, and a change shows."""
    family, shape = open_model(json.loads((folders["qwen3-moe"] / "config.json").read_text()))
    held = load_file(folders["qwen3-moe"] / "model.safetensors")
    changed = "model.layers.1.mlp.experts.3.down_proj.weight"

    async def scenario(version: str, scale: float) -> tuple[dict[str, str], dict[str, str]]:
        names = family.outline(shape, torch.float32)
        stream = {name: held[name] * (scale if name == changed else 1.0) for name in names}
        expected = ExpectedChecksums("sglang" if "sglang" in str(server.log) else "embedded", shape)
        for name, tensor in stream.items():
            expected.add(name, tensor)
        client = ServerClient(server.url, SIZES["vocab_size"], 200.0)
        try:
            await client.begin_weight_update()
            await client.update_weights_from_tensor(base64.b64encode(pickle.dumps(list(stream.items()))), version)
            await client.end_weight_update()
            (found,) = await client.weights_checksums()
            return found, expected.result()
        finally:
            await client.close()

    for version, scale in (("1", 2.0), ("0", 1.0)):
        found, expected = asyncio.run(scenario(version, scale))
        assert found == expected
    assert expected["model.layers.1.mlp.experts.w2_weight" if "sglang" in str(server.log) else changed]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "qwen2-moe-mixed"])
def test_the_embedded_engine_serves_mixtures_of_experts(
    name: str, deterministic: bool, folders: dict[str, Path]
) -> None:
    """Log-probs and experts in batches that change, with prompts that are shared and sequences that are retracted."""
    model = load_model(folders[name], "float32")
    runner = Runner(packed_model.build(model, 64, routed_experts=True), 8, 64, deterministic)
    prompts = [*PROMPTS, PROMPTS[0]]
    sequences = [
        SequenceState(str(i), tuple(prompt), SamplingParams(12 + i, 1.0), frozenset(), i, None, True)
        for i, prompt in enumerate(prompts)
    ]
    runner.step(sequences[:1])
    runner.step(sequences[1:])
    runner.step([])
    runner.step(runner.release())
    done: list[SequenceState] = []
    for _ in range(40):
        done += runner.remove_done()
        if runner.running:
            runner.step([])
    assert len(done) == 4
    oracle = load_model(folders[name], "float32")
    oracle.config._experts_implementation = "eager"
    for sequence in done:
        with torch.no_grad():
            table = torch.log_softmax(oracle(torch.tensor([sequence.tokens])).logits[0], -1)
        start = len(sequence.prompt)
        expected = [float(table[start - 1 + i, token]) for i, token in enumerate(sequence.output_ids)]
        assert np.allclose(sequence.logprobs, expected, atol=1e-5, rtol=0)
        experts = np.concatenate(sequence.experts)
        assert np.array_equal(np.sort(experts, axis=-1), chosen(folders[name], list(sequence.tokens))[:-1])


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "qwen2-moe-mixed"])
def test_parameters_have_the_names_of_the_files(name: str, folders: dict[str, Path]) -> None:
    """What a learner sends is what the safetensors hold; a weight that is sent reaches the model."""
    model = load_model(folders[name], "float32")
    held = load_file(folders[name] / "model.safetensors")
    parameters = Parameters(dict(named_tensors(model)))
    assert {key: list(tensor.shape) for key, tensor in parameters.items()} == {
        key: list(tensor.shape) for key, tensor in held.items()
    }
    assert all(torch.equal(tensor, held[key]) for key, tensor in parameters.items())
    key = next(key for key in held if ".experts.3." in key and ("up_proj" in key or ".w3." in key))
    parameters.load([(key, torch.full_like(held[key], 7.0))])
    width = held[key].shape[0]
    stacked = next(t for k, t in model.state_dict().items() if k.endswith("gate_up_proj"))
    assert bool((stacked[3, width:] == 7).all()) and not bool((stacked[3, :width] == 7).any())
    assert not bool((stacked[2] == 7).any())


@pytest.mark.slow
def test_experts_are_refused_where_there_are_none(start_server: Any, folders: dict[str, Path], versions: Any) -> None:
    with pytest.raises(ModelError, match="no experts"):
        packed_model.build(load_model(versions.folder, "float32"), 64, routed_experts=True)
    plain = start_server(folders["qwen3-moe"])
    with pytest.raises(UnsupportedServer, match=f"return_routed_experts: start the server with {FLAG}"):
        asyncio.run(sample(plain.url, PROMPTS[:1]))


# --- answers ------------------------------------------------------------------------------------


def reply(ids: Any) -> dict[str, Any]:
    return {"meta_info": {"routed_experts": encode(np.asarray(ids))}}


def test_a_known_answer_is_read() -> None:
    ids = [[[0, 1], [2, 3]], [[3, 0], [1, 2]]]
    assert encode(np.array([[[1, 258]]], np.int64)) == base64.b64encode(b"\1\0\0\0\2\1\0\0").decode()
    experts = SHAPE.parse(reply(ids), 3)
    assert experts.dtype == np.uint8 and experts.tolist() == ids
    wide = RoutingShape(2, 2, 256).parse(reply(ids), 3)
    assert wide.dtype == np.uint16 and wide.tolist() == ids
    mixed = RoutingShape(2, 2, 4, dense_layers=(0,)).parse(reply([[[-1, 99], [2, 3]]]), 2)
    assert mixed.tolist() == [[[0, 0], [2, 3]]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"meta_info": {}}, "no 'routed_experts': start the server with --enable-return-routed-experts"),
        ({"meta_info": {"routed_experts": "%"}}, "not base64"),
        ({"meta_info": {"routed_experts": "AAAA"}}, "not base64 of int32"),
        (reply([[[0, 1], [2, 3]]]), r"4 numbers, expected \[2, 2, 2\]"),
        (reply([[[0, 1], [2, 4]]] * 2), "0 to 4, the model has 4 experts"),
        (reply([[[0, 1], [2, -1]]] * 2), "-1 to 2, the model has 4 experts"),
    ],
)
def test_a_bad_answer_is_named(answer: dict[str, Any], expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        SHAPE.parse(answer, 3)


# --- trajectories -------------------------------------------------------------------------------


def answer(prompt: int, ids: list[int], mark: int, finish: str = "stop") -> GenerateResult:
    """``ids`` after ``prompt`` tokens; every expert of this answer is number ``mark``."""
    experts = np.full((prompt + len(ids) - 1, 1, 1), mark, np.uint8) if ids else None
    spans = (Span(0, len(ids), "1.4"),) if ids else ()
    return GenerateResult(tuple(ids), (-1.0,) * len(ids), spans, finish, experts)


def played(server: Server, script: Script) -> Any:
    episode = play(server, script, group_id=5, sample_index=2, sampling=SamplingParams(max_new_tokens=20))
    return asyncio.run(asyncio.wait_for(episode, 10)).routed_experts


def test_the_first_record_of_a_token_stays() -> None:
    """Aborted, aborted without a token, resumed, and a second turn: every token has the experts of the answer that it
    was sampled or first read in; the last one, which no layer has seen, has none."""
    script = Script([Observation((10, 11)), Outcome(1.0)])
    server = Server(
        answer(3, [4, 5], 1, "abort"), answer(5, [], 2, "abort"), answer(5, [6], 3), answer(8, [7, 8], 4, "length")
    )
    experts = played(server, script)
    # prompt 1 2 3, sampled 4 5 | 6, observed 10 11, sampled 7 8; 5 is the last token of the first request
    assert experts.dtype == np.uint8 and experts.shape == (10, 1, 1)
    assert experts[:, 0, 0].tolist() == [1, 1, 1, 1, 3, 4, 4, 4, 4, 255]


def test_without_records_a_trajectory_has_none() -> None:
    plain = GenerateResult((4,), (-1.0,), (Span(0, 1, "1.4"),), "stop")
    assert played(Server(plain), Script([Outcome(1.0)])) is None
