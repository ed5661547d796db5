"""A server of the OpenAI completions protocol with token ids on the loopback address, for tests.

It shares no code with the package: it loads adapters with PEFT and samples with whole forward passes of transformers.
``spoil`` may change an answer before it is sent; ``requests`` are all bodies that came, with their paths.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):  # noqa: N802 - the name that http.server calls
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        with server.lock, torch.random.fork_rng(devices=[]):
            server.requests.append((self.path, body))
            server.headers = self.headers
            status, answer = {
                "/v1/completions": server.complete, "/v1/load_lora_adapter": server.load,
                "/v1/unload_lora_adapter": server.unload,
            }[self.path](body)  # fmt: skip
            if server.spoil is not None:
                status, answer = server.spoil(self.path, status, answer)
        text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class CompletionsServer(ThreadingHTTPServer):
    """Serves a base model from a folder, with adapters that come and go."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, folder, dtype=torch.float32):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.dtype, self.lock = folder, dtype, threading.Lock()
        self.adapters, self.requests, self.spoil, self.most_adapters = {}, [], None, 0

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def load(self, body):
        if body["lora_name"] in self.adapters:
            return 400, {"error": f"{body['lora_name']} has already been loaded"}
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype)
        self.adapters[body["lora_name"]] = PeftModel.from_pretrained(model, body["lora_path"]).eval()
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return 200, "loaded"

    def unload(self, body):
        return (200, "gone") if self.adapters.pop(body["lora_name"], None) else (404, {"error": "no such adapter"})

    @torch.no_grad()
    def complete(self, body):
        if body.get("model") not in self.adapters:
            return 404, {"error": f"The model {body.get('model')} does not exist."}
        assert body["top_p"] == 1 and body["top_k"] == 0 and body["ignore_eos"] and body["return_token_ids"]
        model, n = self.adapters[body["model"]], body["n"]
        generator = torch.Generator().manual_seed(body["seed"])
        ids, ended, logps = torch.tensor([body["prompt"]] * n), torch.zeros(n, dtype=torch.bool), []
        stops = torch.tensor(body["stop_token_ids"], dtype=torch.long)
        for step in range(body["max_tokens"]):
            logits = model(input_ids=ids).logits[:, -1].double() / body["temperature"]
            if step < body["min_tokens"]:
                logits[:, stops] = float("-inf")
            logp = logits.log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=generator)
            logps.append(logp.gather(1, token))
            ids = torch.cat([ids, token], 1)
            ended |= torch.isin(token[:, 0], stops)
            if ended.all():
                break
        new, logps = ids[:, len(body["prompt"]) :].tolist(), torch.cat(logps, 1).tolist()
        choices = []
        for index, (tokens, values) in enumerate(zip(new, logps, strict=True)):
            end = next((k + 1 for k, token in enumerate(tokens) if token in body["stop_token_ids"]), None)
            choices.append({
                "index": index, "text": "", "finish_reason": "stop" if end else "length",
                "prompt_token_ids": body["prompt"], "token_ids": tokens[:end],
                "logprobs": {"token_logprobs": values[:end]},
            })  # fmt: skip
        return 200, {"model": body["model"], "choices": choices}


@contextmanager
def serving(folder, **options):
    """A server in a thread of its own."""
    with CompletionsServer(folder, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
