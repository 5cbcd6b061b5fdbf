"""The process that lowers for this one, started when it is first needed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from typing import Any


class Worker:
    """Takes one request after the other. A fork of this process starts one of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def lower(self, folder: str, target: str, op: str, facts: dict[str, Any]) -> str:
        """Have a bundle made; what is wrong, or nothing."""
        request = json.dumps([folder, target, op, facts]) + "\n"
        with self._lock:
            # One that has waited for long has ended; it may do so just before it is asked.
            for _ in range(2):
                answer = self._ask(request)
                if answer:
                    return answer.strip()
                self.close()
        return "the process that lowers ended; its output says why"

    def close(self) -> None:
        """End the process, or in a fork leave it to whom it belongs to."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        if self._owner == os.getpid():
            process.wait()
        else:
            process.returncode = 0

    def _ask(self, request: str) -> str:
        """The answer with its line end; empty where the process is gone."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:
            return ""

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", "pallas_kernels.bundle.lower"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            self._owner = os.getpid()
        return self._process


@functools.cache
def worker() -> Worker:
    """That of this process."""
    return Worker()
