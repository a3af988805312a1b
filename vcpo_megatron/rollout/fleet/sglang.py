"""The command line and environment of a SGLang server, which runs under an interpreter of its own.

Nothing of SGLang is imported: ``rollout.python`` names the interpreter of the environment that it is installed in
(``tools/make_rollout_env.sh`` makes one). Written for SGLang 0.5.23; ``client.ServerClient.check_capabilities`` refuses
a server that lacks what training needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config.weight_transport import nccl_variables

#: Tokens of its context that SGLang never fills: an answer ends so many tokens before.
_UNUSED = 2
#: Set unless the run's own environment does: after a crash SGLang would spend 65 s on dumps before its process ends,
#: which the fleet waits for.
_NO_DUMPS = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
#: Tokens of the key-value cache on CPUs, at most: SGLang would take a share of the machine's memory.
_MAX_CPU_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class SglangServer:
    """One server. ``devices``: GPUs as CUDA_VISIBLE_DEVICES names them, one a tensor-parallel rank; none: on CPUs.
    ``context_length``: tokens of prompt and answers. ``args`` go last, so that they win over what is set here."""

    python: Path
    model_path: Path
    host: str
    port: int
    dtype: str
    context_length: int
    max_running_requests: int
    devices: tuple[str, ...] = ()
    args: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line; started in its own session, the server ends with its process group."""
        command = [
            str(self.python),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(self.model_path),
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--dtype",
            self.dtype,
            "--context-length",
            str(self.context_length + _UNUSED),
            "--max-running-requests",
            str(self.max_running_requests),
            # Token ids in, token ids out. With a tokenizer, its end-of-text token would end answers too, beside those
            # of the model's configuration that the learner knows of.
            "--skip-tokenizer-init",
            # The fleet asks for a token, by its id, before anything else does.
            "--skip-server-warmup",
        ]
        command += self._on_gpus() if self.devices else self._on_cpus()
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        """Variables to add to the server's environment. The hub is never asked: the model is a folder."""
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",  # the client closes idle connections, the server never before it
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the tokens that stay unused
        }
        variables |= {name: value for name, value in _NO_DUMPS.items() if name not in os.environ}
        variables |= nccl_variables()
        if not self.devices:
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
        return variables

    def _on_gpus(self) -> Sequence[str]:
        return ("--tensor-parallel-size", str(len(self.devices)))

    def _on_cpus(self) -> Sequence[str]:
        """Kernels that need neither AMX nor a GPU. Without ``--sleep-on-idle`` an idle server takes a whole core."""
        tokens = min(self.max_running_requests * self.context_length, _MAX_CPU_TOKENS)
        return (
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
            "--max-total-tokens",
            str(max(tokens, self.context_length)),
            "--mem-fraction-static",
            "0.5",
            "--sleep-on-idle",
        )
