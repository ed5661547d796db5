"""vLLM on the loopback address, on one thread, and small models for it.

``make engines`` installs it in an environment of its own and names that environment's Python in ``GRADE_ENGINE``.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import torch
from conftest import word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PYTHON = os.environ.get("GRADE_ENGINE")

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
ARGUMENTS = [
    "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "base", "--dtype", "float32", "--enable-lora",
    "--max-lora-rank", "16", "--max-loras", "2", "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1",
    "--max-model-len", "128", "--max-num-seqs", "64", "--enforce-eager",
]  # fmt: skip
PATIENCE = 600
"""Seconds for a server to start, the machine being busy."""
VOCAB, EOS = 300, 0
"""Of `save_base`."""


class Engine:
    """A server of the model in a folder under the name ``base``, always at the same address."""

    def __init__(self, log: Path) -> None:
        self.log, self.process = log, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self, folder: Path) -> None:
        words = [PYTHON, *ARGUMENTS, "--port", str(self.port), "--model", str(folder)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, start_new_session=True, env=os.environ | SETTINGS, cwd=self.log.parent
            )
        for _ in range(PATIENCE):
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(self.address + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(1)
        pytest.fail(f"vLLM did not start: {self.log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """End all of it at once, as a lost machine does."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def names(self) -> list[str]:
        return [model["id"] for model in httpx.get(self.address + "/v1/models").json()["data"]]


def save_base(folder, kind="llama", defaults=(), **sizes):
    """A random model of two layers, heads of 32 (vLLM's smallest on CPUs), and the words w0 (eos), w1 (pad), w2 ..."""
    values = dict(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.1, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=1, tie_word_embeddings=True,
    ) | sizes  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.float32)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=EOS, pad_token_id=1, **dict(defaults)).save_pretrained(folder)
    words = [f"w{number}" for number in range(values["vocab_size"])]
    word_tokenizer(words, "w2", eos_token="w0", pad_token="w1").save_pretrained(folder)
    return folder
