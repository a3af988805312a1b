"""The server as a process: how it starts, refuses to start, fails and ends."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.raw_http import post, wait_until
from vcpo_megatron.rollout.embedded.server import serve

pytestmark = pytest.mark.timeout(300)  # longer than a server may take to start

PROMPT = [5, 17, 42, 8, 60]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a server that does not start."""
    assert serve(list(argv)) == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and lines[0].startswith("vcpo: error: "), captured.err
    return lines[0]


def copied(versions: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(versions.folder, tmp_path / "model"))


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in refused(capsys, "--model-path", "/nonexistent", "--port", port)


def test_a_folder_without_a_model(capsys: pytest.CaptureFixture[str], versions: Any, tmp_path: Path) -> None:
    assert f"{tmp_path}/config.json not found" in refused(capsys, "--model-path", str(tmp_path), "--port", "0")
    folder = copied(versions, tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors" in refused(capsys, "--model-path", str(folder), "--port", "0")


def test_missing_tensors_are_named(capsys: pytest.CaptureFixture[str], versions: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(versions, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    line = refused(capsys, "--model-path", str(folder), "--port", "0")
    assert "lacks 2 of " in line and "(model.layers.1.mlp.up_proj.weight, model.norm.weight)" in line


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5"),
        ({"hidden_size": 64}, "do not have the shape that config.json gives"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True is not a positive integer"),
    ],
)
def test_a_model_that_cannot_be_served(
    capsys: pytest.CaptureFixture[str], versions: Any, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    folder = copied(versions, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert named in refused(capsys, "--model-path", str(folder), "--port", "0")


def test_a_context_beyond_the_model(capsys: pytest.CaptureFixture[str], versions: Any) -> None:
    line = refused(capsys, "--model-path", str(versions.folder), "--port", "0", "--context-length", "513")
    assert "513" in line and "512" in line


@pytest.mark.parametrize("argv", [[], ["--model-path", "x", "--max-running-requests", "0"], ["--bogus"]])
def test_bad_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve(argv)
    assert caught.value.code == 2


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\ntry:\n from vcpo_megatron.rollout.embedded.server import serve; serve(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert done.returncode == 0 and "example:" in done.stdout


def test_sigterm_answers_what_runs_and_exits_0(versions: Any, start_server: Any) -> None:
    server = start_server(versions.folder)
    post(server.url, "/pause_generation", {"mode": "in_place"})
    answers: list[Any] = []
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100}}
    thread = threading.Thread(target=lambda: answers.append(post(server.url, "/generate", body)))
    thread.start()
    wait_until(server.url, lambda running, waiting: waiting == 1)
    assert server.stop() == 0
    thread.join(20)
    assert answers[0][0] == 200 and answers[0][1]["meta_info"]["finish_reason"]["type"] == "abort"
    log = server.log.read_text()
    assert "error" not in log and "Traceback" not in log and len(log.splitlines()) == 1


FAILING = """
import sys
from vcpo_megatron.rollout.embedded import runner, server

step, calls = runner.Runner.step, []

def failing(self, admitted):
    calls.append(1)
    if len(calls) > 5:
        raise RuntimeError("broken on purpose")
    step(self, admitted)

runner.Runner.step = failing
sys.exit(server.serve(sys.argv[1:]))
"""


def test_a_failing_engine_answers_500_and_ends_the_process(versions: Any, start_server: Any) -> None:
    server = start_server(versions.folder, "--max-running-requests", "1", code=FAILING)
    body = {"input_ids": [PROMPT] * 3, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    status, reply = post(server.url, "/generate", body)
    assert status == 500 and "broken on purpose" in reply["message"]
    assert server.process.wait(20) == 1
    assert server.log.read_text().splitlines()[-1].startswith("vcpo: error: the engine failed: RuntimeError: broken")


@pytest.mark.slow
def test_deterministic_inference_repeats_bit_for_bit(versions: Any, start_server: Any) -> None:
    """Two servers, one ordered list request each: the same bytes but for the measured latency."""
    body = {
        "input_ids": [PROMPT, PROMPT, PROMPT[:2], [9] * 40],
        "sampling_params": [{"max_new_tokens": 60, "sampling_seed": seed} for seed in (1, 2, 3, 2**31 - 1)],
        "rid": ["a", "b", "c", "d"],
        "return_logprob": True,
    }
    replies = []
    for _ in range(2):
        flags = ("--enable-deterministic-inference", "--max-running-requests", "3", "--context-length", "128")
        server = start_server(versions.folder, *flags)
        for _ in range(2):
            status, reply = post(server.url, "/generate", body)
            assert status == 200
            for answer in reply:
                del answer["meta_info"]["e2e_latency"]
            replies.append(json.dumps(reply))
        assert server.stop() == 0
    assert len(set(replies)) == 1


def test_weights_that_are_not_finite_fail_the_request_not_the_server(versions: Any, start_server: Any) -> None:
    import base64
    import pickle

    server = start_server(versions.folder)

    def load(factor: float) -> None:
        bucket = base64.b64encode(pickle.dumps([(name, t * factor) for name, t in versions.tensors("0")])).decode()
        assert post(server.url, "/begin_weight_update", {})[0] == 200
        assert post(server.url, "/update_weights_from_tensor", {"serialized_named_tensors": [bucket]})[0] == 200
        assert post(server.url, "/end_weight_update", {})[0] == 200

    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}}
    load(float("nan"))
    status, reply = post(server.url, "/generate", body)
    assert status == 500 and "not finite" in reply["message"]
    load(1.0)
    assert post(server.url, "/generate", body)[0] == 200
