"""A KV cache that stays packed on a GPU: launches kernels/attention.py. It decodes to the same bits that `EmulatedKVCache` (inference)
gives to attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fewbits.errors import InputError
from fewbits.formats.runtime.kv import KVFormat
from fewbits.kernels.attention import Cache
from fewbits.kernels.triton import tile_shapes
from fewbits.kernels.triton.call import Call
from fewbits.kernels.triton.device import Device, device_of
from fewbits.kernels.triton.kernels import attention

GROUP = 32  # tokens, as in kernels/attention.py
_MOST_SPLITS = 32


def unsupported(fmt: KVFormat, width: int) -> str | None:
    """Why a cache of this format cannot be kept packed on a GPU; None if it can."""
    if fmt.levels is None:
        return "its values are not rounded"
    if fmt.channels is not None:
        return f"a token's channels are rounded in groups of {fmt.channels}"
    by_token = fmt.keys == "token" and fmt.group == 1 and not fmt.minimum and len(fmt.levels) == 256
    by_channel = fmt.keys == "channel" and fmt.group == GROUP and fmt.minimum and fmt.bits in (4, 8)
    if not by_token and not by_channel:
        return "kernels know float8 per token, and integers of 4 or 8 bits whose keys are rounded per channel over 32 tokens"
    if width > 256 or width * fmt.bits % 16:
        return f"a head of {width} channels is not an even number of bytes up to 256 channels"
    return None


class PackedCache(Cache):
    def __init__(
        self, fmt: KVFormat, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if reason := unsupported(fmt, width):
            raise InputError(f"a {fmt.name} cache cannot be kept packed: {reason}", "int8, int4 and fp8 can")
        super().__init__(fmt, sequences, heads, width)
        self._kind = "integers" if fmt.minimum else "e4m3"
        self._room = max(GROUP, fmt.sink + fmt.group)
        both = sequences * heads
        self._rest = tuple(torch.zeros(both, self._room, width, dtype=dtype, device=device) for _ in range(2))
        self._arrays: dict[str, Tensor | None] = {}
        self._capacity = 0
        self._grow(4 * GROUP)

    def append(self, keys: Tensor, values: Tensor) -> None:  # (sequences, heads, tokens, width)
        """One token: a group that it completes stays in float until the next token arrives, because attention reads the newest group
        unrounded. Several tokens: complete groups are rounded at once."""
        self._check_tokens(keys, values)
        new = [x.detach().flatten(0, 1).to(self._rest[0].dtype) for x in (keys, values)]
        if new[0].shape[1] == 1 and self.format.group > 1 and self.rest < self._room:
            for rest, x in zip(self._rest, new, strict=True):
                rest[:, self.rest] = x[:, 0]
            self.rest += 1
            return
        one = new[0].shape[1] == 1 and self.format.group > 1
        whole = [rest[:, : self.rest] if one else torch.cat([rest[:, : self.rest], x], 1) for rest, x in zip(self._rest, new, strict=True)]
        sink, group = self.format.sink, self.format.group
        end = sink + max(0, whole[0].shape[1] - sink) // group * group
        if end > sink:
            self._settle(whole[0].contiguous(), whole[1].contiguous(), sink, end - sink)
        left = [torch.cat([x[:, :sink], x[:, max(end, sink) :], *([n] if one else [])], 1) for x, n in zip(whole, new, strict=True)]
        self.rest = left[0].shape[1]
        for rest, x in zip(self._rest, left, strict=True):
            rest[:, : self.rest] = x

    def attend(self, q: Tensor, factor: float | None = None) -> Tensor:  # (sequences, query heads, 1, width) -> the same shape
        self._check_queries(q)
        queries = q.shape[1] // self.heads
        flat = q.detach().reshape(self.sequences * self.heads, queries, self.width).to(self._rest[0].dtype).contiguous()
        splits = self._splits(flat)
        out = torch.empty_like(flat)
        for call in self.calls(flat, out, splits, self.width**-0.5 if factor is None else factor, device_of(flat)):
            call.run()
        return out.view(q.shape).to(q.dtype)

    def calls(self, q: Tensor, out: Tensor, splits: int, factor: float, device: Device) -> list[Call]:
        tile = tile_shapes.choose("attend", device.architecture, self.format.bits)
        heads, queries, width = q.shape
        partial = q.new_empty((heads, splits, queries, width), dtype=torch.float32)
        peaks, sums = (q.new_empty((heads, splits, queries), dtype=torch.float32) for _ in range(2))
        share = -(-max(self.packed, 1) // (splits * GROUP)) * GROUP
        channels = _channels(width)
        sizes = {
            "packed": self.packed, "rest": self.rest, "capacity": self._capacity, "room": self._room, "queries": queries, "width": width,
            "share": share, "factor": factor * math.log2(math.e),
        }  # fmt: skip
        arrays = {
            "q": q, **self._arrays, "rest_keys": self._rest[0], "rest_values": self._rest[1], "out": partial, "peaks": peaks, "sums": sums,
        }  # fmt: skip
        rows = max(tile.rows, 1 << (queries - 1).bit_length())  # a tensor core's tile has 16 rows
        constants: dict[str, Any] = {"BITS": self.format.bits, "KIND": self._kind, "QUERIES": rows, "CHANNELS": channels, "SPLIT": splits}
        joined = {"partial": partial, "peaks": peaks, "sums": sums, "out": out, "queries": queries, "width": width}
        return [
            Call(attention.attend, (heads, splits), arrays | sizes, constants, tile.warps, tile.stages),
            Call(attention.combine, (heads, queries), joined, {"SPLIT": splits, "CHANNELS": channels}, warps=4),
        ]

    def settle_call(self, keys: Tensor, values: Tensor, first: int, tokens: int) -> Call:
        sizes = {
            "first": first, "tokens": tokens, "room": keys.shape[1], "packed": self.packed, "capacity": self._capacity, "width": self.width,
        }  # fmt: skip
        constants = {"BITS": self.format.bits, "KIND": self._kind, "CHANNELS": _channels(self.width)}
        grid = (self.sequences * self.heads, -(-tokens // GROUP))
        return Call(attention.settle, grid, {"keys": keys, "values": values, **self._arrays, **sizes}, constants, warps=4)

    def unpacked(self) -> tuple[Tensor, Tensor]:  # keys, values: (sequences, heads, tokens, width) float32
        """The decoded keys and values, computed by torch."""
        levels = torch.tensor(self.format.levels, device=self._rest[0].device)
        both = []
        for part, rest in zip(("key", "value"), self._rest, strict=True):
            stored, scale, minimum = (self._arrays[f"{part}_{name}"] for name in ("codes", "scales", "minima"))
            assert stored is not None and scale is not None
            codes = stored[:, : self.packed]
            if self.format.bits == 4:
                codes = torch.cat([codes & 15, codes >> 4], 2)
            x = levels[codes.int()] * self._spread(scale.float(), part)
            x = x + self._spread(minimum.float(), part) if minimum is not None else x
            sink = self.format.sink
            x = torch.cat([rest[:, : min(sink, self.rest)].float(), x, rest[:, sink : max(sink, self.rest)].float()], 1)
            both.append(x.unflatten(0, (self.sequences, self.heads)))
        return both[0], both[1]

    def _spread(self, entries: Tensor, part: str) -> Tensor:
        if part == "key" and self.format.keys == "channel":
            return entries.repeat_interleave(GROUP, 1)[:, : self.packed]
        return entries[:, : self.packed].unsqueeze(2)

    def _splits(self, q: Tensor) -> int:
        """Enough for two programs per processor, each with at least one group of tokens."""
        wanted = min(2 * device_of(q).processors // len(q), -(-max(self.packed, 1) // GROUP), _MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)

    def reserve(self, tokens: int) -> None:
        """Makes room for so many rounded tokens."""
        while tokens > self._capacity:
            self._grow(2 * self._capacity)

    def _settle(self, keys: Tensor, values: Tensor, first: int, tokens: int) -> None:
        self.reserve(self.packed + tokens)
        self.settle_call(keys, values, first, tokens).run()
        self.packed += tokens

    def _grow(self, capacity: int) -> None:
        both, device, fmt = self.sequences * self.heads, self._rest[0].device, self.format

        def new(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((both, *shape), dtype=dtype, device=device)

        row = self.width * fmt.bits // 8
        by_channel = (capacity // GROUP, self.width) if fmt.keys == "channel" else (capacity,)
        arrays: dict[str, Tensor | None] = {
            "key_codes": new(torch.uint8, capacity, row), "key_scales": new(torch.float16, *by_channel), "key_minima": None,
            "value_codes": new(torch.uint8, capacity, row), "value_scales": new(torch.float16, capacity), "value_minima": None,
        }  # fmt: skip
        if fmt.minimum:
            arrays |= {"key_minima": new(torch.float16, *by_channel), "value_minima": new(torch.float16, capacity)}
        for name, old in self._arrays.items():
            into = arrays[name]
            if old is not None and into is not None:
                into[:, : old.shape[1]] = old
        self._arrays, self._capacity = arrays, capacity


def _channels(width: int) -> int:
    """Channels of a tile: a power of two, at least 32, so that 4-bit codes have two halves of 16."""
    return max(32, 1 << (width - 1).bit_length())
