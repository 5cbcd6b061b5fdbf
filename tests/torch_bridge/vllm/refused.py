"""Options that an engine must not start with, as JSON on stdin; what they are refused with, behind RESULT."""

from __future__ import annotations

import json
import sys
from typing import Any

from jkv.errors import JkvError


def refusal(options: dict[str, Any]) -> str:
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**options).create_engine_config()
    except JkvError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print("RESULT " + json.dumps([refusal(options) for options in json.load(sys.stdin)]), flush=True)
