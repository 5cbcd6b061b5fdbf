"""Descriptions of a model's layers for a process that must not import JAX: another process makes them.

JAX would take most of a GPU's memory the moment it sees it, and an engine is about to give it to its cache.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys

from jkv.errors import JkvError
from torch_bridge.description import Description, from_json


@functools.cache
def layers_of(spec: str, head_dim: int, num_layers: int) -> tuple[Description, ...]:
    """What :func:`torch_bridge.describe.describe_layers` gives; equal layers are one object.

    Raises:
      JkvError: as it does, and where JAX is missing.
    """
    if importlib.util.find_spec("jax") is None:
        raise JkvError(f"scheme {spec!r} cannot be described: jax is not installed; pip install jax")
    command = [sys.executable, "-m", "torch_bridge.vllm.describing", spec, str(head_dim), str(num_layers)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if made.returncode:
        reason = (made.stderr.strip() or "no reason given").splitlines()[-1]
        raise JkvError(reason.removeprefix("jkv.errors.JkvError: "))
    found = json.loads(made.stdout)
    kinds = [from_json(text) for text in found["kinds"]]
    return tuple(kinds[kind] for kind in found["layers"])


def main(spec: str, head_dim: str, num_layers: str) -> None:
    """Print the descriptions, each kind once, and which kind each layer is."""
    from torch_bridge.describe import describe_layers

    layers = describe_layers(spec, int(head_dim), int(num_layers))
    kinds = list(dict.fromkeys(layers))
    print(json.dumps({"kinds": [kind.to_json() for kind in kinds], "layers": [kinds.index(x) for x in layers]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
