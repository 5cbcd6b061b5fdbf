"""Key sides: from the bytes of a unit of tokens to its scores.

A key side gives, for
every tile, row half and group of four queries, the raw score ``[32]`` of lane (r, j): token 2r or 2r + 1 of the tile,
query j. Raw scores are base-2 scores divided by the query's ``factor`` (:mod:`pallas_kernels.warp.queries`).
"""

from pallas_kernels.warp.channel_keys import ChannelKeys
from pallas_kernels.warp.plain_keys import FloatKeys, PowerKeys, TableKeys
from pallas_kernels.warp.token_keys import TokenKeys

KeySide = TokenKeys | PowerKeys | FloatKeys | TableKeys | ChannelKeys

__all__ = ["ChannelKeys", "FloatKeys", "KeySide", "PowerKeys", "TableKeys", "TokenKeys"]
