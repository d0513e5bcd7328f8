"""Convolutions as weights: (out, in / groups * kernel) matrices that are multiplied with what the kernel covers."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from fewbits import artifact, calibration, embedded, formats, model, planning, targets
from fewbits.artifact import outcomes
from fewbits.calibration import recorders, text
from fewbits.calibration.text.samples import Samples
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model.walk import Batch
from fewbits.model.weights import Weight
from fewbits.progress import silent
from fewbits.targets import export
from fewbits.verification import runtimes

EPS = torch.finfo(torch.float32).eps
CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 15)),
    (nn.Conv1d(4, 6, 3, dilation=2, padding="same", padding_mode="reflect"), (2, 4, 15)),
    (nn.Conv2d(3, 5, (2, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), (2, 3, 8, 9)),
    (nn.Conv2d(3, 5, 4, stride=4), (3, 8, 8)),
    (nn.Conv3d(2, 4, (2, 2, 3), stride=(2, 2, 1)), (1, 2, 4, 4, 5)),
]


@pytest.fixture(scope="module")
def windows(embedded_model: Model) -> list[list[int]]:
    return text.windows.windows(embedded.calibration_text(), embedded_model.tokenizer, 24)[:2]


def samples_of(ids: list[list[int]]) -> Samples:
    return Samples(tuple(map(tuple, ids)), ("test",) * len(ids), 0, hashlib.sha256(str(ids).encode()).hexdigest(), 1)


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return folder


@pytest.mark.parametrize(("convolution", "shape"), CONVOLUTIONS)
def test_they_are_products_with_what_the_kernel_covers(convolution: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    patches, w = recorders.inputs_of(convolution, x), convolution.weight.detach().flatten(1)
    y = recorders.outputs_of(convolution, convolution(x)).detach()
    ours = F.linear(patches, w, convolution.bias.detach()).reshape(y.shape)
    magnitude = F.linear(patches.abs(), w.abs(), convolution.bias.detach().abs()).reshape(y.shape)
    assert ((ours - y).abs() <= (w.shape[1] + 1) * EPS * magnitude).all()  # two sums of as many terms, each off by half of that


@pytest.mark.parametrize(
    ("cls", "config", "inputs", "shapes"),
    [
        (
            ViTForImageClassification,
            ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4),
            {"pixel_values": (1, 3, 16, 16)},
            {(32, 3 * 4 * 4)},
        ),
        (
            Wav2Vec2Model,
            Wav2Vec2Config(
                hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16), conv_stride=(5, 2),
                conv_kernel=(10, 3), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
            ),
            {"input_values": (1, 2000)},
            {(16, 10), (16, 16 * 3)},  # the third is computed from two parameters by a parametrization: it is no weight
        ),
    ],
)  # fmt: skip
def test_encoders_are_read_and_put_back(cls: Any, config: Any, inputs: dict[str, Any], shapes: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = cls(config).eval()
    theirs.save_pretrained(tmp_path / "encoder")
    source = model.open(tmp_path / "encoder")
    assert {weight.shape for weight in source.weights if weight.kind == "convolution"} == shapes
    given = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in inputs.items()}

    def outputs(module: Any) -> Tensor:
        with torch.inference_mode():
            found: Tensor = module(**given)[0]
        return found

    assert torch.equal(outputs(source.module()), outputs(theirs))
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("int8_channel"))
    made = artifact.quantize(source, plan, tmp_path / "a", silent)
    own = dict(theirs.named_parameters())
    with torch.no_grad():
        for weight in made.weights:
            own[weight.parameter].copy_(made.decoded(weight).view(own[weight.parameter].shape))
    assert torch.equal(outputs(made.module()), outputs(theirs))


def test_one_in_groups_is_rounded_without_statistics(windows: list[list[int]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=2048, state_size=8)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    source = model.open(with_tokenizer(tmp_path / "mamba"))
    found = calibration.collect(source, samples_of(windows[:2]), tmp_path / "stats")
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get("int8_channel"), method="gptq")
    made = {weight.name: outcome for weight, outcome in outcomes.independent(source, plan, found, silent)}
    grouped = made["backbone.layers.1.mixer.conv1d"]
    assert grouped.method == "rtn" and "saw none" in grouped.notes[0] and made["backbone.layers.1.mixer.in_proj"].method == "gptq"


def test_gradients_of_their_outputs_are_recorded() -> None:
    torch.manual_seed(0)
    convolution, x = nn.Conv1d(4, 6, 3, padding=1).requires_grad_(False), torch.randn(2, 4, 7)
    weight = Weight("conv", (6, 12), "convolution", "fp32")
    recorder = recorders.GradientRecorder(recorders.Watched({"conv": convolution}), [weight], hessians=True)
    with recorder.attached():
        recorder.next_batch(Batch(torch.zeros(2, 7), half=1, start=0))
        out = convolution(x.requires_grad_())
        back = torch.randn(out.shape)
        out.backward(back)
    found, g = recorder.gradients["conv"], back.double()
    torch.testing.assert_close(found.gradient_square[1], g.square().sum((0, 2)), rtol=1e-5, atol=0)
    w = g.square().mean(1)
    torch.testing.assert_close(found.sensitivity[1], torch.stack([w[:, 0].sum(), w[:, 1:].sum()]), rtol=1e-5, atol=0)
    patches = F.unfold(x.detach().unsqueeze(2), (1, 3), padding=(0, 1)).transpose(1, 2).double()
    assert found.fisher is not None
    expected = torch.einsum("bt,bti,btj->ij", w, patches, patches)
    torch.testing.assert_close(found.fisher[1].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.diagonal().max()))


@pytest.mark.slow
def test_onnx_keeps_them_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=2048,
        max_position_embeddings=128, layer_types=["conv", "full_attention"], bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path / "lfm2")
    source = model.open(with_tokenizer(tmp_path / "lfm2"))
    (convolution,) = (weight for weight in source.weights if weight.kind == "convolution")
    plan = planning.uniform(source.weights, targets.get("onnx"), formats.get("int8_channel"), ["proj|w[123]|embed=keep"])
    assert formats.get(plan[convolution.name].format).levels is None and "no convolution" in plan[convolution.name].reason
    made = artifact.quantize(source, plan, tmp_path / "a", silent)
    file = export.export(made, tmp_path / "model.onnx")
    ours = runtimes.get("onnxruntime").open(file, 64).logits([0, 5, 100, 7, 900, 33, 12])
    with torch.inference_mode():
        theirs = made.module()(torch.tensor([[0, 5, 100, 7, 900, 33, 12]])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.std()))  # float32 in another order of sums


def test_gguf_says_that_it_cannot() -> None:
    weight = Weight("encoder.conv1", (32, 64), "convolution", "fp16")
    with pytest.raises(InputError, match="convolutions are not written"):
        planning.uniform([weight], targets.get("gguf"), formats.get("q8_0"))
