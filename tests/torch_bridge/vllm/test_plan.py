"""The numbers of a step of decoding, by plain integers, and how few operations an engine waits for."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pallas_kernels.bundle.format import ALIGNMENT
from torch_bridge.vllm.batch import NUMBERS, Batch, Step
from torch_bridge.vllm.persistent import Persistent
from torch_bridge.vllm.plan import plan
from torch_bridge.vllm.replays import Record, Replays
from torch_bridge.vllm.slots import Slots

BLOCK = 64
TOTAL = [1, 31, 32, 33, 64, 100, 0, 50]  # tokens with the step's own; the last two rows are padding
BLOCKS = [[3], [4], [5], [6], [7], [8, 9], [0], [2]]
MOST = 60


def batch(counts: list[int]) -> Batch:
    table = torch.zeros(len(TOTAL), 2, dtype=torch.int32)
    slots = []
    for row, (total, blocks) in enumerate(zip(TOTAL, BLOCKS, strict=True)):
        table[row, : len(blocks)] = torch.tensor(blocks)
        slots.append(blocks[(total - 1) // BLOCK] * BLOCK + (total - 1) % BLOCK if total > 0 and row < 6 else -1)
    return Batch(counts, torch.tensor(TOTAL, dtype=torch.int32), None, table, torch.tensor(slots), BLOCK)


def begun(depth: int) -> Slots:
    """Slots in which the rows' pages have begun."""
    slots = Slots(8, depth, "cpu")
    for row, total in enumerate(TOTAL[:6]):
        offset = (total - 1) % 32
        if offset:
            where = BLOCKS[row][(total - 1) // BLOCK] * 2 + (total - 1) % BLOCK // 32
            at = row * depth + (total - 1) // 32 % depth
            slots.owner[at], slots.held[at], slots.stamp[row] = where, offset, 1
    slots.clock.fill_(1)
    return slots


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("counts", [[1] * 8, [1] * 6 + [0, 0]])
def test_numbers(depth: int, counts: list[int]):
    """In one piece, by either way of working them out: slots of two pages take the longer one."""
    slots, given = begun(depth) if depth else None, batch(counts)
    rows = plan(given, slots).singles
    assert rows is not None and rows.total.data_ptr() == given.lengths.data_ptr()
    assert rows.block_table.data_ptr() == given.block_table.data_ptr()
    assert rows.live.tolist() == [True] * 6 + [False] * 2 and rows.active.tolist() == [1] * 6 + [0] * 2
    assert rows.slot.tolist() == given.slot_mapping.tolist()
    assert rows.offset.tolist()[:6] == [0, 30, 31, 0, 31, 3]
    if slots is None:
        assert rows.sealed.tolist()[:6] == TOTAL[:6] and rows.page.tolist() == [-1] * 8
        return
    assert rows.sealed.tolist()[:6] == [0, 0, 0, 32, 32, 96] and min(rows.sealed.tolist()) >= 0
    assert rows.page.tolist() == [-1, -1, 10, -1, 15, -1, -1, -1]
    places = rows.place.tolist()
    assert places[1] == depth and places[2] == 2 * depth and places[5] == 5 * depth + 3 % depth  # where they were
    assert len(set(places[:6])) == 6 and min(places[6:]) >= slots.padding and int(slots.lost) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("counts", [[1] * 8, [1] * 5 + [3, 0, 0]])
def test_kernels_can_load_every_number(depth: int, counts: list[int]):
    slots, given = begun(depth) if depth else None, batch(counts)
    rows = plan(given, slots).singles
    assert rows is not None
    for name in NUMBERS:
        number = getattr(rows, name)
        assert number.dtype is torch.int32 and number.is_contiguous() and number.data_ptr() % ALIGNMENT == 0


def recorder(slots: Slots | None) -> Record:
    """What CUDA graphs do: work is seen once, without effect on slots, and done when it is replayed."""
    state = [] if slots is None else [slots.owner, slots.held, slots.stamp, slots.clock, slots.lost]

    def record(work: Callable[[], None]) -> Callable[[], None]:
        before = [x.clone() for x in state]
        work()
        for x, old in zip(state, before, strict=True):
            x.copy_(old)
        return work

    return record


@pytest.mark.parametrize("depth", [0, 1])
def test_a_recorded_step_is_that_of_the_plan(depth: int):
    """Through 70 steps in which rows come and go, with padding behind; other forms are for the plan."""
    plain, own = (Slots(8, 1, "cpu") if depth else None for _ in range(2))
    replays = Replays(own, Persistent(8, "cpu"), 8, "cpu", recorder(own))
    draw, length, blocks = random.Random(0), [0] * 8, iter(range(1, 10_000))
    table = torch.zeros(8, 4, dtype=torch.int32)
    for number in range(70):
        rows = draw.choice([3, 5, 8])
        active, mapping = draw.randint(1, rows), torch.full((rows,), -1)
        for row in range(rows):
            if row >= active or length[row] % 224 == 0:  # another request
                length[row] = 0
                table[row] = torch.tensor([next(blocks) for _ in range(4)])
            if row < active:
                at = length[row]
                mapping[row] = int(table[row, at // BLOCK]) * BLOCK + at % BLOCK
                length[row] += 1
        lengths = torch.tensor(length[:rows], dtype=torch.int32)
        given = Batch([1] * rows, lengths, None, table[:rows], mapping, BLOCK)
        replays.learn(given)
        found, wanted = replays.step(given), plan(given, plain)
        assert found is not None and found.singles is not None and wanted.singles is not None
        for name, value in wanted.singles._asdict().items():
            assert torch.equal(getattr(found.singles, name), value), (number, name)
        assert found.tokens == wanted.tokens and torch.equal(found.slot_mapping, wanted.slot_mapping)
        assert torch.equal(found.live, wanted.live) and found.is_decoding
    assert own is None or plain is None or (torch.equal(own.owner, plain.owner) and int(own.lost) == int(plain.lost))
    assert replays.step(batch([1] * 5 + [3, 0, 0])) is None  # several tokens
    assert replays.step(dataclasses.replace(given, counts=[1] * 7)) is None  # never seen


@pytest.mark.parametrize("counts", [[], [1] * 9, [2, 1]])
def test_what_cannot_be_recorded_is_left_alone(counts: list[int]):
    replays = Replays(None, Persistent(8, "cpu"), 8, "cpu", recorder(None))
    ones = torch.ones(len(counts), dtype=torch.int32)
    given = Batch(counts, ones, None, ones[:, None], torch.full((len(counts),), -1), BLOCK)
    replays.learn(given)
    assert replays.step(given) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_step_changes_nothing(depth: int):
    slots = begun(depth)
    before = slots.owner.clone(), slots.held[: slots.padding].clone()
    rows = plan(batch([1] * 8), slots, idle=True).singles
    assert rows is not None and not rows.live.any() and set(rows.page.tolist()) == set(rows.slot.tolist()) == {-1}
    assert torch.equal(slots.owner, before[0]) and torch.equal(slots.held[: slots.padding], before[1])


class Operations(TorchDispatchMode):
    """Counts what is computed; views cost nothing that matters."""

    VIEWS = ("slice", "select", "unsqueeze", "expand", "view", "unbind", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in self.VIEWS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_takes_few_operations():
    slots, kept, given = begun(1), Persistent(16, "cpu"), batch([1] * 8)
    kept.hold(plan(given, slots))
    with Operations() as counted:
        step: Step = kept.hold(plan(given, slots))
    assert step.is_decoding and counted.found.total() <= MOST, counted.found
