"""The one option of the plugin: ``--additional-config '{"jkv": {"scheme": "kivi:bits=2", "calibration": PATH}}'``.

vLLM hands ``additional_config`` to every process, so nothing else has to be set, no environment variable either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jkv.errors import JkvError

KEY = "jkv"


@dataclasses.dataclass(frozen=True)
class Settings:
    """``scheme`` is a spec (``jkv schemes``), ``calibration`` the path of a file of ``jkv calibrate``, and
    ``implementation`` one of :data:`torch_bridge.backends.NAMES`; None is the device's default."""

    scheme: str
    calibration: str | None = None
    implementation: str | None = None


def settings_of(additional_config: Any) -> Settings | None:
    """What the user asks for; None where jkv is not asked for.

    Raises:
      JkvError: naming what is missing, unknown or of the wrong kind.
    """
    found = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if found is None:
        return None
    names = [field.name for field in dataclasses.fields(Settings)]
    if not isinstance(found, Mapping) or not found.get("scheme"):
        raise JkvError(
            f"additional_config[{KEY!r}]={found!r} is not allowed; it must be an object with a scheme, such as "
            '{"scheme": "kivi:bits=2", "calibration": "calib.safetensors"}'
        )
    for name, value in found.items():
        if name not in names:
            raise JkvError(f"additional_config[{KEY!r}] has an unknown entry {name!r}; it may have {', '.join(names)}")
        if not isinstance(value, str) and not (value is None and name != "scheme"):
            raise JkvError(f"additional_config[{KEY!r}][{name!r}]={value!r} is not allowed; it must be a string")
    return Settings(**found)
