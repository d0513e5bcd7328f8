from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fewbits import embedded, formats, model, planning, targets
from fewbits.calibration.text import windows
from fewbits.errors import InputError
from fewbits.formats.runtime import activations
from fewbits.formats.runtime.activations import Activation, parse, quantized
from fewbits.verification.runtimes import torch as torch_runtime

DYNAMIC = [Activation("int8"), Activation("fp8_e4m3"), Activation("fp8_e5m2")]
LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def codes_of(name: str) -> list[float]:
    """The values of every code, by another way than the package's: torch's own reading of the bytes."""
    if name == "int8":
        return [float(code) for code in range(-127, 128)]
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    return sorted({value for value in values if math.isfinite(value)})


def slow(x: Tensor, activation: Activation) -> Tensor:
    """One value at a time: the nearest of all codes; where two are equally near, both are given to the caller as the interval's ends."""
    codes, out = codes_of(activation.format), torch.empty(2, *x.shape)
    for r, row in enumerate(x):
        scale = activation.scale or float(row.abs().max() / torch.tensor(LARGEST[activation.format]))
        for c, value in enumerate(row.tolist()):
            scaled = float(torch.tensor(value) / torch.tensor(scale)) if scale else 0.0
            best = min(abs(code - scaled) for code in codes)
            near = [code * scale for code in codes if abs(code - scaled) == best]
            out[0, r, c], out[1, r, c] = min(near), max(near)
    return out


def sample(rows: int = 7, cols: int = 33) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, cols, generator=generator) ** 3
    x[2] = 0
    x[3] *= 1e-4
    x[4, 0] = 300.0
    return x


@pytest.mark.parametrize("activation", DYNAMIC, ids=lambda a: a.format)
def test_a_dynamic_activation_equals_the_slow_twin(activation: Activation) -> None:
    x = sample()
    low, high = slow(x, activation)
    y = quantized(x, activation)
    one_ulp = 2**-23 * y.abs()  # code * scale is rounded once, in float64 there and in float32 here
    assert ((y >= low - one_ulp) & (y <= high + one_ulp)).all()
    assert (y != x).any()


@pytest.mark.parametrize("format", LARGEST)
def test_a_static_scale_equals_the_slow_twin_and_saturates(format: str) -> None:
    activation = Activation(format, static=True, range="mse").calibrated(-1.5, 2.0)
    assert activation.scale == float(torch.tensor(2.0 / LARGEST[format]))  # a float32, as it is stored
    x = sample()
    low, high = slow(x, activation)
    y = quantized(x, activation)
    one_ulp = 2**-23 * y.abs()
    assert ((y >= low - one_ulp) & (y <= high + one_ulp)).all()
    beyond = quantized(torch.tensor([[1e30, -1e30, 2.5, -math.inf]]), activation)
    torch.testing.assert_close(beyond, torch.tensor([[2.0, -2.0, 2.0, -2.0]]), rtol=2**-22, atol=0)


def test_halves_go_to_the_even_code() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]])
    assert quantized(x, Activation("int8")).tolist() == [[0, 2, 2, 0, -2, 127]]


def test_a_zero_point_equals_the_textbook_formula() -> None:
    activation = Activation("int8", static=True, range="minmax", symmetric=False).calibrated(-0.3, 4.8)
    assert activation.scale == pytest.approx(0.02) and activation.zero == -113
    x = sample()
    scale = torch.tensor(activation.scale)
    expected = torch.tensor(
        [[(min(127, max(-128, round(float(v / scale)) - 113)) + 113) * activation.scale for v in row] for row in x], dtype=torch.float32
    )
    torch.testing.assert_close(quantized(x, activation), expected, rtol=2**-22, atol=0)
    assert quantized(torch.zeros(1, 4), activation).abs().max() == 0  # zero is exact, whatever the range


@pytest.mark.parametrize("low", [0.5, -4.0])
def test_a_range_on_one_side_of_zero_still_holds_zero(low: float) -> None:
    activation = Activation("int8", static=True, range="minmax", symmetric=False).calibrated(low, low + 3)
    assert activation.scale and -128 <= activation.zero <= 127
    edge = max(low + 3, -low) if low > 0 else low
    assert float(quantized(torch.tensor([[edge]]), activation)) == pytest.approx(edge, abs=activation.scale)


@pytest.mark.parametrize("activation", DYNAMIC, ids=lambda a: a.format)
def test_a_token_never_depends_on_the_others(activation: Activation) -> None:
    x = sample()
    together = quantized(x[None], activation)[0]
    apart = torch.cat([quantized(row[None], activation) for row in x])
    assert torch.equal(together, apart)
    changed = x.clone()
    changed[-1] = 1e6
    assert torch.equal(quantized(changed, activation)[:-1], together[:-1])


@pytest.mark.parametrize("activation", DYNAMIC, ids=lambda a: a.format)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-30, 3.4e38])
def test_finite_inputs_of_any_size_stay_finite(activation: Activation, value: float) -> None:
    x = torch.tensor([[value, -value, value / 3, 0.0]])
    y = quantized(x, activation)
    assert y.isfinite().all()
    # among the smallest floats the scale itself is rounded by up to half of their step
    assert (y.abs() <= x.abs().max() * (1 + 2**-22) + activation.largest * 2**-150).all()


def test_names_are_parsed_and_others_refused() -> None:
    assert parse("none") is None
    assert parse("INT8") == Activation("int8")
    assert parse("fp8") == Activation("fp8_e4m3")
    assert parse("fp8:static") == Activation("fp8_e4m3", static=True, range="mse")
    for known in activations.KNOWN[1:]:
        parsed = parse(known)
        assert parsed and parsed.name == known
    for wrong in ("int4", "int8:", "int8:dynamic", "none:static", ""):
        with pytest.raises(InputError, match="no activations are named") as refused:
            parse(wrong)
        assert "int8:static" in refused.value.hint


@pytest.mark.parametrize(
    "activation",
    [
        *DYNAMIC,
        Activation("int8", static=True, range="entropy"),
        Activation("fp8_e4m3", static=True, range="mse", scale=0.1234567),
        Activation("int8", static=True, range="minmax", symmetric=False).calibrated(-1, 2),
    ],
)
def test_an_activation_survives_json(activation: Activation) -> None:
    assert activations.from_dict(activation.to_dict()) == activation


@pytest.mark.parametrize(
    "row",
    [
        {}, [], "int8", {"format": "int3"}, {"format": "int8", "scale": 1.0}, {"format": "int8", "static": True, "scale": -1.0},
        {"format": "int8", "static": True, "scale": math.nan}, {"format": "int8", "bits": 8}, {"format": "int8", "static": "yes"},
        {"format": "fp8_e4m3", "static": True, "symmetric": False}, {"format": "int8", "static": True, "symmetric": False, "zero": 300},
        {"format": "int8", "static": True, "zero": 3},
    ],
)  # fmt: skip
def test_a_wrong_activation_is_refused(row: object) -> None:
    with pytest.raises(InputError):
        activations.from_dict(row)


def test_a_static_activation_needs_a_scale_before_it_runs(embedded_model: model.Model) -> None:
    static = Activation("int8", static=True, range="mse")
    with pytest.raises(InputError, match="no scale yet"):
        quantized(torch.ones(1, 2), static)
    with pytest.raises(InputError, match="no scale yet"):
        torch_runtime.of_module(embedded_model.module(), {"lm_head": static})
    with pytest.raises(InputError, match="takes no range"):
        Activation("int8").calibrated(-1, 1)


def test_a_session_rounds_the_named_inputs_and_only_while_it_runs(embedded_model: model.Model) -> None:
    module = embedded_model.module()
    tokens = windows.windows(embedded.verification_text(), embedded_model.tokenizer, 64)[0]
    plain = torch_runtime.of_module(module)
    name = "model.layers.1.mlp.down_proj"
    before = plain.logits(tokens)
    rounded = torch_runtime.of_module(module, {name: Activation("int8")}).logits(tokens)
    assert torch.equal(plain.logits(tokens), before)

    layer = module.get_submodule(name)  # the same by hand: the layer itself exchanged for one that rounds
    original = layer.forward
    layer.forward = lambda x: original((x / (x.abs().amax(-1, keepdim=True) / 127)).round() * (x.abs().amax(-1, keepdim=True) / 127))
    by_hand = plain.logits(tokens)
    del layer.forward
    assert not torch.equal(rounded, before)
    assert torch.equal(rounded, by_hand)
    with pytest.raises(InputError, match="no module `nowhere`"):
        torch_runtime.of_module(module, {"nowhere": Activation("int8")})


def test_an_artifact_runs_with_its_plans_activations_and_cache(embedded_model: model.Model, tmp_path) -> None:
    from fewbits import artifact as artifacts
    from fewbits.progress import silent

    target = targets.get("fewbits")
    plan = planning.uniform(embedded_model.weights, target, formats.get("int8_channel"), activation=Activation("int8"), kv="int8")
    made = artifacts.quantize(embedded_model, plan, tmp_path / "artifact", silent)
    assert made.plan == plan
    target.write(made, tmp_path / "copy.fewbits", silent)
    tokens = windows.windows(embedded.verification_text(), embedded_model.tokenizer, 64)[0]
    opened = torch_runtime.RUNTIME.open(tmp_path / "copy.fewbits", 64).logits(tokens)
    names = [w.name for w in embedded_model.weights if w.kind in ("attention", "mlp")]
    by_hand = torch_runtime.of_module(made.module(), dict.fromkeys(names, Activation("int8")), "int8").logits(tokens)
    assert torch.equal(opened, by_hand)
    assert not torch.equal(opened, torch_runtime.of_module(made.module()).logits(tokens))


def test_the_activation_of_a_tied_embedding_is_its_outputs(embedded_model: model.Model) -> None:
    embedding = next(w for w in embedded_model.weights if w.kind == "embedding")
    plan = planning.uniform(embedded_model.weights, targets.get("fewbits"), formats.get("int8_channel"))
    plan = planning.with_activations(plan, {embedding.name: Activation("int8")})
    assert torch_runtime.readers(plan, embedded_model.weights) == {"lm_head": Activation("int8")}


def test_an_artifact_for_another_target_is_priced_anew_when_written(embedded_model: model.Model, tmp_path) -> None:
    from fewbits import artifact as artifacts
    from fewbits.progress import silent

    plan = planning.uniform(embedded_model.weights, targets.get("gguf"), formats.get("int8_channel"))
    made = artifacts.quantize(embedded_model, plan, tmp_path / "artifact", silent)
    targets.get("fewbits").write(made, tmp_path / "copy.fewbits", silent)
    copy = artifacts.Artifact(tmp_path / "copy.fewbits")
    assert copy.plan.target == "fewbits"
    for weight in copy.weights:
        stored = sum(part.nbytes for part in copy.parts(weight).values())
        assert copy.plan[weight.name].nbytes == stored
        assert torch.equal(copy.decoded(weight), made.decoded(weight))
