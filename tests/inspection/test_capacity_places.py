"""`fewbits fit` on several devices, with system memory behind them, and in the spellings that people use."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import fewbits
from fewbits.devices import catalogue, groups
from fewbits.devices.units import parse_tokens
from fewbits.errors import InputError
from fewbits.inspection.capacity import caches, sources
from fewbits.planning import footprint
from fewbits.planning.footprint import Use

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("text", ["2x3090", "2 x rtx 3090", "rtx 3090,rtx 3090", "RTX 3090 + RTX 3090", "rtx 3090 x2"])
def test_two_cards_have_the_memory_of_two(text: str) -> None:
    one, two = catalogue.find("rtx 3090"), groups.place(text)
    assert two.name == "2 x RTX 3090" and len(two.parts) == 2
    assert two.usable == 2 * one.usable and two.bandwidth == one.bandwidth  # layers are computed one after the other


def test_unlike_cards_read_at_the_rate_of_both_in_turn() -> None:
    fast, slow = catalogue.find("rtx 3090"), catalogue.find("rtx 3060 12gb")
    both = groups.place("rtx 3090 + rtx 3060")
    seconds = sum(card.usable / (1e9 * (card.bandwidth or 0)) for card in (fast, slow))
    assert both.bandwidth == pytest.approx(both.usable / 1e9 / seconds, abs=0.1)


def test_each_further_device_costs_buffers_and_a_part_of_a_layer() -> None:
    shape = sources.typical("70B").shape
    one, two = (footprint.memory(shape, 40 * 10**9, Use(4096, devices=count)) for count in (1, 2))
    assert two.activations - one.activations == footprint.compute_buffer(shape, Use(4096)) + footprint._rounded_inputs(shape, Use(4096))
    assert two.overhead - one.overhead == 40 * 10**9 // 80


def test_a_plan_for_two_devices_fills_them() -> None:
    shape, use = sources.typical("70B").shape, Use(4096, devices=2)
    usable = groups.place("2x3090").usable
    weights = footprint.weight_bytes_left(shape, usable, use)
    assert 0 <= usable - footprint.memory(shape, weights, use).total < 4096


def test_layers_that_do_not_fit_are_offloaded_and_slower(run: Cli) -> None:
    (row,) = fewbits.fit(params="70B", device="rtx 4090 + 64GB", formats="q4_k_m").rows
    split = row.offload
    assert split is not None and row.verdict == "offloads" and 0 < split.layers < split.of == 80
    card = catalogue.find("rtx 4090")
    assert split.gpu_bytes <= card.usable < split.gpu_bytes * (split.layers + 1) / split.layers + 1e9
    assert split.gpu_bytes + split.ram_bytes >= row.memory.weights + row.memory.kv_cache
    (whole,) = fewbits.fit(params="70B", device="3 x rtx 4090", formats="q4_k_m").rows
    assert split.decode and whole.decode and split.decode.high < whole.decode.low
    in_ram = (split.of - split.layers) / split.of * row.memory.weights
    assert split.decode.high < 51.2e9 / in_ram  # the bytes in system memory alone take longer
    code, out, err = run("fit", "--params", "70B", "--device", "rtx 4090", "--ram", "64GB", "--formats", "q4_k_m")
    assert code == 0 and f"{split.layers}/80" in out + err and f"`-ngl {split.layers}`" in out + err


def test_too_little_system_memory_is_no_help(run: Cli) -> None:
    (row,) = fewbits.fit(params="70B", device="rtx 3060 + 16GB", formats="q4_k_m").rows
    assert row.verdict == "does not fit" and row.decode is None
    assert run("fit", "--params", "70B", "--device", "m1 8gb", "--ram", "4GB")[0] == 1
    assert run("fit", "--params", "7B", "--device", "pc ddr5 16gb", "--ram", "4GB")[0] == 2


def test_a_name_means_the_device_with_the_fewest_other_words() -> None:
    for asked, found in (
        ("rtx 3060 ti", "RTX 3060 Ti"), ("rtx 3060", "RTX 3060 12GB"), ("4060", "RTX 4060"), ("rtx 4070 ti super", "RTX 4070 Ti Super"),
    ):  # fmt: skip
        assert groups.place(asked).name == found


def test_a_mac_of_which_only_the_memory_is_known_counts_with_the_slowest() -> None:
    mac = groups.place("mac 32gb")
    alike = [device for device in catalogue.all() if device.kind == "apple" and device.memory == mac.memory]
    assert len(alike) > 2 and mac.bandwidth == min(device.bandwidth or 0 for device in alike) and mac.usable == alike[0].usable
    with pytest.raises(InputError):
        groups.place("mac 20gb")


def test_contexts_are_read_as_they_are_named(run: Cli) -> None:
    assert [parse_tokens(text) for text in ("8192", "8k", "8K", "128k", "1M")] == [8192, 8192, 8192, 131072, 1 << 20]
    code, out, _ = run("fit", "--params", "7B", "--memory", "24GB", "--context", "8k", "--kv", "q8_0", "--json")
    said = json.loads(out)
    assert code == 0 and said["context"] == 8192 and said["kv"] == "q8_0"
    for wrong in ("0", "k", "-1", "8kk", "1.3"):
        code, _, err = run("fit", "--params", "7B", "--memory", "24GB", "--context", wrong)
        assert code == 2 and "`8k`" in err, wrong


def test_a_cache_of_llama_cpp_has_the_bytes_of_its_blocks() -> None:
    """34 bytes for 32 numbers in Q8_0, 18 in Q4_0, 24 in Q5_1: gguf's table."""
    import gguf

    for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"):
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
        assert caches.get(name).head_bytes(128, 256) == 2 * 256 * 128 // block * nbytes


@pytest.mark.parametrize(("text", "total", "active"), [("30B-A3B", 30.5e9, 3e9), ("8x7B", 46.7e9, 12.7e9), ("60b-a6b", 60e9, 6e9)])
def test_a_mixture_is_named_by_two_sizes(text: str, total: float, active: float) -> None:
    found = sources.typical(text)
    read = sum(each.numbers * each.read for each in found.outline.matrices)
    assert found.outline.numbers == pytest.approx(total, rel=0.05) and read == pytest.approx(active, rel=0.1)
    assert "mixture" in found.assumed


def test_a_type_and_a_mix_of_one_name_are_told_apart() -> None:
    rows = fewbits.fit(params="7B", memory="24GB", formats=["Q2_K", "q2_k_s", "q4_k"]).rows
    assert [row.label for row in rows] == ["q2_k", "q2_k pure", "q2_k_s", "q4_k_m", "q4_k pure"]
    size = {row.label: row.memory.weights for row in rows}
    assert size["q2_k pure"] < size["q2_k_s"] < size["q2_k"]
