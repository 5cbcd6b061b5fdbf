"""Lower one setting in a process of its own: ``python -m pallas_kernels.bundle.lower FOLDER TARGET OP FACTS``.

For a process that holds a GPU through torch: JAX must not take its memory, and need not be imported there.
"""

from __future__ import annotations

import json
import sys

from jkv.errors import JkvError
from pallas_kernels.bundle.facts import OPS


def main(arguments: list[str]) -> int:
    """Make a bundle of all operations that share the facts (JSON) of one; the exit code is 2 where that fails."""
    folder, target, op, facts = arguments

    import jax

    jax.config.update("jax_platforms", "cpu")

    from pallas_kernels.bundle.request import jobs_for
    from pallas_kernels.bundle.write import write_jobs

    try:
        write_jobs(jobs_for(OPS[op](**json.loads(facts)), target), folder, processes=1)
    except JkvError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
