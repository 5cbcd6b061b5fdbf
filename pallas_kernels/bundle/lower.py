"""Lower settings in a process of its own: ``python -m pallas_kernels.bundle.lower``.

For a process that holds a GPU through torch: JAX must not take its memory, and need not be imported there. Importing it
takes longer than lowering, so one process serves many requests: a JSON array ``[FOLDER, TARGET, OP, FACTS]`` a line of
stdin, an empty line of stdout for what is done or a line that says what is wrong. It ends with its stdin, or after two
minutes without work.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

from jkv.errors import JkvError
from pallas_kernels.bundle.facts import OPS

_PATIENCE = 120  # seconds


def lower(folder: str, target: str, op: str, facts: dict[str, Any]) -> None:
    """Make a bundle of all operations that share the facts of one.

    Raises:
      JkvError: for facts that the scheme or its kernels do not allow.
    """
    from pallas_kernels.bundle.request import jobs_for
    from pallas_kernels.bundle.write import write_jobs

    write_jobs(jobs_for(OPS[op](**facts), target), folder, processes=1)


def main() -> int:
    """Serve stdin. Answers have stdout to themselves: whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    import jax

    jax.config.update("jax_platforms", "cpu")
    while select.select([sys.stdin], [], [], _PATIENCE)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        try:
            lower(*json.loads(line))
            wrong = ""
        except JkvError as error:
            wrong = " ".join(str(error).split())
        print(wrong, file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
