"""The folder for mlx-lm: loaded by its own loader, decoded by MLX, its logits beside torch's."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import SMALL, TOKENS, source_of
from mixtures import MIXTURES, SIZES
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from fewbits import artifact, formats, model, planning, progress, targets
from fewbits.artifact import Artifact
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError, MissingError
from fewbits.inference.engine import run
from fewbits.inspection import contents as inspection
from fewbits.inspection.sizes import size_of
from fewbits.model.weights import Weight
from fewbits.planning import Plan
from fewbits.targets import WrongFileError
from fewbits.targets.export import check_target, target_for, written
from fewbits.targets.mlx import TARGET, contents, package
from fewbits.verification import runtimes, sandbox
from fewbits.verification.runtimes.torch import of_module

pytest.importorskip("mlx.core")
mlx_lm: Any = pytest.importorskip("mlx_lm")

HALF = Weight("any", (256, 256), "mlp", "fp16")
ACCEPTED = [fmt for fmt in formats.all().values() if not fmt.is_cast and TARGET.accepts(HALF, fmt) is None]
SAME = 1e-9  # KL between two orders of summation in float32: 1e-12 is usual


@dataclass(frozen=True)
class Made:
    source: model.Model
    artifact: Artifact
    path: Path

    @property
    def config(self) -> Any:
        return json.loads((self.path / "config.json").read_text())


def made_of(source: model.Model, plan: Plan, folder: Path) -> Made:
    made = artifact.quantize(source, plan, folder / "artifact", progress.silent)
    return Made(source, made, written(made, folder / "m.mlx", to="mlx"))


def uniform(source: model.Model, fmt: str, overrides: tuple[str, ...] = ()) -> Plan:
    check_target(TARGET, source.path, source.config, source.tokenizer)
    return planning.uniform(source.weights, TARGET, formats.get(fmt), overrides)


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_mlx_computes_what_torch_does(made: Made) -> None:
    session = runtimes.get("mlx").open(made.path, len(TOKENS))
    assert kl(of_module(made.artifact.module()).logits(TOKENS), session.logits(TOKENS)) < SAME


def half_llama(folder: Path, layers: int = 2, dtype: str = "float16", **sizes: Any) -> model.Model:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False} | sizes
    config = LlamaConfig(**SMALL, **sizes, num_hidden_layers=layers, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    source_of(config, folder)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return model.open(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.Model:
    return half_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mixed(llama: model.Model, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_of(llama, uniform(llama, "affine4_g64", ("k_proj=fp16", "down_proj=affine6_g32")), tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One model in which every layer has a format of its own: all that the registry has and the target accepts."""
    folder = tmp_path_factory.mktemp("every")
    source = half_llama(folder / "source", layers=-(-len(ACCEPTED) // 7), intermediate_size=128)
    names = [weight.name for weight in source.weights if ".layers." in weight.name]
    chosen = dict(zip(names, ACCEPTED, strict=False))
    rows = {weight.name: {"format": chosen[weight.name].name if weight.name in chosen else "keep"} for weight in source.weights}
    check_target(TARGET, source.path, source.config, source.tokenizer)
    plan = planning.read(json.dumps({"schema": 1, "target": "mlx", "weights": rows}), source.weights, TARGET)
    return made_of(source, plan, folder)


def test_every_format_of_mlx_is_there() -> None:
    names = {fmt.name for fmt in ACCEPTED}
    assert {f"affine{bits}_g{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)} <= names
    assert {"mxfp4", "mxfp8", "nvfp4", "q4_0", "q4_1", "int4_g64"} <= names
    assert not {"q4_k", "affine4_g64_bf16", "int4_g32_asym", "nvfp4_tensor"} & names


def test_mlx_decodes_every_weight_to_exactly_ours(every_format: Made) -> None:
    """By its own loader and its own decoder: fewbits has no hand in it."""
    import mlx.core as mx

    from fewbits.targets.mlx.arrays import to_torch

    loaded = dict(package.loaded(every_format.path)[0].named_modules())
    seen = 0
    for weight in every_format.artifact.weights:
        layer = loaded[weight.name]
        if "scales" not in layer:
            continue
        scales, biases = (array.astype(mx.float32) if array is not None and array.dtype != mx.uint8 else array
                          for array in (layer.scales, layer.get("biases")))  # fmt: skip
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        decoded = mx.dequantize(layer.weight, scales, biases, **how, dtype=mx.float32)
        assert torch.equal(to_torch(decoded), every_format.artifact.decoded(weight)), weight.name
        seen += 1
    assert seen == len(ACCEPTED)


def test_mlx_computes_with_every_format_what_torch_does(every_format: Made) -> None:
    assert_mlx_computes_what_torch_does(every_format)


def test_the_size_is_known_beforehand(llama: model.Model, mixed: Made) -> None:
    plan = mixed.artifact.plan
    assert size_of(mixed.path) == plan.nbytes + TARGET.overhead(Draft(llama, plan))


def test_config_names_the_commonest_scheme_and_the_layers_that_differ(mixed: Made) -> None:
    said = mixed.config["quantization"]
    assert said == mixed.config["quantization_config"]
    usual = {"group_size": 64, "bits": 4, "mode": "affine"}
    assert {key: said[key] for key in usual} == usual
    layers = {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    assert {key for key in said if key not in usual} == layers
    assert all(said[layer] == {"group_size": 32, "bits": 6, "mode": "affine"} for layer in layers)
    assert mixed.config["rope_theta"] == 500000.0  # mlx-lm's Llama does not know `rope_parameters`


def test_mlx_lm_generates(mixed: Made) -> None:
    loaded, tokenizer = mlx_lm.load(str(mixed.path))
    theirs = list(mlx_lm.stream_generate(loaded, tokenizer, tokenizer.encode("a"), max_tokens=3))
    ours = run(mixed.path, "a", max_tokens=3)
    assert ours.tokens == tuple(each.token for each in theirs)
    assert ours.stats.engine.startswith("mlx-lm")
    with pytest.raises(InputError, match="KV cache cannot be int8"):
        run(mixed.path, "a", kv="int8")


def test_a_folder_of_mlx_lm_itself_is_inspected_and_judged(llama: model.Model, tmp_path: Path) -> None:
    from mlx_lm.convert import convert

    convert(str(llama.path), str(tmp_path / "theirs"), quantize=True, q_bits=3, q_group_size=32)
    seen = inspection.inspect(tmp_path / "theirs")
    assert seen.kind == "mlx"
    kinds = {tensor.name: tensor.type for tensor in seen.tensors}
    assert kinds["model.layers.0.mlp.up_proj"] == "affine3_g32"
    shapes = {tensor.name: tensor.shape for tensor in seen.tensors}
    assert shapes["model.layers.0.mlp.up_proj"] == (256, 128)
    assert runtimes.for_file(tmp_path / "theirs").name == "mlx"
    theirs = runtimes.get("mlx").open(tmp_path / "theirs", len(TOKENS)).logits(TOKENS)
    assert 1e-4 < kl(of_module(llama.module()).logits(TOKENS), theirs) < 10


@pytest.mark.slow
def test_a_sound_folder_survives_the_sandbox(mixed: Made) -> None:
    sandbox.check(runtimes.get("mlx"), mixed.path)


def test_a_float_folder_of_mlx_lm_is_known_by_its_weights(llama: model.Model, tmp_path: Path) -> None:
    TARGET.write_draft(Draft(llama, planning.unquantized(llama.weights, TARGET)), tmp_path / "float", progress.silent)
    assert contents.is_mlx(tmp_path / "float") and not contents.is_mlx(llama.path)
    session = runtimes.get("mlx").open(tmp_path / "float", len(TOKENS))
    assert kl(of_module(llama.module()).logits(TOKENS), session.logits(TOKENS)) < SAME


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_become_one_layer(name: str, tmp_path: Path) -> None:
    _, config = MIXTURES[name]
    source = source_of(config, tmp_path / "source")
    made = made_of(source, uniform(source, "affine4_g32"), tmp_path)
    stacks = {t.name: t.shape for t in inspection.inspect(made.path, no_values=True).tensors if "switch_mlp" in t.name}
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert len(stacks) == 3 * SIZES["num_hidden_layers"]
    assert {shape for layer, shape in stacks.items() if layer.endswith("gate_proj")} == {(4, width, SIZES["hidden_size"])}
    assert_mlx_computes_what_torch_does(made)


def test_experts_of_two_formats_are_refused(tmp_path: Path) -> None:
    source = source_of(MIXTURES["mixtral"][1], tmp_path)
    with pytest.raises(InputError, match="experts of a layer are one tensor"):
        uniform(source, "affine4_g32", (r"experts.*\.0$=affine8_g32",))


def test_a_matrix_that_mlx_lm_turns_stays_in_float(tmp_path: Path) -> None:
    from zoo.models import build

    source = model.open(build("deepseek_v3", tmp_path / "source"))
    plan = uniform(source, "affine4_g32_bf16" if source.weights[0].dtype == "bf16" else "affine4_g32")
    kept = {entry.weight.rpartition(".")[2] for entry in plan.entries if formats.get(entry.format).is_cast}
    assert "kv_b_proj" in kept
    made = made_of(source, plan, tmp_path)
    assert_mlx_computes_what_torch_does(made)


def test_rows_are_found_and_what_is_not_whole_rows_is_not(llama: model.Model) -> None:
    from fewbits.targets.mlx.probes import Probes

    probes = Probes(llama.config)
    rows, columns = (probes.tensors(what, narrow=True) for what in ("rows", "columns"))
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    turned = torch.arange(256).flip(0)
    (part,) = probes.found(rows[name][turned], columns[name][turned]) or ()
    assert part.parameter == name and torch.equal(part.rows, turned)
    first, second = probes.found(torch.cat([rows[name], rows[other]]), torch.cat([columns[name], columns[other]])) or ()
    assert (first.parameter, second.parameter) == (name, other)
    assert probes.found(rows[name].mT.contiguous(), columns[name].mT.contiguous()) is None
    assert probes.found(rows[name], columns[name].flip(1)) is None  # columns in another order
    assert probes.found(rows[name], columns[name][:, 1:]) is None
    assert probes.found(rows[name] * 2.0, columns[name]) is None
    assert probes.found(rows[name] - 10**6, columns[name]) is None


def test_an_array_that_is_changed_in_its_place_is_noticed() -> None:
    from fewbits.targets.mlx.arrays import to_mlx
    from fewbits.targets.mlx.layout import _touched

    tensor = torch.arange(1, 7, dtype=torch.int32).reshape(6, 1).expand(6, 4)
    array = to_mlx(tensor)
    assert not _touched(array, tensor)
    for factor in (2, 1.5):
        changed = to_mlx(tensor)
        changed *= factor
        assert _touched(changed, tensor)


def test_names_without_the_prefix_of_the_base_model_are_tried(tmp_path: Path) -> None:
    source = source_of(GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_ctx=128), tmp_path / "source")
    assert_mlx_computes_what_torch_does(made_of(source, uniform(source, "affine4_g32"), tmp_path))


def test_tied_embeddings_and_norms_that_mlx_lm_stores_otherwise(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**SMALL, hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=6, sliding_window=64)
    source = source_of(config, tmp_path / "source")
    assert_mlx_computes_what_torch_does(made_of(source, uniform(source, "affine8_g64"), tmp_path))


def test_scales_have_the_type_of_the_model(tmp_path: Path) -> None:
    source = half_llama(tmp_path / "source", dtype="bfloat16")
    plan = uniform(source, "affine4_g64")  # the next that fits is the same with other scales
    assert {entry.format for entry in plan.entries} == {"affine4_g64_bf16"}
    made = made_of(source, plan, tmp_path)
    assert {str(array.dtype) for array in package.loaded(made.path)[0].parameters()["lm_head"].values()} == {
        "mlx.core.uint32", "mlx.core.bfloat16"
    }  # fmt: skip
    assert_mlx_computes_what_torch_does(made)


def test_an_architecture_that_mlx_lm_does_not_know_is_refused() -> None:
    from transformers import OPTConfig

    config = OPTConfig(vocab_size=160, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32)
    assert "opt not supported" in (TARGET.supports(config, None) or "")


def test_a_layer_of_another_type_than_planned_is_found(mixed: Made, tmp_path: Path) -> None:
    shutil.copytree(mixed.path, tmp_path / "m.mlx")
    config = mixed.config
    for said in (config["quantization"], config["quantization_config"]):
        said["model.layers.0.mlp.down_proj"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (tmp_path / "m.mlx" / "config.json").write_text(json.dumps(config))
    with pytest.raises((WrongFileError, ValueError)):
        TARGET.check(mixed.artifact.plan, mixed.artifact.weights, tmp_path / "m.mlx")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 7, "group_size": 64}, "MLX has no such layers"),
        ({"bits": 4, "group_size": 32}, "by config.json"),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "MLX has no such layers"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(mixed: Made, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    shutil.copytree(mixed.path, tmp_path / "m.mlx")
    (tmp_path / "m.mlx" / "config.json").write_text(json.dumps(mixed.config | {"quantization": change}))
    with pytest.raises(InputError, match=says):
        runtimes.get("mlx").open(tmp_path / "m.mlx", 8)


def test_code_in_a_folder_is_never_run(mixed: Made, tmp_path: Path) -> None:
    shutil.copytree(mixed.path, tmp_path / "m.mlx")
    (tmp_path / "m.mlx" / "config.json").write_text(json.dumps(mixed.config | {"model_file": "evil.py"}))
    (tmp_path / "m.mlx" / "evil.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(InputError, match="custom module"):
        runtimes.get("mlx").open(tmp_path / "m.mlx", 8)


def test_packed_layers_that_compute_something_else_are_noticed(mixed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    right = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *given, **how: right(*given, **how) * 1.01)
    with pytest.raises(InputError, match="packed layers"):
        runtimes.get("mlx").open(mixed.path, 8)


def test_without_mlx_there_is_a_hint(llama: model.Model, mixed: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda _: None)
    for ask in (lambda: runtimes.needed(runtimes.get("mlx")), lambda: run(mixed.path, "a"), lambda: TARGET.supports(llama.config, None)):
        with pytest.raises(MissingError, match="`mlx` is not installed") as raised:
            ask()
        assert raised.value.hint == "pip install 'fewbits[mlx]'"


def test_the_suffix_names_the_target() -> None:
    assert target_for(Path("m.mlx"), None) is targets.get("mlx")
