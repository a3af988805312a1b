"""Shared by all tests: one thread a process, a guard over process-wide state, a model folder made without torch."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# How long an example takes says more about the machine's load than about the code.
hypothesis.settings.register_profile("vcpo", deadline=None)
hypothesis.settings.load_profile("vcpo")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts its background commands with SIGINT ignored. asyncio gives it the handler below when a loop ends, and
# processes under test are to be stopped by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Variables that pytest sets while a test runs, and torch when its compiler is imported for the first time. The alarm,
#: left out of the signals, is pytest-timeout's.
_OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM})


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}


def _process_state() -> dict[str, Any]:
    """What belongs to the whole process, pytest included: a test that leaves it changed breaks tests after it."""
    umask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {
        "working directory": os.getcwd(),
        "umask": umask and umask[1],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        **{f"limit {name}": resource.getrlimit(limit) for name, limit in _LIMITS.items()},
        **{f"handler of signal {int(number)}": signal.getsignal(number) for number in _SIGNALS},
        **{f"os.environ[{name!r}]": value for name, value in _environment().items()},
    }


def _restore(state: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    os.chdir(state["working directory"])
    os.umask(int(state["umask"] or "022", 8))
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked signals"])
    for name, limit in _LIMITS.items():
        if resource.getrlimit(limit) != state[f"limit {name}"]:
            resource.setrlimit(limit, state[f"limit {name}"])
    for number in _SIGNALS:
        if signal.getsignal(number) != (handler := state[f"handler of signal {int(number)}"]):
            signal.signal(number, handler)
    for name in _environment().keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Fails a test that leaves process-wide state changed, by name, and puts it back for those after it."""
    before, environment = _process_state(), _environment()
    yield
    after = _process_state()
    if before == after:
        return
    changed = [
        f"{name}: {before.get(name, 'absent')!r} before, {after.get(name, 'absent')!r} after"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    _restore(before, environment)
    pytest.fail("this test, or a fixture of it, left the process changed:\n" + "\n".join(changed), pytrace=False)


#: How a file of tests says that it uses a world of ranks, and a rollout server.
_WORLDS = re.compile(r"\brun_world\b")
_SERVERS = re.compile(r"\b(start_server|start_sglang|under_fire|use: Callable|engine: Engine)\b")


@functools.cache
def _group(path: Path) -> str:
    """Which tests stay together on one worker of pytest-xdist: those of a file, since fixtures of a module are made
    once; all worlds and whole runs, and all servers: so no two of a kind contend for the cores."""
    text = path.read_text(encoding="utf-8")
    if _WORLDS.search(text) or path.parent.name == "end_to_end":
        return "worlds"
    return "servers" if _SERVERS.search(text) else str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` by these groups. The marker ``xdist_group`` has no effect in pytest 9.2 (pytest-xdist 3.8
    writes groups into a field of the node that is not there any more), and would have to be repeated in every file."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log)


def pytest_sessionfinish() -> None:
    """Worlds that tests left up end here."""
    for name in ("tests.learner.world", "learner.world"):
        if name in sys.modules:
            sys.modules[name].close_worlds()


TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
#: The tensors of TINY_CONFIG, written out: head size 2, so queries are 8 wide, keys and values 4.
TINY_TENSORS: dict[str, list[int]] = {
    "model.embed_tokens.weight": [12, 8],
    "model.norm.weight": [8],
    "lm_head.weight": [12, 8],
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "input_layernorm.weight": [8],
            "self_attn.q_proj.weight": [8, 8],
            "self_attn.q_proj.bias": [8],
            "self_attn.k_proj.weight": [4, 8],
            "self_attn.k_proj.bias": [4],
            "self_attn.v_proj.weight": [4, 8],
            "self_attn.v_proj.bias": [4],
            "self_attn.o_proj.weight": [8, 8],
            "post_attention_layernorm.weight": [8],
            "mlp.gate_proj.weight": [12, 8],
            "mlp.up_proj.weight": [12, 8],
            "mlp.down_proj.weight": [8, 12],
        }.items()
    },
}


def write_safetensors(path: Path, tensors: Mapping[str, list[int]]) -> None:
    """A safetensors file of zeros, from the format's description: length, JSON header, data."""
    header, position = {}, 0
    for name, shape in tensors.items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(position))


def write_model_folder(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """A whole tiny Qwen2 folder; ``changes`` go into config.json alone."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **(changes or {})}))
    write_safetensors(folder / "model.safetensors", TINY_TENSORS)
    vocabulary = {**{str(digit): digit for digit in range(10)}, "=": 10}
    from tests.tokenizer_files import character_tokenizer  # here: test_conftest runs this file by itself

    tokenizer = character_tokenizer(vocabulary, unknown="=", special=("<eos>",))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A whole tiny Qwen2 folder (weights zero)."""
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """make_model(key=value, ...): the folder with changes to config.json."""
    return lambda **changes: write_model_folder(tmp_path / "changed", changes)


@contextmanager
def _file_size_limit(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Within it the system refuses to let a file grow beyond so many bytes: the real errors of a full disk.

    It holds for pytest's own report too where that goes to a file, so it must end inside the test.
    """
    return _file_size_limit
