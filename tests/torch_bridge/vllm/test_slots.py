"""Slots by themselves: who finds its place again, who takes whose, what is struck out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torch_bridge.vllm.sizes import places_for, slots_for, waiting_bytes
from torch_bridge.vllm.slots import NOTHING, Slots, entries


def assign(slots: Slots, *rows: tuple[int, int, int]) -> list[int]:
    """Slots of rows ``(first block, tokens before, tokens with the step)`` in consecutive blocks of one page."""
    begin = torch.tensor([row[1] for row in rows])
    end = torch.tensor([row[2] for row in rows])
    table = torch.tensor([[row[0] + i if row[0] else 0 for i in range(20)] for row in rows], dtype=torch.int32)
    last = (end - 1) // 32
    index = torch.stack([begin // 32 - 1, begin // 32, *(last - back for back in range(slots.depth))], dim=1)
    entry = entries(table, index, 32)
    return slots.assign(begin, end, (end > 0) & (entry[:, 2] >= 0), entry).tolist()


def test_a_row_keeps_its_slot_from_page_to_page():
    slots = Slots(4, 1, "cpu")
    (first,) = assign(slots, (10, 0, 5))
    for tokens in range(5, 100):
        assert assign(slots, (10, tokens, tokens + 1)) == [first]
    assert int((slots.owner >= 0).sum()) == 1 and int(slots.lost) == 0


def test_rows_are_found_in_any_order_and_padding_gets_the_last_slot():
    slots = Slots(4, 1, "cpu")
    a, b, c = assign(slots, (10, 0, 5), (20, 0, 7), (30, 0, 40))
    assert len({a, b, c}) == 3
    assert assign(slots, (30, 40, 41), (10, 5, 6), (0, 0, 0), (20, 7, 8)) == [c, a, slots.count, b]
    assert (slots.owner[slots.padding :] == NOTHING).all()


def test_a_block_that_changes_hands_forgets_whose_it_was():
    slots = Slots(4, 1, "cpu")
    (old,) = assign(slots, (10, 0, 20))
    (new,) = assign(slots, (10, 0, 9))  # freed, and given to another request
    assert new != old and int(slots.owner[old]) == NOTHING
    assert assign(slots, (10, 9, 10)) == [new]


def test_a_row_behind_what_its_page_holds_is_lost_not_misread():
    slots = Slots(4, 1, "cpu")
    assign(slots, (10, 0, 5))
    assign(slots, (10, 9, 10))
    assert int(slots.lost) == 1


def test_who_was_away_longest_loses_first():
    slots = Slots(2, 1, "cpu")
    first = assign(slots, (100, 0, 3))
    taken = [assign(slots, (200 + 10 * i, 0, 3))[0] for i in range(slots.count - 1)]
    assert sorted(taken + first) == list(range(slots.count))
    assert assign(slots, (900, 0, 3)) == first


def test_rows_of_one_prefix_share_no_slot():
    slots = Slots(4, 1, "cpu")
    (first,) = assign(slots, (10, 0, 32))
    both = assign(slots, (10, 32, 33), (10, 32, 40))
    assert first in both and len(set(both)) == 2


@pytest.mark.parametrize("rejected", range(1, 9))
def test_two_pages_are_enough_to_take_tokens_back(rejected):
    slots = Slots(4, 2, "cpu")
    (slot,) = assign(slots, (10, 0, 27))
    assert assign(slots, (10, 27, 36)) == [slot]  # nine tokens, of which some are rejected
    assert assign(slots, (10, 36 - rejected, 40)) == [slot]
    assert int(slots.lost) == 0


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_one_token_go_on_with_what_others_have_begun(seed):
    """Requests come with a prompt, decode, wait a while, end and give their pages to others: within a page they stay
    in their slots, alone, and nobody is lost."""
    chance = random.Random(seed)
    slots, pages = Slots(5, 1, "cpu"), list(range(1, 60))
    running: list[dict[str, Any]] = []
    for _ in range(400):
        if len(running) < 5 and chance.random() < 0.2 and len(pages) > 8:
            running.append({"pages": [pages.pop(chance.randrange(len(pages)))], "length": 0, "slot": None})
        active = [request for request in running if chance.random() < 0.8]
        chunk = any(request["length"] == 0 for request in active)
        counts = [chance.choice([1, 7, 32, 45]) if request["length"] == 0 else 1 for request in active]
        for request, count in zip(active, counts, strict=True):
            while len(request["pages"]) * 32 < request["length"] + count:
                request["pages"].append(pages.pop(chance.randrange(len(pages))))
        before = [request["length"] for request in active]
        if active and chunk:
            after = [begin + count for begin, count in zip(before, counts, strict=True)]
            found = _assigned(slots, active, before, after)
        elif active:
            places = [
                (request["pages"][begin // 32] * 32 + begin % 32) for request, begin in zip(active, before, strict=True)
            ]
            token = torch.tensor([*places, -1])
            *found, spare = slots.advance(token, token >= 0).tolist()
            assert spare == slots.count
        else:
            continue
        assert len(set(found)) == len(found) and int(slots.lost) == 0
        for request, slot, begin, count in zip(active, found, before, counts, strict=True):
            assert not begin % 32 or slot == request["slot"]
            request["slot"], request["length"] = slot, begin + count
            last = request["length"] - 1
            assert int(slots.owner[slot]) == request["pages"][last // 32]
            assert int(slots.held[slot]) == last % 32 + 1
        for request in [request for request in running if request["length"] > 100 or chance.random() < 0.02]:
            running.remove(request)
            pages += request["pages"]
    assert (slots.owner[slots.padding :] == NOTHING).all()


def _assigned(slots: Slots, rows: list[dict[str, Any]], before: list[int], after: list[int]) -> list[int]:
    begin, end = torch.tensor(before), torch.tensor(after)
    table = torch.tensor([row["pages"] + [0] * (20 - len(row["pages"])) for row in rows], dtype=torch.int32)
    entry = entries(table, torch.stack([begin // 32 - 1, begin // 32, (end - 1) // 32], dim=1), 32)
    return slots.assign(begin, end, torch.ones(len(rows), dtype=torch.bool), entry).tolist()


def test_sizes_in_closed_form():
    slots = Slots(40, 2, "cpu")
    assert (slots.count, slots.places) == (slots_for(40), places_for(40, 2))
    waiting = torch.empty(2, slots.places, 3, 32, 64, dtype=torch.bfloat16)
    assert waiting_bytes(40, 2, 3, 64) == waiting.nbytes
