"""The units of the page contract, and the windows that are counted in them: known without JAX, which serving lacks."""

from __future__ import annotations

import dataclasses
from typing import Literal

PAGE_TOKENS = 32  # one page, and one quantization group: 32 tokens of one KV head
SEGMENT = 32  # channels of one metadata group and of one FlagRot segment


@dataclasses.dataclass(frozen=True)
class Windows:
    """Which tokens stay in BF16.

    ``tail="page"`` keeps the unfinished page (at most 31 tokens at rest), ``"0"`` quantizes each token as it is
    written; ``sink`` is the number of first tokens, ``recent`` the number of newest tokens beyond the unfinished
    page (rounded up to whole pages), ``boundary`` the number of first and of last layers kept in BF16.
    """

    tail: Literal["page", "0"] = "page"
    sink: int = 0
    recent: int = 0
    boundary: int = 0

    @property
    def recent_pages(self) -> int:
        return -(-self.recent // PAGE_TOKENS)

    @property
    def tail_tokens(self) -> int:
        """Slots of the BF16 ring that holds the unfinished page and the recent window."""
        return 0 if self.tail == "0" else (self.recent_pages + 1) * PAGE_TOKENS
