"""Who multiplies on which device, the weight that stays there, and torch's operators: in Triton's interpreter, which takes tensors of the
processor; and with tensors of CUDA that have a shape and no memory, as far as those go."""

from __future__ import annotations

import pytest
import torch
from gpu_weights import EPS, activations, bound, expected, packed
from torch._subclasses.fake_tensor import FakeTensorMode

from fewbits import formats, kernels
from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.kernels import Kernel, reference, torch_ops, w8a8
from fewbits.kernels import triton as gpu
from fewbits.kernels.resident import Resident, resident
from fewbits.kernels.triton import call, eight_bits, levels, repack

HALVES = (torch.float16, torch.bfloat16)


def on_the_interpreter(name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> tuple[Resident, dict[str, torch.Tensor]]:
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    fmt = formats.get(name)
    parts = packed(fmt, shape)
    return resident(fmt, parts, shape, "cpu", torch.float16), parts


def test_a_gpu_gets_triton_and_the_processor_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    monkeypatch.setattr(gpu, "runs_here", lambda: None)
    fmt = formats.get("q4_k")
    for device in ("cuda", "cuda:3", torch.device("cuda", 1)):
        assert kernels.bind(fmt, (8, 256), device) == Kernel("q4_k", "triton")
    # the interpreter is here, and is not taken unless it is asked for
    assert kernels.bind(fmt, (8, 256)).backend == kernels.bind(fmt, (8, 256), torch.device("cpu")).backend != "triton"
    assert kernels.bind(fmt, (8, 256), "mps").backend == "reference"
    assert kernels.bind(formats.get("bf16"), (8, 256), "cuda").backend == "reference"
    assert kernels.who(fmt, (8, 256)) == f"{processor.backend()}; GPU: triton"
    # scales that 32 bits do not count
    assert kernels.bind(fmt, (2**20, 2**16), "cuda").backend == "reference"
    assert "more scales" in str(Kernel("q4_k", "triton").supports((2**20, 2**16)))


def test_the_variable_forces_one_on_the_device_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "runs_here", lambda: None)
    fmt, own = formats.get("q4_k"), processor.backend()
    chosen = {}
    for wanted in ("triton", "reference", "scalar"):
        monkeypatch.setenv("FEWBITS_KERNEL", wanted)
        chosen[wanted] = tuple(kernels.bind(fmt, (8, 256), device).backend for device in ("cuda", "cpu"))
    assert chosen == {"triton": ("triton", "triton"), "reference": ("reference", "reference"), "scalar": ("triton", "native-scalar")}
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    assert kernels.bind(formats.get("bf16"), (8, 256), "cuda").backend == "reference"
    assert processor.backend() == own  # work that is no format's own has nothing to do with it
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    assert kernels.bind(fmt, (8, 256)).backend == own  # without the interpreter, the processor goes on as it did


def test_forcing_triton_without_a_gpu_is_an_error_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "runs_here", lambda: "torch sees no GPU")
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    with pytest.raises(InputError, match="FEWBITS_KERNEL is `triton`, but torch sees no GPU") as error:
        kernels.bind(formats.get("q4_k"), (8, 256), "cuda")
    assert "unset" in error.value.hint


def test_a_gpu_that_is_too_old_gets_torch_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(gpu, "_driver_is_here", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "_architecture", lambda: ("cuda", "sm_75"))
    assert kernels.bind(formats.get("q4_k"), (8, 256), "cuda").backend == "reference"
    assert "sm_75 is older than sm_80" in str(Kernel("q4_k", "triton").runs_here())
    monkeypatch.setattr(gpu, "_architecture", lambda: ("hip", "gfx942"))
    assert kernels.bind(formats.get("q4_k"), (8, 256), "cuda").backend == "triton"


@pytest.mark.parametrize("name", ["q4_k", "fp8_e5m2_channel", "int4_g32_asym"])
def test_a_forced_kernel_multiplies_and_decodes_stored_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, shape = formats.get(name), (11, 256)
    parts = packed(fmt, shape)
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    chosen = kernels.bind(fmt, shape)
    assert chosen.backend == "triton" and chosen.multiplies
    assert torch.equal(chosen.decode(parts, shape), reference.decode(fmt, parts))
    out = torch.empty(shape, dtype=torch.bfloat16)
    assert chosen.decode(parts, shape, "bfloat16", out) is out and torch.equal(out, reference.decode(fmt, parts).bfloat16())
    x, bias = activations(3, 256, torch.float16), torch.randn(11).half()
    wanted = expected(fmt, parts, x, bias, None)
    y = chosen.matmul(x, parts, shape, bias)
    assert ((y.double() - wanted).abs() <= bound(fmt, parts, x, wanted.abs(), weights_are_rounded=True)).all()
    assert all(
        torch.equal(again.view(torch.uint8), parts[part].view(torch.uint8)) for part, again in chosen.pack(*fmt.unpack(parts)).items()
    )


def test_a_resident_weight_multiplies_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three dimensions, memory in another order, no tokens, float32: which torch multiplies with the decoded weight."""
    weight, parts = on_the_interpreter("q4_k", (11, 256), monkeypatch)
    assert weight.reason is None and weight.nbytes == repack.of(weight.format).nbytes((11, 256))
    x, bias, residual = activations(6, 256, torch.float16), torch.randn(11).half(), torch.randn(6, 11).half()
    flat = weight.matmul(x, bias, residual)
    assert torch.equal(weight.matmul(x.reshape(2, 3, 256), bias, residual.reshape(2, 3, 11)), flat.reshape(2, 3, 11))
    assert torch.equal(weight.matmul(x.T.contiguous().T, bias, residual.T.contiguous().T), flat)
    assert weight.matmul(x[:0]).shape == (0, 11) and weight.matmul(x.reshape(2, 3, 256)[:, :0]).shape == (2, 0, 11)
    w = reference.decode(weight.format, parts)
    assert torch.equal(weight.matmul(x.float(), bias, residual), torch.nn.functional.linear(x.float(), w, bias.float()) + residual)
    moved = weight.with_arrays([array.clone() for array in weight.arrays])
    assert torch.equal(moved.matmul(x, bias, residual), flat)
    with pytest.raises(InputError, match=r"cast from torch.uint8 to torch.float16"):
        weight.with_arrays([array.half() for array in weight.arrays])


def test_rows_of_a_resident_weight_are_decoded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("q6_k", "int8_tensor_asym", "nvfp4_tensor"):
        weight, parts = on_the_interpreter(name, (40, 256), monkeypatch)
        w, ids = reference.decode(weight.format, parts), torch.tensor([[3, 39, 3], [0, 17, 38]])
        assert torch.equal(weight.rows(ids, torch.float32), w[ids]) and torch.equal(weight.rows(ids, torch.bfloat16), w[ids].bfloat16())
        assert weight.rows(ids[:, :0], torch.float16).shape == (2, 0, 256)
        assert torch.equal(weight.decode(torch.float32), w)


def test_where_triton_cannot_serve_the_weight_is_decoded_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", "reference")
    for name, reason in (("bf16", "is a cast"), ("q4_k", "FEWBITS_KERNEL forces reference")):
        fmt, shape = formats.get(name), (8, 256)
        parts = fmt.pack(torch.randn(shape), {}) if fmt.is_cast else packed(fmt, shape)
        weight = resident(fmt, parts, shape, "cpu", torch.bfloat16)
        assert reason in str(weight.reason)
        x, bias, residual = torch.randn(3, 256).bfloat16(), torch.randn(8).bfloat16(), torch.randn(3, 8).bfloat16()
        w = reference.decode(fmt, parts).bfloat16()
        assert torch.equal(weight.matmul(x, bias, residual), torch.nn.functional.linear(x, w, bias) + residual)
        ids = torch.tensor([7, 0, 7])
        assert torch.equal(weight.rows(ids, torch.float32), w[ids].float()) and torch.equal(weight.decode(torch.bfloat16), w)


def test_levels_that_the_kernels_do_not_know_are_refused() -> None:
    """Sixteen uneven levels, halves, integers too far from zero: each would be decoded to something else."""
    from dataclasses import replace

    q4_0 = formats.get("q4_0")
    assert q4_0.levels and levels.unsupported(q4_0) is None
    for unknown in (
        tuple(level**3 for level in q4_0.levels),
        tuple(level + 0.5 for level in q4_0.levels),
        tuple(level + 1e6 for level in q4_0.levels),
    ):
        assert "levels" in str(gpu.supports(replace(q4_0, levels=unknown), (8, 64)))
    assert "every 48 columns" in str(gpu.supports(replace(formats.get("int4_g32"), group=48), (8, 96)))
    odd = type("Odd", (type(q4_0),), {"unpack": lambda _, parts: (parts["blocks"], {"d": parts["blocks"], "own": parts["blocks"]})})
    fields = {name: getattr(q4_0, name) for name in q4_0.__dataclass_fields__}
    assert "no family" in str(gpu.supports(odd(**fields), (8, 64)))


# fp8 is not among them: the checks themselves multiply the arguments, which torch cannot do in float8
@pytest.mark.parametrize("name", ["q4_k", "int4_g32_asym"])
def test_the_planar_operators_pass_torchs_own_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = on_the_interpreter(name, (5, 256), monkeypatch)
    x, bias, residual = torch.randn(2, 1, 256).half(), torch.randn(5).half(), torch.randn(2, 1, 5).half()
    torch.library.opcheck(torch_ops.planar_matmul, (x, list(weight.arrays), name, 5, bias, residual))
    torch.library.opcheck(torch_ops.planar_decode, (list(weight.arrays), name, 5, 256, torch.float16))


def test_a_compiled_layer_has_no_graph_break_and_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = on_the_interpreter("q4_k", (5, 256), monkeypatch)

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (
            torch.nn.functional.silu(weight.matmul(x * 2)).sum()
            + weight.rows(ids, torch.float16).sum()
            + weight.decode(torch.float16).sum()
        )

    x, ids = torch.randn(2, 256).half(), torch.tensor([4, 0])
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, ids), layer(x, ids))


OPERATORS = ("matmul", "decode", "w8a8", "w8a8_linear", "planar_matmul", "planar_decode")


def test_every_operator_has_a_kernel_for_gpus() -> None:
    for name in OPERATORS:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fewbits::{name}", key)


def test_operators_know_their_results_on_a_gpu() -> None:
    """Shapes, types and devices, which is what a compiler asks for; with tensors of CUDA that have no memory."""
    with FakeTensorMode():
        x, x8 = torch.empty(2, 3, 256, device="cuda", dtype=torch.float16), torch.empty(4, 256, device="cuda", dtype=torch.int8)
        planes, entries = torch.empty(11, 128, device="cuda", dtype=torch.uint8), torch.empty(2, 11, device="cuda", dtype=torch.float16)
        per_token, per_row = torch.empty(4, device="cuda"), torch.empty(4, 1, device="cuda")
        found = [
            (torch_ops.planar_matmul(x, [planes, entries], "int4_g128", 11), (2, 3, 11), torch.float16),
            (torch_ops.planar_decode([planes, entries], "int4_g128", 11, 256, torch.bfloat16), (11, 256), torch.bfloat16),
            (torch_ops.matmul(x, [planes, entries.T], "int4_g128", 11), (2, 3, 11), torch.float16),
            (torch_ops.decode([planes, entries.T], "int4_g128", 11, 256), (11, 256), torch.float32),
            (torch_ops.w8a8(x8, per_token, x8, per_row), (4, 4), torch.float32),
            (torch_ops.w8a8_linear(torch.empty(3, 256, device="cuda"), x8, per_row), (3, 4), torch.float32),
        ]
        for made, shape, dtype in found:
            assert made.device.type == "cuda" and tuple(made.shape) == shape and made.dtype == dtype


def test_int8_with_float_activations_is_what_the_processor_gives() -> None:
    """What the operator does on a GPU, on tensors of the processor; rows too long for a program too."""
    for cols in (96, eight_bits.MOST_OF_A_ROW + 32):
        x, w = torch.randn(2, cols), torch.randint(-127, 128, (3, cols), dtype=torch.int8)
        x[1, 5] = 40.0
        w_scale, bias = torch.rand(3).half(), torch.randn(3)
        y = eight_bits.linear(x.T.contiguous().T, w, w_scale, bias)
        wanted = w8a8.linear(x, w, w_scale, bias)
        assert y.dtype == torch.float32 and ((y - wanted).abs() <= 2 * EPS * (wanted.abs() + bias.abs())).all()
        assert eight_bits.linear(x[:0], w, w_scale).shape == (0, 3)


def test_a_launch_is_on_the_gpu_where_its_arrays_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on torch's current GPU: the one of the arrays is made that for the launch, and no longer."""
    seen: list[object] = []

    class Current:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __enter__(self) -> None:
            seen.append(self.tensor)

        def __exit__(self, *_: object) -> None:
            seen.append("left")

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda **_: seen.append(grid)

    monkeypatch.setattr(torch.cuda, "device_of", Current)
    x = torch.zeros(3)
    call.Call(Launched(), (7,), {"n": 3, "x": x}, {}).run()
    assert seen[0] is x and seen[1:] == [(7,), "left"]
