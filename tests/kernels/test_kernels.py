"""Every kernel of every format gives the reference's bits, and the reference gives ggml's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from packed_weights import IN_GGUF, JUDGED, bits, guarded, needs_ggml, over, random_bytes, random_weight

from fewbits import formats, kernels
from fewbits.benchmarks.peers import ggml
from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.formats import Format, Shape
from fewbits.kernels import Kernel, reference, triton

if TYPE_CHECKING:
    from fewbits.formats import Parts

ALL = [kernel for fmt in formats.all().values() for kernel in kernels.available(fmt)]
NATIVE = [kernel for kernel in ALL if kernel.backend != "reference"]


over_shapes = pytest.mark.parametrize("rows, blocks", [(1, 1), (3, 1), (1, 2), (5, 5)])


def shape_of(fmt: Format, rows: int, blocks: int) -> Shape:
    return rows, blocks * (fmt.block if fmt.block > 1 else 37)  # 37: a format without blocks must take any width


def same_parts(ours: Parts, theirs: Parts) -> bool:
    raw = [{name: part.contiguous().view(torch.uint8) for name, part in parts.items()} for parts in (ours, theirs)]
    dtypes = [{name: part.dtype for name, part in parts.items()} for parts in (ours, theirs)]
    return dtypes[0] == dtypes[1] and all(torch.equal(raw[0][name], raw[1][name]) for name in raw[0])


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    def clear() -> None:
        processor.native_missing.cache_clear()
        processor.table.cache_clear()
        processor.fastest_here.cache_clear()
        processor.native.cache_clear()

    clear()
    yield
    clear()


def test_the_native_module_is_built() -> None:
    assert processor.native_missing() is None
    assert {kernel.backend for fmt in formats.all().values() for kernel in kernels.available(fmt)} >= {"native-scalar", "reference"}


def test_native_arrays_are_named_in_the_order_of_the_format() -> None:
    assert processor.table()
    for (name, _), entry in processor.table().items():
        fmt = formats.get(name)
        assert entry.parts == list(fmt.parts((2, 256)))
        assert entry.grid == list(fmt.fit(torch.ones(2, 256), how="max"))


@over_shapes
@over(ALL)
def test_decode_equals_the_reference(kernel: Kernel, rows: int, blocks: int) -> None:
    fmt = formats.get(kernel.format)
    shape = shape_of(fmt, rows, blocks)
    parts = fmt.pack(*random_weight(fmt, shape))
    w = kernel.decode(parts, shape)
    assert w.shape == shape and w.dtype == torch.float32
    assert torch.equal(bits(w), bits(reference.decode(fmt, parts)))


@over([kernel for kernel in NATIVE if kernel.format in ("q4_k", "q8_0", "int4_channel", "fp8_e5m2_channel", "mxfp4")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_to_half_precision_rounds_the_reference_as_torch_does(kernel: Kernel, dtype: str) -> None:
    """Any bytes: overflow, subnormal halves, infinities and (fp8, mxfp4) NaN."""
    fmt, shape = formats.get(kernel.format), (17, 512)
    for seed in range(3):
        parts = random_bytes(fmt, shape, seed)
        ours, theirs = kernel.decode(parts, shape, dtype), reference.decode(fmt, parts).to(getattr(torch, dtype))
        number = ~theirs.isnan()
        assert torch.equal(ours.isnan(), ~number) and torch.equal(ours[number].view(torch.int16), theirs[number].view(torch.int16))


@over_shapes
@over(NATIVE)
def test_decode_equals_the_reference_on_any_bytes(kernel: Kernel, rows: int, blocks: int) -> None:
    fmt = formats.get(kernel.format)
    shape = shape_of(fmt, rows, blocks)
    for seed in range(5):
        parts = random_bytes(fmt, shape, seed)
        assert torch.equal(bits(kernel.decode(parts, shape)), bits(reference.decode(fmt, parts)))


@over_shapes
@over(ALL)
def test_pack_equals_the_reference_and_decode_undoes_it(kernel: Kernel, rows: int, blocks: int) -> None:
    fmt = formats.get(kernel.format)
    shape = shape_of(fmt, rows, blocks)
    codes, grid = random_weight(fmt, shape)
    parts = kernel.pack(codes, grid)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
        name: (getattr(torch, spec.dtype), spec.shape) for name, spec in fmt.parts(shape).items()
    }
    assert same_parts(parts, fmt.pack(codes, grid))
    assert torch.equal(bits(kernel.decode(parts, shape)), bits(fmt.decode(fmt.unpack(parts)[0], grid)))


@over(NATIVE)
def test_pack_undoes_unpack_on_any_bytes(kernel: Kernel) -> None:
    fmt = formats.get(kernel.format)
    parts = random_bytes(fmt, (3, 1024))
    assert same_parts(kernel.pack(*fmt.unpack(parts)), parts)


@over([kernel for kernel in NATIVE if kernel.format == "q8_0"])
def test_every_finite_float16_scale_is_read_exactly(kernel: Kernel) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    d = every[every.isfinite()].reshape(62, -1)
    assert d.numel() == 2 * 31 * 1024
    codes = torch.full((62, d.shape[1] * 32), 129, dtype=torch.uint8)  # level 1: the weight is the scale
    w = kernel.decode(kernel.pack(codes, {"d": d}), (62, codes.shape[1]))
    assert torch.equal(bits(w), bits(d.float().repeat_interleave(32, 1)))


@over([kernel for kernel in NATIVE if kernel.format == "int8_channel"])
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 33])
def test_a_row_need_not_fill_a_register(kernel: Kernel, cols: int) -> None:
    fmt, shape = formats.get(kernel.format), (3, cols)
    parts = random_bytes(fmt, shape)
    assert torch.equal(bits(kernel.decode(parts, shape)), bits(reference.decode(fmt, parts)))


@over(NATIVE)
def test_the_count_of_threads_changes_no_byte(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, shape = formats.get(kernel.format), (236, 2048)  # enough weights that all seven get a share
    expected = random_bytes(fmt, shape)
    codes, grid = fmt.unpack(expected)
    w = reference.decode(fmt, expected)
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(bits(kernel.decode(expected, shape)), bits(w))
        assert same_parts(kernel.pack(codes, grid), expected)


@needs_ggml
@over([kernel for kernel in ALL if kernel.format in JUDGED])
def test_decode_equals_ggml_on_any_bytes(kernel: Kernel) -> None:
    shape = (7, 1024)
    for seed in range(5):
        parts = random_bytes(formats.get(kernel.format), shape, seed)
        theirs = ggml.dequantize(JUDGED[kernel.format], parts["blocks"].numpy(), 7 * 1024)
        assert torch.equal(bits(kernel.decode(parts, shape).flatten()), bits(torch.from_numpy(theirs)))


@over([kernel for kernel in ALL if kernel.format in IN_GGUF])
def test_decode_equals_the_gguf_package(kernel: Kernel) -> None:
    shape = (7, 1024)
    parts = random_bytes(formats.get(kernel.format), shape)
    theirs = gguf.quants.dequantize(parts["blocks"].numpy(), gguf.GGMLQuantizationType[JUDGED[kernel.format].upper()])
    assert torch.equal(kernel.decode(parts, shape), torch.from_numpy(np.ascontiguousarray(theirs)).reshape(shape))


@needs_ggml
@over([kernel for kernel in ALL if kernel.format in ("q4_0", "q8_0", "q3_k", "q4_k")])
def test_a_weight_that_ggml_quantized_decodes_near_itself(kernel: Kernel) -> None:
    w = torch.randn(4, 512, generator=torch.Generator().manual_seed(2))
    stored = torch.from_numpy(ggml.quantize(JUDGED[kernel.format], w.numpy(), np.ones(512, np.float32)))
    error = kernel.decode({"blocks": stored}, (4, 512)) - w
    assert error.square().mean() < {"q3_k": 0.04, "q4_k": 0.01, "q4_0": 0.01, "q8_0": 1e-4}[kernel.format]  # of a variance of 1


@over(NATIVE)
def test_parts_of_the_wrong_size_are_refused(kernel: Kernel) -> None:
    fmt, shape = formats.get(kernel.format), (4, 512)
    parts = random_bytes(fmt, shape)
    codes, grid = fmt.unpack(parts)
    for name, part in parts.items():
        wide = torch.cat([part, part[:, :1]], 1)
        for wrong in (part[:, :-1], wide, part[:2], torch.cat([part, part[:1]])):
            if wrong.shape == part.shape:  # one row for all
                continue
            with pytest.raises(ValueError, match=name):
                kernel.decode({**parts, name: wrong}, shape)
            if kernel.multiplies:
                with pytest.raises(ValueError, match=name):
                    kernel.matmul(torch.ones(2, 512), {**parts, name: wrong}, shape)
    by_reference = fmt.tensor_wide or not kernel.entry_here().packs  # tensor_wide: what rows share
    for name, entry in () if by_reference else grid.items():
        for wrong in (entry[:, :-1], torch.cat([entry, entry[:, :1]], 1), entry[:2]):
            with pytest.raises(ValueError, match=name):
                kernel.pack(codes, {**grid, name: wrong})
    with pytest.raises(ValueError, match="needs"):
        kernel.decode(parts, (4, 768))


@over(NATIVE)
def test_the_native_module_itself_refuses_wrong_arrays(kernel: Kernel) -> None:
    fmt, isa = formats.get(kernel.format), kernel.backend.removeprefix("native-")
    stored = [part.view(torch.uint8).numpy() for part in random_bytes(fmt, (2, 256)).values()]
    native, out = processor.native(), np.zeros((2, 256), np.float32)
    with pytest.raises(ValueError, match="of these arrays"):
        native.decode(fmt.name, isa, [*stored, stored[0]], out, 1)
    with pytest.raises(ValueError, match="no nonsense kernel"):
        native.decode(fmt.name, "nonsense", stored, out, 1)
    with pytest.raises(TypeError):
        native.decode(fmt.name, isa, stored, out.astype(np.float64), 1)
    with pytest.raises(TypeError):  # it would be decoded into a copy, and the caller's memory stay as it was
        native.decode(fmt.name, isa, stored, np.zeros((2, 512), np.float32)[:, ::2], 1)
    with pytest.raises(TypeError):
        native.decode(fmt.name, isa, [part[:, ::-1] for part in stored], out, 1)
    if fmt.block > 1:
        with pytest.raises(ValueError, match="do not divide"):
            native.decode(fmt.name, isa, stored, np.zeros((2, fmt.block + 1), np.float32), 1)


def test_decode_writes_into_memory_that_is_there() -> None:
    fmt, shape = formats.get("q4_k"), (5, 512)
    parts = random_bytes(fmt, shape)
    for kernel in kernels.available(fmt):
        out = torch.zeros(shape)
        assert kernel.decode(parts, shape, out=out) is out and torch.equal(bits(out), bits(reference.decode(fmt, parts)))
    native = kernels.available(fmt)[0]
    for wrong in (torch.zeros(5, 511), torch.zeros(5, 512, dtype=torch.float64), torch.zeros(512, 5).T):
        with pytest.raises(ValueError, match="5 x 512"):
            native.decode(parts, shape, out=wrong)


def test_a_scale_for_the_whole_weight_serves_every_row() -> None:
    fmt, shape = formats.get("int8_channel"), (5, 64)
    parts = random_bytes(fmt, shape)
    parts["scales"] = parts["scales"][:1]
    for kernel in kernels.available(fmt):
        assert torch.equal(bits(kernel.decode(parts, shape)), bits(reference.decode(fmt, parts)))


@over(NATIVE)
def test_no_kernel_touches_a_byte_outside_its_arrays(kernel: Kernel) -> None:
    """Each array ends where a page without access begins, then begins where one ends: a byte too far is a crash."""
    fmt, shape = formats.get(kernel.format), (3, 256)
    parts = random_bytes(fmt, shape)
    expected = reference.decode(fmt, parts)
    for at_end in (True, False):
        stored = [guarded(part.view(torch.uint8).numpy(), at_end) for part in parts.values()]
        out = guarded(np.zeros(shape, np.float32), at_end)
        processor.native().decode(fmt.name, kernel.backend.removeprefix("native-"), stored, out, 1)
        assert torch.equal(bits(torch.from_numpy(out.copy())), bits(expected))


def test_bind_takes_the_fastest_and_the_variable_forces_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    for fmt in formats.all().values():
        assert kernels.bind(fmt, (2, 256)) == kernels.available(fmt)[0]
        assert kernels.available(fmt)[-1] == Kernel(fmt.name, "reference")
    q4_k = formats.get("q4_k")
    for kernel in kernels.available(q4_k):
        monkeypatch.setenv("FEWBITS_KERNEL", kernel.backend.removeprefix("native-"))
        assert kernels.bind(q4_k, (2, 256)) == kernel
        assert kernels.bind(formats.get("bf16"), (2, 256)).backend == "reference"


def test_forcing_an_unknown_kernel_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWBITS_KERNEL", "avx3")
    with pytest.raises(InputError, match="avx3") as error:
        kernels.bind(formats.get("q4_k"), (2, 256))
    assert "scalar" in error.value.hint


def test_forcing_a_kernel_that_cannot_run_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    old_processor = {key: entry._replace(runs_here=entry.isa == "scalar") for key, entry in processor.table().items()}
    monkeypatch.setattr(processor, "table", lambda: old_processor)
    fmt = formats.get("q4_k")
    assert [kernel.backend for kernel in kernels.available(fmt)] == ["native-scalar", "reference"]
    assert "processor" in (Kernel("q4_k", "native-avx2").runs_here() or "")
    with pytest.raises(InputError, match="avx2"):
        Kernel("q4_k", "native-avx2").decode(random_bytes(fmt, (2, 256)), (2, 256))
    monkeypatch.setenv("FEWBITS_KERNEL", "avx2")
    with pytest.raises(InputError, match="processor has no avx2"):
        kernels.bind(fmt, (2, 256))


def test_without_a_gpu_its_tensors_are_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/kernels/gpu tests what Triton computes; this is what happens without it."""
    monkeypatch.delenv("FEWBITS_KERNEL", raising=False)
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    monkeypatch.setattr(triton, "runs_here", lambda: "torch sees no GPU")
    q4_k, processors = formats.get("q4_k"), kernels.bind(formats.get("q4_k"), (2, 256)).backend
    assert kernels.bind(q4_k, (2, 256), "cuda:1") == Kernel("q4_k", "reference") == kernels.available(q4_k, "cuda")[0]
    assert [kernel.backend for kernel in kernels.every(q4_k, "cuda")] == ["triton", "reference"]
    assert Kernel("q4_k", "triton").runs_here() == "torch sees no GPU" and kernels.who(q4_k, (2, 256)) == processors
    assert "is a cast" in str(Kernel("bf16", "triton").runs_here())
    monkeypatch.setenv("FEWBITS_KERNEL", "triton")
    with pytest.raises(InputError, match="`triton`, but torch sees no GPU"):
        kernels.bind(q4_k, (2, 256))
    monkeypatch.setattr(triton, "runs_here", lambda: None)  # with one, the processor goes on with its own
    assert kernels.bind(q4_k, (2, 256)).backend == processors and kernels.bind(q4_k, (2, 256), "cuda").backend == "triton"
    assert kernels.who(q4_k, (2, 256)) == f"{processors}; GPU: triton"
    assert processor.fastest(("avx512", "avx2", "neon", "scalar")) is not None


@pytest.mark.usefixtures("fresh_caches")
def test_without_the_native_module_the_reference_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fewbits._native", None)  # makes its import fail
    assert "cannot be loaded" in (processor.native_missing() or "")
    for fmt in formats.all().values():
        assert kernels.available(fmt) == [Kernel(fmt.name, "reference")]
    monkeypatch.setenv("FEWBITS_KERNEL", "scalar")
    with pytest.raises(InputError, match="cannot be loaded"):
        kernels.bind(formats.get("q4_k"), (2, 256))


@pytest.mark.usefixtures("fresh_caches")
def test_a_native_module_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.native(), "ABI", 999)
    assert "999" in (processor.native_missing() or "")
    assert kernels.available(formats.get("q4_k")) == [Kernel("q4_k", "reference")]


def test_a_shape_that_does_not_fit_is_refused() -> None:
    fmt = formats.get("q4_k")
    assert "blocks of 256" in (Kernel("q4_k", "reference").supports((2, 100)) or "")
    with pytest.raises(InputError, match="blocks of 256"):
        kernels.bind(fmt, (2, 100))


def test_the_shorthands_bind_and_run() -> None:
    for fmt in formats.all().values():
        codes, grid = random_weight(fmt, (3, 512))
        parts = kernels.pack(fmt, codes, grid)
        assert same_parts(parts, fmt.pack(codes, grid))
        assert torch.equal(bits(kernels.decode(fmt, parts, (3, 512))), bits(reference.decode(fmt, parts)))


def test_importing_kernels_loads_no_torch() -> None:
    code = "import sys, fewbits.kernels as k, fewbits.formats as f; f.all(); k.available(f.get('q4_k')); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
