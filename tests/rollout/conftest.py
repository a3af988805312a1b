"""A tiny random Qwen2, a few weight versions of it, and servers started as processes."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.raw_http import wait_until
from vcpo_megatron.rollout.client.http import ServerClient
from vcpo_megatron.rollout.fleet.sglang import SglangServer
from vcpo_megatron.transport.child import start_child, stop_child

ROOT = Path(__file__).parents[2]
VOCABULARY = 97
EOS = 3
CONTEXT = 512
START_S = 90.0


@dataclass
class Running:
    """A server process: ``url`` once it serves, ``log`` holds its stdout and stderr."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(20)


@dataclass
class Versions:
    """Oracles: transformers models under their version names, and each one's weights as a bucket."""

    folder: Path
    models: dict[str, Any]

    def tensors(self, version: str) -> list[tuple[str, Any]]:
        """What a learner sends: tied names once."""
        state = self.models[version].state_dict()
        return [(name, tensor.clone()) for name, tensor in state.items() if name != "lm_head.weight"]

    def bucket(self, version: str) -> bytes:
        return base64.b64encode(pickle.dumps(self.tensors(version)))

    def logprobs(self, version: str, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """log pi(tokens[t] | tokens[:t]) for t >= 1, by transformers' forward, summed up in float64."""
        import torch

        with torch.no_grad():
            logits = self.models[version](input_ids=torch.tensor([tokens])).logits[0].double()
        table = torch.log_softmax(logits / temperature, -1)
        return [float(table[t - 1, tokens[t]]) for t in range(1, len(tokens))]


def _make_folder(folder: Path, seed: int) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=1,
        initializer_range=0.15,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Version "0" lies in ``folder``; "1" and "2" have other weights."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("qwen2")
    folders = {str(number): _make_folder(root / str(number), number) for number in range(3)}
    models = {name: AutoModelForCausalLM.from_pretrained(folder).float().eval() for name, folder in folders.items()}
    return Versions(folders["0"], models)


StartServer = Callable[..., Running]


def _starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    started: list[Running] = []

    def start(folder: Path, *flags: str, code: str = "") -> Running:
        log = tmp_path_factory.mktemp("server") / "log"
        program = ["-c", code] if code else ["-m", "vcpo_megatron.rollout.embedded"]
        command = [sys.executable, *program, "--model-path", str(folder), "--port", "0", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        server = Running(process, log, "")
        started.append(server)
        deadline = time.monotonic() + START_S
        while " at http://" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no server within {START_S} s: {log.read_text()}"
            time.sleep(0.05)
        server.url = log.read_text().split(" at ")[1].split()[0]
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """start_server(folder, *flags) returns when the server serves; ``code`` replaces the module by a program."""
    yield from _starting(tmp_path_factory)


@pytest.fixture(scope="session")
def start_lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """The same, for servers that last as long as the session."""
    yield from _starting(tmp_path_factory)


# --- both engines -------------------------------------------------------------------------------


@dataclass
class Engine:
    """A server of weights "0" that the protocol suite talks to, and times in seconds that suit it: ``mid_s`` into a
    long answer it is in its middle, if it had no reason to be late; ``most_s`` is the most that a scenario may take."""

    name: str
    url: str
    mid_s: float
    most_s: float

    async def in_the_middle_of(self, *answers: asyncio.Task[Any], wait_s: float | None = None) -> None:
        """Return ``wait_s`` seconds, by default ``mid_s``, after long ``answers`` were asked for. The embedded engine
        says how many run: a request that a busy machine delivers late is waited for."""
        await asyncio.sleep(self.mid_s if wait_s is None else wait_s)

        def run(running: int, waiting: int) -> bool:
            return running >= len(answers) or any(answer.done() for answer in answers)

        if self.name == "embedded":
            await asyncio.to_thread(wait_until, self.url, run)

    def use(self, scenario: Callable[[ServerClient], Awaitable[Any]]) -> Any:
        """``await scenario(client)``, bounded."""

        async def bounded() -> Any:
            client = ServerClient(self.url, VOCABULARY, self.most_s / 2)
            try:
                async with asyncio.timeout(self.most_s):
                    return await scenario(client)
            finally:
                await client.close()

        return asyncio.run(bounded())


StartSglang = Callable[..., Running]
SGLANG_START_S = 400.0


@pytest.fixture(scope="session")
def start_sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartSglang]:
    """start_sglang(folder, *flags) returns when the server answers; it runs in the environment that
    VCPO_ROLLOUT_PYTHON names, by the command line of a run."""
    python = os.environ.get("VCPO_ROLLOUT_PYTHON")
    if not python:
        pytest.skip("VCPO_ROLLOUT_PYTHON names no rollout environment (tools/make_rollout_env.sh --cpu makes one)")
    started: list[tuple[Running, subprocess.Popen[bytes]]] = []

    def start(folder: Path, *flags: str) -> Running:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = SglangServer(Path(python), folder, "127.0.0.1", port, "float32", CONTEXT, 32, args=flags)
        log = tmp_path_factory.mktemp("sglang") / "log"
        env = {"OMP_NUM_THREADS": "1", **program.environment()}
        process = start_child(program.command(), env=env, log=log)
        server = Running(process, log, f"http://127.0.0.1:{port}")
        started.append((server, process))

        async def wait() -> None:
            client = ServerClient(server.url, VOCABULARY, 30.0)
            deadline = time.monotonic() + SGLANG_START_S
            while not await client.ready():
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, f"no SGLang server within {SGLANG_START_S} s, see {log}"
                await asyncio.sleep(0.5)
            await client.close()

        asyncio.run(wait())
        return server

    yield start
    for _, process in started:
        stop_child(process, grace_s=5.0)


@pytest.fixture(scope="session")
def sglang(versions: Versions, start_sglang: StartSglang) -> Running:
    """One SGLang server a session: a start takes a minute."""
    return start_sglang(versions.folder, "--weight-version", "0", "--random-seed", "7")


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "sglang":
        return Engine("sglang", request.getfixturevalue("sglang").url, mid_s=0.8, most_s=240.0)
    return Engine("embedded", request.getfixturevalue("server").url, mid_s=0.15, most_s=60.0)


UseServer = Callable[[Callable[[ServerClient], Awaitable[Any]]], Any]


@pytest.fixture(scope="session")
def server(versions: Versions, start_lasting_server: StartServer) -> Running:
    """One server a session, of version "0": a test that loads another one loads that again."""
    flags = ("--weight-version", "0", "--random-seed", "7", "--max-running-requests", "16")
    return start_lasting_server(versions.folder, *flags)


@pytest.fixture
def use(server: Running) -> UseServer:
    """use(scenario) runs ``await scenario(client)`` against the session's server, within a minute."""

    def run(scenario: Callable[[ServerClient], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            client = ServerClient(server.url, VOCABULARY, 30.0)
            try:
                async with asyncio.timeout(60):
                    return await scenario(client)
            finally:
                await client.close()

        return asyncio.run(bounded())

    return run
