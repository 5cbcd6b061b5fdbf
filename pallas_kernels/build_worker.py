"""Compile for one AMD architecture in a process of its own.

Triton 3.6 keeps conversions of the architecture that a process compiled for first: after gfx950, code for gfx942 has
instructions that it lacks. So each architecture gets a process, which lives as long as ours and takes one kernel after
the other: ``python -m pallas_kernels.build_worker``, pickled requests on stdin, pickled answers on stdout.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from jkv.errors import JkvError
from pallas_kernels.lowered import Lowered


class Worker:
    """A process that compiles; safe in threads, which take turns."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "pallas_kernels.build_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compile(self, lowered: Lowered, target: str, options: Mapping[str, Any]) -> Any:
        """What :func:`pallas_kernels.build.compile_here` returns there.

        Raises:
          JkvError: as that does, or where the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                _send(self._process.stdin, (lowered, target, dict(options)))
                answer = pickle.load(self._process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                worker_of.cache_clear()
                raise JkvError(f"triton ended while it compiled {lowered.name} for {target}") from None
        if isinstance(answer, str):
            raise JkvError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        self._process.wait()


@functools.cache
def worker_of(target: str) -> Worker:
    """The process that compiles for a target."""
    del target
    return Worker()


def _send(stream: BinaryIO | Any, value: object) -> None:
    pickle.dump(value, stream)
    stream.flush()


def main() -> None:
    """Answer requests until there are no more."""
    from pallas_kernels import build

    # Whatever a compiler prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            lowered, target, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = build.compile_here(lowered, target, options)
        except JkvError as error:
            answer = str(error)
        _send(answers, answer)


if __name__ == "__main__":
    main()
