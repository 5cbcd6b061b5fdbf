"""``python -m jkv``."""

import sys

from jkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
