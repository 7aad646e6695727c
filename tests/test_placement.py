"""Experts on their way to a device: right bytes in two buffers in any order of use; what no device can is refused.

No CUDA here: `CudaLane` and the device's answers are stood in for.
"""

import itertools

import pytest
import torch

from replayer import placement
from replayer.device import NoAccelerator
from replayer.placement import Copied, adopted, check_placement


class HostLane:
    """Two buffers of host memory, and what was asked of them."""

    def __init__(self, slot_bytes: int) -> None:
        self.buffers = [torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(2)]
        self.asked: list[tuple[str, int]] = []

    def copy(self, buffer: int, slot: torch.Tensor) -> None:
        self.asked.append(("copy", buffer))
        self.buffers[buffer][: len(slot)] = slot

    def arrive(self, buffer: int) -> torch.Tensor:
        self.asked.append(("arrive", buffer))
        return self.buffers[buffer]


def event(experts: int) -> tuple[HostLane, Copied]:
    lane = HostLane(4)
    slots = [torch.full((4,), 1 + number, dtype=torch.uint8) for number in range(experts)]
    return lane, Copied(lane, slots, lambda place, whole: {"low": whole[:2], "high": whole[2:]})


@pytest.mark.parametrize("order", itertools.permutations(range(4)))
def test_every_order_of_use_finds_its_own_bytes(order: tuple[int, ...]) -> None:
    _, copied = event(4)
    experts = copied.experts()
    for place in order:
        assert {name: part.tolist() for name, part in experts[place].items()} == dict.fromkeys(
            ("low", "high"), [1 + place] * 2
        )


def test_the_next_expert_is_copied_before_the_one_at_hand_is_computed_and_each_once() -> None:
    lane, copied = event(3)
    for expert in copied.experts():
        assert set(expert) == {"low", "high"}
    assert lane.asked == [
        ("copy", 1), ("arrive", 1), ("copy", 0), ("arrive", 0), ("copy", 1), ("arrive", 1),
    ]  # fmt: skip


def test_without_a_device_a_placement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wanted in placement.PLACEMENTS:
        with pytest.raises(NoAccelerator, match=f"--placement {wanted}, but torch .* sees no CUDA device"):
            check_placement(wanted)


@pytest.mark.parametrize("missing", [88, 100, None])
def test_a_device_adopts_only_where_it_follows_the_hosts_page_tables(
    missing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def attribute(number: int) -> int:
        return int(number != missing)

    check_placement("copy", attribute)
    if missing is None:
        check_placement("adopt", attribute)
    else:
        with pytest.raises(NoAccelerator, match=r"of the CUDA device is 0, wanted 1"):
            check_placement("adopt", attribute)


def test_adopted_memory_is_the_same_memory() -> None:
    memory = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    same = adopted(memory, torch.device("cpu"))
    memory[1, 2] = 99
    assert (same.data_ptr(), same.shape, same[1, 2].item()) == (memory.data_ptr(), memory.shape, 99)
