"""Which request's unfinished page waits where: BF16 memory of a fixed size, handed out on the device once a step.

A *slot* is what one running request has: one BF16 page, or two where speculative tokens may be taken back, so that a
page that was quantized with tokens that are then rejected can be read in BF16 again and quantized again. The page with
index p in its sequence lies in ``slot * depth + p % depth``; the memory itself is a tensor a layer, and all layers of a
group share the answer.

The owner of a page in a slot is a *physical page* of the cache (block and place in it): a page that is not full has one
writer, whatever the engine does to rows. Prefix caching shares full blocks only, a preempted request starts again at
the beginning of a page, and a block that another request gets is claimed again from the beginning of a page, which
strikes the old owner out. A row in the middle of a page that nobody owns would read what is not there: it is counted
as ``lost``, and never happens as long as there are more slots than running requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jkv.units import PAGE_TOKENS
from torch_bridge.vllm.sizes import places_for, slots_for

NOTHING = -1  # no physical page
_NULL_BLOCK = 0
_ABSENT = -2  # what no owner is
_LATEST = torch.iinfo(torch.int64).max


class Slots:
    """Slots for ``rows`` running requests and some more, since requests that ended are not announced.

    ``owner: int64[(count + 1) * depth]`` is the physical page that each place holds, ``held`` how many of its tokens,
    ``stamp`` when a slot was last used. The last slot takes what padding writes; nobody owns it.
    """

    def __init__(self, rows: int, depth: int, device: torch.device | str):
        self.count, self.depth = slots_for(rows), depth
        places = places_for(rows, depth)
        self.owner = torch.full((places,), NOTHING, dtype=torch.int64, device=device)
        self.held = torch.zeros(places, dtype=torch.int64, device=device)
        self.stamp = torch.zeros(self.count + 1, dtype=torch.int64, device=device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self.lost = torch.zeros((), dtype=torch.int64, device=device)
        # Numbers that steps need on the device, where a number of the host would be an operation more.
        numbers = (NOTHING, _ABSENT, self.count, 0)
        self._nothing, self._absent, self._spare, self._free = torch.tensor(numbers, device=device).unbind()

    @property
    def places(self) -> int:
        """Pages in all slots, those of padding too."""
        return self.owner.shape[0]

    @property
    def padding(self) -> int:
        """The place that takes what padding writes."""
        return self.count * self.depth

    def assign(self, begin: Tensor, end: Tensor, live: Tensor, entry: Tensor) -> Tensor:
        """The slot of every row of a step, ``int64[R]``; rows that are not ``live: bool[R]`` get the last one.

        Rows have ``begin: int64[R]`` tokens and write up to ``end``. ``entry: int64[R, depth + 2]`` has physical
        pages, -1 where there is none: of the page before that of token ``begin``, of that one, and then of the page of
        the last token and of ``depth - 1`` pages before it, from the last one backwards.
        """
        first, last = begin // PAGE_TOKENS, (end - 1) // PAGE_TOKENS
        slot, kept = self._find(begin % PAGE_TOKENS, live, entry[:, 0], entry[:, 1])
        pages = [last - back for back in range(self.depth)]
        written = [live & (page >= first) for page in pages]
        claims = torch.stack([torch.where(w, entry[:, 2 + i], _ABSENT) for i, w in enumerate(written)])
        # Whoever else holds a page that is written now holds what was there before.
        struck = (self.owner == claims.flatten()[:, None]).any(0)
        self.owner.masked_fill_(struck, NOTHING)
        for back, (page, claimed) in enumerate(zip(pages, written, strict=True)):
            place = slot * self.depth + page % self.depth
            owner = torch.where(claimed, claims[back], torch.where(kept, self.owner[place], NOTHING))
            held = end - last * PAGE_TOKENS if back == 0 else torch.full_like(end, PAGE_TOKENS)
            held = torch.where(claimed, held, self.held[place])
            self.owner.index_copy_(0, place, owner)
            self.held.index_copy_(0, place, held)
        self._use(slot, end % PAGE_TOKENS == 0)
        self.owner[self.padding :] = NOTHING
        return slot

    def advance(self, token: Tensor, live: Tensor) -> Tensor:
        """What :meth:`assign` does, for rows that write one token each into slots of one page, in fewer operations.

        ``token: int64[R]`` is where in the cache a row's token goes, its physical page times 32 and the place in it.
        """
        here, offset = token // PAGE_TOKENS, token % PAGE_TOKENS
        begun = offset > 0
        wanted = torch.where(live & begun, here, self._absent)
        found, slot = _first((self.owner == wanted[:, None]) & (self.held >= offset[:, None]))
        new = live & ~found
        self.lost += (new & begun).sum()
        # The page before is full and needs no slot any more: whoever begins one takes what is free longest.
        age = self.stamp.clone().index_fill_(0, torch.where(found, slot, self._spare), _LATEST)
        order = torch.argsort(age[: self.count], stable=True)
        fresh = order[(new.cumsum(0) - 1).clamp(0, self.count - 1)]
        slot = torch.where(found, slot, torch.where(new, fresh, self._spare))
        claims = torch.where(live, here, self._nothing)
        self.owner.masked_fill_((self.owner == claims[:, None]).any(0), NOTHING)
        self.owner.index_copy_(0, slot, claims)
        self.held.index_copy_(0, slot, offset + 1)
        self._use(slot, offset == PAGE_TOKENS - 1)
        return slot

    def _use(self, slot: Tensor, full: Tensor) -> None:
        """Note who is used now. A page that is full is read in BF16 for the last time, where it cannot shrink again."""
        self.clock += 1
        used = self.clock.expand(slot.shape)
        self.stamp.index_copy_(0, slot, torch.where(full, self._free, used) if self.depth == 1 else used)

    def _find(self, offset: Tensor, live: Tensor, before: Tensor, here: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's slot, and whether it was the row's before."""
        spare = torch.full_like(here, self.count)
        wants = live & (offset > 0)
        hit = (self.owner == here[:, None]) & (self.held >= offset[:, None]) & wants[:, None]
        found, at = _first(hit)
        self.lost += (wants & ~found).sum()
        busy = torch.zeros(self.count + 1, dtype=torch.bool, device=live.device)
        busy.index_fill_(0, torch.where(found, at // self.depth, spare), True)
        # A row at the beginning of a page needs nothing, but goes on in its slot. The page before may be another
        # request's too (a shared prefix): the first row takes the slot.
        near = (self.owner == before[:, None]) & (live & ~wants & (before >= 0))[:, None]
        beside, place = _first(near)
        place = place // self.depth
        beside &= ~busy[place]
        number = torch.arange(len(live), device=live.device)
        winner = torch.full_like(self.stamp, len(live))
        winner.scatter_reduce_(0, torch.where(beside, place, spare), number, "amin")
        beside &= winner[place] == number
        busy.index_fill_(0, torch.where(beside, place, spare), True)
        kept = found | beside
        # All others take what was used longest ago.
        age = torch.where(busy[: self.count], _LATEST, self.stamp[: self.count])
        order = torch.argsort(age, stable=True)
        new = live & ~kept
        fresh = order[(new.cumsum(0) - 1).clamp(0, self.count - 1)]
        slot = torch.where(found, at // self.depth, torch.where(beside, place, torch.where(new, fresh, spare)))
        return slot, kept


def _first(hit: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``hit: bool[R, N]``: whether a row has any, and the first one."""
    return hit.any(1), hit.to(torch.uint8).argmax(1)


def entries(block_table: Tensor, page: Tensor, block_tokens: int) -> Tensor:
    """Physical pages of a row's pages ``page: int64[R, N]``; -1 for those before the first, or in the null block."""
    per_block = block_tokens // PAGE_TOKENS
    block = block_table.gather(1, (page // per_block).clamp(0, block_table.shape[1] - 1)).to(torch.int64)
    return torch.where((page >= 0) & (block != _NULL_BLOCK), block * per_block + page % per_block, -1)
