"""A server of vLLM's with the demo model, and a client that needs nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.torch_bridge.vllm.engines import BLOCK, ROOT, folder

_START = 600  # seconds: on busy cores
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # collective_rpc
    "JAX_PLATFORMS": "cpu",
}


class Client:
    """Requests to a server at a port of this machine."""

    def __init__(self, port: int):
        self.port = port

    def post(self, path: str, body: dict[str, Any]) -> Any:
        with contextlib.closing(self._sent(path, body)) as connection:
            answer = connection.getresponse()
            text = answer.read().decode()
        assert answer.status == 200, text
        return json.loads(text)

    def complete(self, prompt: list[int], tokens: int, **options: Any) -> dict[str, Any]:
        """A completion of ids, greedy unless options say otherwise, with logprobs."""
        given = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "logprobs": 5, "ignore_eos": True}
        return self.post("/v1/completions", {"model": "demo", **given, **options})

    def stream(self, prompt: list[int], tokens: int, stop_after: int | None = None) -> list[str]:
        """Pieces of text as they come; the connection is closed after ``stop_after`` of them, which cancels."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        pieces: list[str] = []
        with contextlib.closing(self._sent("/v1/completions", {**body, "stream": True})) as connection:
            answer = connection.getresponse()
            assert answer.status == 200
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]" or (stop_after is not None and len(pieces) >= stop_after):
                    break
                if data:
                    pieces.append(json.loads(data)["choices"][0]["text"])
        return pieces

    def metric(self, name: str) -> float:
        """A number that the server publishes, summed over its labels."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
        assert found, f"{name} is not published"
        return sum(found)

    def counts(self) -> dict[str, Any]:
        """What :mod:`tests.torch_bridge.vllm.counts` says of the worker."""
        return self.post("/collective_rpc", {"method": "jkv_counts"})["results"][0]

    def _sent(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection


@contextlib.contextmanager
def server(settings: dict[str, str], log: Path, *options: str) -> Iterator[Client]:
    """A server with the demo model, ended with its processes."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder())]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--block-size", str(BLOCK)]
    command += ["--additional-config", json.dumps({"jkv": settings}), *options]
    command += ["--worker-extension-cls", "tests.torch_bridge.vllm.counts.Counts"]
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
    try:
        _wait(process, port, log)
        yield Client(port)
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server did not start: {log.read_text()[-4000:]}")
