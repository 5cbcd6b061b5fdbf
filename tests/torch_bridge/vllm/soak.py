"""A long soak of a server: ``python -m tests.torch_bridge.vllm.soak [--requests 200] [--scheme kivi:bits=4]``.

Random requests, a third of them cancelled, on a cache so small that they wait, are preempted and evict each other.
Every answer is compared with that of the request alone; at the end no block is in use, no slot was lost, and the server
lives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.torch_bridge.vllm.serving import server
from tests.torch_bridge.vllm.test_server import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--workers", type=int, default=16, help="requests at a time")
    parser.add_argument("--blocks", type=int, default=24, help="of the cache")
    parser.add_argument("--scheme", default="kivi:bits=4")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = ("--num-gpu-blocks-override", str(args.blocks))
        with server({"scheme": args.scheme}, Path(folder) / "log", *options) as client:
            soak(client, args.requests, args.workers, args.seed)
    print(f"{args.requests} requests of {args.scheme}: held, {(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
