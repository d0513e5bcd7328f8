"""int8 products are exact whatever the inputs; the operators are sound for torch.compile."""

from __future__ import annotations

import pytest
import torch
from packed_weights import bits, random_weight

from fewbits import formats, kernels
from fewbits.kernels import torch_ops, w8a8

ISAS = ["reference", *(kernel.backend.removeprefix("native-") for kernel in kernels.available(formats.get("int8_channel"))[:-1])]
every_isa = pytest.mark.parametrize("isa", ISAS)


@every_isa
@pytest.mark.parametrize("tokens, cols, rows", [(1, 1, 1), (1, 33, 5), (7, 512, 64), (13, 1030, 37), (30, 515, 70), (5, 65536, 3)])
@pytest.mark.parametrize("fill", ["any", "worst", "least"])
def test_int8_products_are_exact(isa: str, tokens: int, cols: int, rows: int, fill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worst: 127 times -128 everywhere, where two products of AVX2's maddubs come nearest to 16 bits. Least: -128 times -128."""
    monkeypatch.setenv("FEWBITS_KERNEL", isa)
    source = torch.Generator().manual_seed(tokens)
    x = torch.randint(-127, 128, (tokens, cols), generator=source, dtype=torch.int8)
    w = torch.randint(-128, 128, (rows, cols), generator=source, dtype=torch.int8)
    if fill != "any":
        x[:] = 127 if fill == "worst" else -128
        w[:] = -128
        if fill == "worst":
            x[0, ::2] = -127
    x_scale, w_scale, bias = torch.rand(tokens, generator=source), torch.rand(rows, generator=source), torch.randn(rows, generator=source)
    sums = (x.long() @ w.long().T).float()
    expected = sums * (x_scale[:, None] * w_scale) + bias
    assert torch.equal(bits(w8a8.matmul(x, x_scale, w, w_scale, bias)), bits(expected))


def test_threads_change_no_bit_of_an_int8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (torch.randint(-127, 128, (n, 700), dtype=torch.int8) for n in (50, 300))
    x_scale, w_scale, seen = torch.rand(50), torch.rand(300), []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        seen.append(bits(w8a8.matmul(x, x_scale, w, w_scale)))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_sums_that_could_pass_32_bits_are_refused() -> None:
    x = torch.ones(1, 65537, dtype=torch.int8)
    with pytest.raises(ValueError, match="65536"):
        w8a8.matmul(x, torch.ones(1), x, torch.ones(1))


@every_isa
def test_per_token_scales(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", isa)
    x = torch.randn(6, 67, generator=torch.Generator().manual_seed(9)) * torch.tensor([[1.0], [1], [1], [1], [1e30], [1e-30]])
    x[1], x[2, 3], x[3, 5] = 0, torch.nan, torch.inf
    codes, scale = w8a8.per_token(x)
    for row in (0, 4, 5):
        assert codes[row].abs().max() == 127 and ((codes[row] * scale[row] - x[row]).abs() <= scale[row] / 2 * 1.0001).all()
    assert scale[1] == 0 and scale[2:4].isnan().all() and not codes[1:4].any()
    with monkeypatch.context() as other:
        other.setenv("FEWBITS_KERNEL", "reference")
        theirs = w8a8.per_token(x)
    kept = torch.tensor([0, 1, 4, 5])
    assert torch.equal(codes[kept], theirs[0][kept]) and torch.equal(scale[kept], theirs[1][kept])


def test_linear_is_both_together() -> None:
    x, w, w_scale = torch.randn(4, 64), torch.randint(-127, 128, (5, 64), dtype=torch.int8), torch.rand(5)
    assert torch.equal(w8a8.linear(x, w, w_scale), w8a8.matmul(*w8a8.per_token(x), w, w_scale))


# fp8 is not among them: the checks themselves multiply the arguments, which torch cannot do in float8
@pytest.mark.parametrize("name", ["q4_k", "int8_channel", "int4_g32_asym", "nvfp4_tensor", "fp32"])
def test_operators_pass_torchs_own_checks(name: str) -> None:
    fmt, shape = formats.get(name), (12, 256)
    parts = torch_ops.arrays(fmt.pack(*random_weight(fmt, shape)), name)
    x, bias = torch.randn(2, 3, 256), torch.randn(12)
    for exact in (False, True):
        torch.library.opcheck(torch_ops.matmul, (x, parts, name, 12, bias, exact))
    torch.library.opcheck(torch_ops.decode, (parts, name, *shape))


def test_the_int8_operator_passes_torchs_own_checks() -> None:
    x, w = torch.randint(-127, 128, (3, 40), dtype=torch.int8), torch.randint(-127, 128, (5, 40), dtype=torch.int8)
    torch.library.opcheck(torch_ops.w8a8, (x, torch.rand(3), w, torch.rand(5), torch.rand(5)))
    torch.library.opcheck(torch_ops.w8a8, (x, torch.rand(3), w, torch.rand(5), None))
    torch.library.opcheck(torch_ops.w8a8_linear, (torch.randn(3, 40), w, torch.rand(5), torch.rand(5)))


def test_a_compiled_layer_has_no_graph_break() -> None:
    fmt, shape = formats.get("q4_k"), (12, 256)
    parts = torch_ops.arrays(fmt.pack(*random_weight(fmt, shape)), "q4_k")

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch.ops.fewbits.matmul(x * 2, parts, "q4_k", 12, None, False))

    x = torch.randn(5, 256)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_a_compiled_integer_layer_has_no_graph_break() -> None:
    w, w_scale, bias = torch.randint(-127, 128, (5, 40), dtype=torch.int8), torch.rand(5, 1), torch.randn(5)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch_ops.w8a8_linear(x * 2, w, w_scale, bias))

    x = torch.randn(3, 40)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
