"""`fewbits fit`: configs against transformers, bytes against written files, verdicts and advice against the arithmetic itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from gguf_models import MODELS, save_random, write

import fewbits
from fewbits import embedded, planning, targets
from fewbits import formats as known_formats
from fewbits import model as models
from fewbits.devices import catalogue, groups
from fewbits.devices.catalogue import Device
from fewbits.errors import InputError
from fewbits.inspection.capacity import caches, configs, estimate, sources, speed
from fewbits.inspection.capacity.outline import outline
from fewbits.planning import decision, footprint, recipes
from fewbits.planning.decision import Budget
from fewbits.planning.footprint import Use

Cli = Callable[..., tuple[int, str, str]]


# --- devices


def test_every_device_has_what_a_verdict_needs_and_says_where_from() -> None:
    names = [device.name for device in catalogue.all()]
    assert len(set(names)) == len(names) > 60
    for device in catalogue.all():
        assert catalogue.find(device.name) is device, "a name is found by itself"
        assert 0 < device.usable < device.memory and device.bandwidth and device.source and device.fast and device.reserved, device.name
        for name in device.fast:
            assert name in ("int8", "fp8") or name in known_formats.all(), name


@pytest.mark.parametrize("spelling", ["rtx4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090"])
def test_a_device_is_found_in_any_spelling(spelling: str) -> None:
    assert catalogue.find(spelling).name == groups.place(spelling).name == "RTX 4090"


def test_a_device_that_is_several_or_none_is_asked_about() -> None:
    assert catalogue.find("m3 max 64gb").name == "M3 Max 64GB"
    assert catalogue.find("l4").name == "L4"
    with pytest.raises(InputError) as several:
        catalogue.find("m3 max")
    assert "`M3 Max 64GB`" in several.value.hint
    with pytest.raises(InputError) as none:
        catalogue.find("rtx 4091")
    assert "`RTX 4090`" in none.value.hint
    for strange in ("", "  ", "gb", "fridge"):
        with pytest.raises(InputError):
            catalogue.find(strange)


def test_bytes_and_names_are_told_apart() -> None:
    assert groups.place("8GB").usable == 8 * 10**9
    assert groups.place("8000000000").usable == 8 * 10**9
    with pytest.raises(InputError) as wrong:
        groups.place("8")
    assert "8GB" in wrong.value.hint


def test_macs_lend_two_thirds_and_large_ones_three_quarters() -> None:
    for name, share in (("M1 8GB", 2 / 3), ("M2 Max 32GB", 2 / 3), ("M3 Pro 36GB", 3 / 4), ("M4 Max 128GB", 3 / 4)):
        device = catalogue.find(name)
        assert device.usable == pytest.approx(device.memory * share, rel=1e-3)


# --- configs, against transformers

SAID: list[dict[str, Any]] = [
    {"model_type": "llama", "num_key_value_heads": None, "num_attention_heads": 16, "hidden_size": 1024},
    {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 160},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
    {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "tie_word_embeddings": True},
    {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560},
    {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1], "decoder_sparse_step": 2},
    {"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 2048},
    {"model_type": "mixtral", "num_local_experts": 4},
    {"model_type": "gemma3_text", "num_hidden_layers": 13, "sliding_window_pattern": 6},
    {"model_type": "gemma2", "num_hidden_layers": 5},
    {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_inner": 2048},
    {"model_type": "phi3", "sliding_window": 2047, "num_key_value_heads": 8},
    {"model_type": "glm4_moe", "first_k_dense_replace": 3, "num_hidden_layers": 6},
]


@pytest.mark.parametrize("said", [*({"model_type": family} for family in configs.known()), *SAID], ids=lambda said: str(said["model_type"]))
def test_a_config_is_read_as_transformers_reads_it(said: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[said["model_type"]].from_dict(dict(said))
    plain = configs.of(said)
    assert footprint.shape(plain) == footprint.shape(whole)
    assert footprint.parameters(footprint.shape(plain)) == footprint.parameters(footprint.shape(whole))
    assert plain.max_position_embeddings == whole.max_position_embeddings


def test_the_text_model_of_a_picture_model_counts() -> None:
    from transformers import Gemma3Config

    said = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}, "vision_config": {"hidden_size": 1152}}
    assert footprint.shape(configs.of(said)) == footprint.shape(Gemma3Config.from_dict(dict(said)))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"model_type": "unheard_of"},
        *({"model_type": "llama", "hidden_size": wrong} for wrong in ("big", 0, True, 1e9, [1], 10**15)),
        *({"model_type": "llama", "max_position_embeddings": wrong} for wrong in ("long", -1, float("inf"))),
    ],
)
def test_what_is_no_config_is_said(content: dict[str, Any]) -> None:
    with pytest.raises(InputError) as wrong:
        configs.of(content)
    assert wrong.value.hint


# --- bytes, against the module and against written files


@pytest.fixture(
    scope="module",
    params=["llama 3 scaling", "llama, untied, with biases", "qwen3", "gemma 3", "phi 3, long", "mixtral", "qwen2 moe", "gpt2, untied"],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(MODELS[request.param](), tmp_path_factory.mktemp("tiny") / "model")


def tensor_bytes(file: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)  # by somebody else's reader


def test_weights_of_a_config_alone_are_those_of_the_written_file(tiny: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config-alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((tiny / "config.json").read_bytes())
    opened = models.open(tiny)
    for name in ("q8_0", "q4_k"):  # blocks of 32, and of 256, into which no row of these models divides
        _, file = write(opened, name, [], tmp_path / name)
        found = fewbits.fit(alone, memory="1GB", formats=f"{name} pure")
        assert found.exact and [row.memory.weights for row in found.rows] == [tensor_bytes(file)]
    stored = fewbits.fit(file, memory="1GB")
    assert stored.rows[0].format == estimate.STORED and stored.rows[0].memory.weights == tensor_bytes(file)
    again = {row.format: row.memory for row in stored.rows[1:]}
    assert again == {row.format: row.memory for row in fewbits.fit(tiny, memory="1GB").rows}, "the header says what the config says"


def test_matrices_are_those_of_the_module(tiny: Path) -> None:
    opened = models.open(tiny)
    found = outline(configs.of(json.loads((tiny / "config.json").read_text())))
    firsts = {weight.name: weight for weight in opened.weights if not weight.expert}
    assert {each.weight.name: each.weight.shape for each in found.matrices} == {name: weight.shape for name, weight in firsts.items()}
    assert {each.weight.name: each.weight.tied_to for each in found.matrices} == {name: weight.tied_to for name, weight in firsts.items()}
    assert found.numbers == sum(rows * cols for rows, cols in (weight.shape for weight in opened.weights))
    assert sum(each.read * each.numbers for each in found.matrices) == pytest.approx(
        footprint.parameters(footprint.shape(opened.config)).active - _routers(footprint.shape(opened.config))
    )


def _routers(shape: footprint.Shape) -> int:
    """They are counted among the matrices there, and among what is kept in float32 here."""
    return sum(shape.experts.layers) * shape.experts.count * shape.hidden if shape.experts else 0


def test_the_embedded_model_weighs_what_its_files_do(embedded_model: models.Model, tmp_path: Path) -> None:
    names = [*estimate.FORMATS, "q4_k pure", "q2_k pure", "int4_g32"]
    found = {row.label: row.memory.weights for row in fewbits.fit(embedded.MODEL, memory="1GB", formats=names).rows}
    assert set(names) <= set(found) and found["q2_k pure"] < found["q2_k"]
    kept = 4 * sum(embedded_model.tensor(name).numel() for name in embedded_model.rest)
    for name, nbytes in found.items():
        if name not in recipes.known():
            plan = planning.uniform(embedded_model.weights, targets.get("gguf"), known_formats.get(name.removesuffix(" pure")))
            assert nbytes == plan.nbytes + kept
        else:
            assert nbytes == recipes.nbytes(name, embedded_model.weights, embedded_model.config) + kept
    _, file = write(embedded_model, "q6_k", [], tmp_path)
    assert found["q6_k"] == tensor_bytes(file)


def test_an_unknown_architecture_is_counted_by_its_tensors_or_said_to_be_near(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config = {"model_type": "unheard_of", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    near = fewbits.fit(tmp_path, memory="1GB", formats="fp16")
    assert not near.exact and "unheard_of" in near.assumed
    tensors = {"model.embed_tokens.weight": (96, 64), "a.weight": (64, 32), "experts": (3, 64, 32), "norm.weight": (64,)}
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    (row,) = fewbits.fit(tmp_path, memory="1GB", formats="fp16").rows
    assert row.memory.weights == 2 * (96 * 64 + 64 * 32 + 3 * 64 * 32) + 4 * 64


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{not json......"])
def test_a_damaged_header_is_said(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard_of", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96})
    )
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(InputError, match="cannot be read"):
        fewbits.fit(tmp_path, memory="1GB")


@pytest.mark.parametrize(
    ("text", "numbers"), [("7B", 7e9), ("135M", 135e6), ("70b", 70e9), ("1.5B", 1.5e9), ("20B", 20e9), ("500000000", 5e8)]
)
def test_a_typical_model_has_about_so_many_parameters(text: str, numbers: float) -> None:
    found = sources.typical(text)
    assert abs(found.outline.numbers / numbers - 1) < 0.05
    assert "like" in found.assumed


@pytest.mark.parametrize("text", ["", "7", "seven", "-7B", "0B", "7Q", "1K"])
def test_what_is_no_number_of_parameters_is_said(text: str) -> None:
    with pytest.raises(InputError) as wrong:
        sources.typical(text)
    assert wrong.value.hint


# --- verdicts

SETTINGS: list[dict[str, Any]] = [
    {"params": "7B", "device": "rtx4060", "context": 32768},
    {"params": "7B", "memory": "6GB", "context": 8192, "kv": "int8"},
    {"params": "70B", "device": "rtx 4090"},
    {"params": "70B", "device": "2x3090", "context": 16384, "kv": "q8_0"},
    {"params": "8B", "device": "m1 8gb", "batch": 4},
    {"params": "1B", "device": "raspberry pi 5 4gb", "context": 131072, "runtime": "fewbits"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings['params']} {settings.get('device', 'memory')}")
def test_verdicts_contexts_and_advice_hold_when_tried(settings: dict[str, Any]) -> None:
    found = fewbits.fit(**settings)
    shape = sources.typical(settings["params"]).shape
    use = Use(
        found.context, found.batch, caches.get(found.kv), runtime=found.runtime, reserved=found.device.reserves,
        devices=len(found.device.parts or (found.device,)),
    )  # fmt: skip
    weights = {row.format: row.memory.weights for row in found.rows}

    def fits(name: str, use: Use) -> bool:
        return footprint.memory(shape, weights[name], use).total <= found.device.usable

    for row in found.rows:
        assert row.margin == found.device.usable - row.memory.total
        assert row.fits == fits(row.format, use)
        assert (row.verdict == "fits") == (row.memory.total * 1.1 <= found.device.usable)
        if row.largest_context:
            assert fits(row.format, replace(use, context=row.largest_context))
        if row.largest_context < found.longest:
            assert not fits(row.format, replace(use, context=row.largest_context + 1))
        assert bool(row.changes) <= (not row.fits)
        for change in row.changes:
            assert _tried(change, row.format, use, fits), change
        others = (
            any(fits(name, use) for name in weights)
            or fits(row.format, replace(use, kv=caches.get(caches.SMALLER[use.runtime][1])))
            or row.largest_context >= 256
        )
        assert row.fits or bool(row.changes) or not others


def _tried(change: str, name: str, use: Use, fits: Callable[[str, Use], bool]) -> bool:
    words = change.split()
    if words[0] == "context":
        cache = caches.get(words[-1]) if "with" in words else use.kv
        return fits(name, replace(use, context=int(words[1].replace(",", "")), kv=cache))
    if change.endswith("KV cache"):
        return fits(name, replace(use, kv=caches.get(words[0])))
    return words[3] == name and fits(words[0], use)


@pytest.mark.parametrize("place", ["rtx4060", "m1 8gb", "pc ddr4 8gb", "6GB"])
def test_a_plan_for_a_device_takes_what_fit_leaves(place: str, embedded_model: models.Model) -> None:
    """One arithmetic: with the bytes that `--fits` allows and its container, the total is the device's memory, to the byte."""
    budget, device = Budget(fits=place, context=512), groups.place(place)
    table: Any = SimpleNamespace(config=embedded_model.config.to_dict(), containers={})
    limit = decision.tensor_bytes(table, targets.get("gguf"), budget, 1, 100_000, None)
    use = Use(512, reserved=device.reserves)
    assert footprint.memory(footprint.shape(embedded_model.config), limit + 100_000, use).total == device.usable
    with pytest.raises(InputError):
        Budget(fits="rtx 4061")


def test_a_cpu_counts_what_is_touched_and_a_gpu_what_is_reserved() -> None:
    shape = sources.typical("1B").shape
    reserved, touched = (footprint.memory(shape, 0, Use(4096, reserved=kept)).activations for kept in (True, False))
    assert reserved - touched == 512 * 4 * (shape.vocabulary - shape.mlp_matrices * shape.mlp)
    assert not catalogue.find("pc ddr5 16gb").reserves and catalogue.find("rtx4090").reserves and groups.place("8GB").reserves


# --- speed


def test_codebook_types_may_be_slower_on_a_cpu_than_their_bytes_say() -> None:
    """iq2_xs takes 0.67 of q3_k's bytes, and its kernels 2.5 times as long for a byte."""
    on = {
        device: estimate.fit(params="7B", device=device, formats=("q3_k pure", "iq2_xs pure", "iq2_m")).rows
        for device in ("pc ddr5 16gb", "rtx4090")
    }
    for device, rows in on.items():
        low, high = ([getattr(row.decode, end) for row in rows] for end in ("low", "high"))
        assert (low[1] < low[0]) == (low[2] < low[0]) == (device != "rtx4090")
        assert high[1] > high[2] > high[0]


ROUND = Device("round numbers", "pc", 2, 1, bandwidth=100.0, half=10.0, int8=40.0)


def test_speeds_are_bytes_over_bandwidth_and_operations_over_the_peak() -> None:
    shape = sources.typical("1B").shape
    found = speed.decode(shape, 1e9, Use(4096), ROUND)
    assert found and found.high == pytest.approx(100 * 0.85)
    assert found.low == pytest.approx(1 / ((1e9 + footprint.kv_bytes(shape, Use(4096))) / (100e9 * 0.4)))
    gpu = speed.decode(shape, 1e9, Use(4096), replace(ROUND, kind="gpu"))
    assert gpu and 1 / gpu.low - 1 / found.low == pytest.approx(len(shape.windows) * 50e-6)
    four = speed.decode(shape, 1e9, Use(4096, sequences=4), ROUND)
    assert four and four.high == pytest.approx(4 * found.high)
    few_cores = speed.decode(shape, 1e9, Use(4096), ROUND, kernels=0.2)
    assert few_cores and few_cores.high == found.high
    assert 1 / few_cores.low - 1 / found.low == pytest.approx(1e9 / (100e9 * 0.2) - 1e9 / (100e9 * 0.4))
    assert speed.decode(shape, 1e9, Use(4096), replace(ROUND, kind="gpu"), kernels=0.2) == gpu
    floats, packed = (speed.prefill(1e9, quantized, ROUND) for quantized in (False, True))
    assert floats == speed.Range(0.25 * 10e12 / 2e9, 0.75 * 10e12 / 2e9)
    assert packed == speed.Range(0.25 * 10e12 / 2e9, 0.3 * 40e12 / 2e9)
    assert speed.decode(shape, 1e9, Use(4096), replace(ROUND, bandwidth=None)) is None
    assert speed.prefill(1e9, True, replace(ROUND, half=None)) is None


def test_experts_that_are_not_chosen_are_not_read() -> None:
    config = configs.of({"model_type": "mixtral"})
    found = outline(config)
    read = sum(each.numbers * each.read for each in found.matrices)
    experts = sum(each.numbers for each in found.matrices if each.weight.expert is not None)
    assert read == found.numbers - 32000 * 4096 - experts * (1 - 2 / 8)


# --- the command line


def test_fit_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from fewbits import cli; sys.argv = ['fewbits', 'fit', sys.argv[1], '--json']\n"
        "try: cli.main()\nexcept SystemExit as ended: sys.exit(9 if {'torch', 'transformers'} & sys.modules.keys() else ended.code)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(embedded.MODEL)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["device"]["name"] == "this machine" and said["device"]["usable"] > 0 and not said["asked"]


def test_exit_codes_say_whether_anything_fits(run: Cli) -> None:
    assert run("fit", "--params", "7B", "--device", "rtx4090")[0] == 0
    code, out, err = run("fit", "--params", "70B", "--device", "rtx4060")
    assert code == 1 and "nothing fits" in out and "nothing fits" not in err
    assert run("fit", "--params", "7B", "--memory", "8GB", "--formats", "fp16")[0] == 1
    assert run("fit", "--params", "7B", "--memory", "8GB", "--formats", "fp16,q4_k_m")[0] == 0
    for wrong in (
        [], ["x", "--params", "7B"], ["--params", "7B", "--device", "rtx4090", "--memory", "8GB"], ["--params", "7B", "--formats", "q9"],
        ["--params", "7B", "--device", "fridge"], ["no/such/folder"], ["--params", "7B", "--runtime", "crystal ball"],
        ["--params", "7B", "--device", "rtx4090", "--runtime", "fewbits"], ["--params", "7B", "--kv", "int3"],
    ):  # fmt: skip
        code, out, err = run("fit", *wrong)
        assert code == 2 and not out and "hint:" in err and "Traceback" not in err, wrong


@pytest.mark.parametrize(
    "settings", [*SETTINGS, {"params": "405B", "device": "m3 ultra 512gb"}], ids=lambda settings: str(settings["params"])
)
def test_everything_fits_80_columns(settings: dict[str, Any], run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewbits.reporting.terminal import capacity

    monkeypatch.setattr(capacity.console, "_width", 80)
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    _, out, err = run("fit", *words)
    assert max(map(len, (out + err).splitlines())) <= 80, out + err
    assert "estimate" in out or "memory" in settings


def test_bars_are_as_long_as_the_memory_they_stand_for(run: Cli) -> None:
    _, out, _ = run("fit", "--params", "7B", "--device", "rtx4090", "--formats", "q4_k_m,fp16", "--context", "16k")
    bars = {line.split()[0]: line.split("|")[1] for line in out.splitlines() if line.count("|") == 2}
    found = fewbits.fit(params="7B", device="rtx4090", formats=["q4_k_m", "fp16"], context=16384)
    for row in found.rows:
        bar = bars[row.format]
        assert len(bar) == 60
        assert bar.count("#") == pytest.approx(60 * row.memory.weights / found.device.usable, abs=0.51)
        assert bar.count(".") == pytest.approx(60 * row.margin / found.device.usable, abs=0.51)


def test_the_catalogue_is_listed_with_its_sources(run: Cli) -> None:
    code, out, _ = run("fit", "--devices", "--json")
    assert code == 0 and {each["name"] for each in json.loads(out)} == {device.name for device in catalogue.all()}
    assert all(each["source"] for each in json.loads(out))
    code, out, _ = run("fit", "--devices")
    assert code == 0 and "RTX 4090" in out
