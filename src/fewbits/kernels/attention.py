"""A KV cache that stays packed: tokens are rounded as they arrive, and attention reads the codes themselves.

It holds the values that `EmulatedKVCache` (inference) emulates, in the layout of native/attention/attention.cc: a group of keys channel by
channel, values token by token, and tokens that are not rounded (the sink and the newest group) in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fewbits.devices import processor
from fewbits.errors import InputError
from fewbits.formats.runtime.kv import KVFormat
from fewbits.formats.storage.codes import as_float16, decode, encode

_GROUP = 32  # tokens whose keys are stored together, as in native/attention/attention.cc
_FOUR = 4  # channels of keys, or tokens of values, whose codes are stored side by side, as there


def unsupported(fmt: KVFormat) -> str | None:
    """Why a cache of this format cannot be kept packed; None if it can."""
    if fmt.bits not in (4, 8) or fmt.levels is None or list(fmt.levels) != [fmt.levels[0] + code for code in range(len(fmt.levels))]:
        return "its codes are not integers of 4 or 8 bits"
    if fmt.keys == "channel" and fmt.group != _GROUP:
        return f"its keys are rounded in groups of {fmt.group} tokens, not of {_GROUP}"
    if fmt.channels and fmt.channels % _FOUR:
        return f"its groups of {fmt.channels} channels are no multiple of {_FOUR}"
    return None


class Cache:
    """Keys and values of one layer, for sequences of the same length: what packed caches on the processor and on a GPU share."""

    def __init__(self, fmt: KVFormat, sequences: int, heads: int, width: int) -> None:
        self.format, self.sequences, self.heads, self.width = fmt, sequences, heads, width
        self.packed = self.rest = 0  # tokens that are rounded, and tokens that are not

    @property
    def tokens(self) -> int:
        return self.packed + self.rest

    def _check_tokens(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape != values.shape or keys.shape[:2] != (self.sequences, self.heads) or keys.shape[3] != self.width:
            raise InputError(
                f"keys and values of shape {tuple(keys.shape)} and {tuple(values.shape)} do not belong into this cache",
                f"it takes ({self.sequences}, {self.heads}, tokens, {self.width})",
            )

    def _check_queries(self, q: Tensor) -> None:
        if self.tokens == 0:
            raise InputError("attention has nothing to read", "append keys and values first")
        if q.shape[0] != self.sequences or q.shape[1] % self.heads or q.shape[2:] != (1, self.width):
            raise InputError(
                f"queries of shape {tuple(q.shape)} do not belong to this cache",
                f"it takes ({self.sequences}, a multiple of {self.heads}, 1, {self.width})",
            )


class PackedCache(Cache):
    def __init__(self, fmt: KVFormat, sequences: int, heads: int, width: int) -> None:
        if reason := unsupported(fmt):
            raise InputError(f"a {fmt.name} cache cannot be kept packed: {reason}", "int8 and int4 can")
        super().__init__(fmt, sequences, heads, width)
        self._channels = min(fmt.channels or width, width)
        both, rest_room = sequences * heads, -(-(fmt.sink + fmt.group) // 16) * 16
        self._rest_keys, self._rest_values = torch.zeros(both, width, rest_room), torch.zeros(both, rest_room, width)
        self._codes: dict[str, Tensor] = {}  # (heads, groups, width / 4, 32 tokens, 4) of keys, (heads, tokens / 4, width, 4) of values
        self._scales: dict[str, Tensor] = {}  # float16: scales, and where the format has them minima
        self._grow(4)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens stored so far, without the space allocated for more."""
        groups = -(-self.packed // _GROUP)
        keys = self._codes["key"][:, :groups].nbytes + self._codes["value"][:, : -(-self.packed // _FOUR)].nbytes
        per_head = 4 * 2 * self.rest * self.width
        return keys + sum(self._written(name, groups).nbytes for name in self._scales) + self.sequences * self.heads * per_head

    def append(self, keys: Tensor, values: Tensor) -> None:  # (sequences, heads, tokens, width) float32
        """One token: a group that it completes stays in float until the next token arrives, because attention reads the newest group
        unrounded. Several tokens: complete groups are rounded at once."""
        self._check_tokens(keys, values)
        keys, values = keys.detach().float().flatten(0, 1), values.detach().float().flatten(0, 1)
        if keys.shape[1] == 1 and self.format.group > 1:
            if self.rest == self.format.sink + self.format.group:
                self._settle(keys[:, :0], values[:, :0])
            self._rest_keys[:, :, self.rest], self._rest_values[:, self.rest] = keys[:, 0], values[:, 0]
            self.rest += 1
        else:
            self._settle(keys, values)

    def attend(self, q: Tensor, factor: float | None = None) -> Tensor:  # (sequences, query heads, 1, width) -> the same shape
        """softmax(q . keys * factor) . values; the default factor is 1 / sqrt(width)."""
        self._check_queries(q)
        isa = _isa()
        if isa is None:
            keys, values = self.unpacked()
            return scaled_dot_product_attention(q.float(), keys, values, scale=factor, enable_gqa=True)
        queries = q.detach().float().reshape(self.sequences * self.heads, -1, self.width).contiguous()
        out = torch.empty_like(queries)
        fmt = self.format
        assert fmt.levels
        arrays = [
            array
            for part in ("key", "value")
            for array in (self._codes[part].numpy(), _halves(self._scales[part]), _halves(self._scales.get(f"{part} minimum")))
        ]
        processor.native().attend(
            isa, queries.numpy(), fmt.bits, fmt.keys == "channel", self._channels, self.packed, self.rest, fmt.levels[0], *arrays,
            self._rest_keys.numpy(), self._rest_values.numpy(), self.width**-0.5 if factor is None else factor, out.numpy(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out.view(q.shape)

    def unpacked(self) -> tuple[Tensor, Tensor]:  # keys, values: (sequences, heads, tokens, width) float32
        """The decoded keys and values: the same bits that `EmulatedKVCache` gives to attention."""
        fmt, groups = self.format, -(-self.packed // _GROUP)
        codes = self._key_codes(slice(0, groups))
        if fmt.keys == "channel":
            scales = (None if entries is None else entries[:, :groups].float().unsqueeze(2) for entries in self._pair("key"))
            keys = self._decoded(codes.unflatten(1, (-1, _GROUP)), *scales).flatten(1, 2)
        else:
            keys = self._decoded_by_token(codes[:, : self.packed], "key")
        values = self._decoded_by_token(self._value_codes(slice(0, groups))[:, : self.packed], "value")
        rest_keys, rest_values = self._rest_keys[:, :, : self.rest].transpose(1, 2), self._rest_values[:, : self.rest]
        return self._in_order(keys[:, : self.packed], rest_keys), self._in_order(values, rest_values)

    def _settle(self, keys: Tensor, values: Tensor) -> None:  # (heads, tokens, width), new ones
        """Rounds the complete groups among the unrounded tokens and these new ones; the others stay unrounded."""
        sink, group = self.format.sink, self.format.group
        keys = torch.cat([self._rest_keys[:, :, : self.rest].transpose(1, 2), keys], dim=1)
        values = torch.cat([self._rest_values[:, : self.rest], values], dim=1)
        end = sink + max(0, keys.shape[1] - sink) // group * group
        if end > sink:
            self._pack(keys[:, sink:end], values[:, sink:end])
            keys, values = (torch.cat([x[:, :sink], x[:, end:]], dim=1) for x in (keys, values))
        self.rest = keys.shape[1]
        self._rest_keys[:, :, : self.rest], self._rest_values[:, : self.rest] = keys.transpose(1, 2), values

    def _pack(self, keys: Tensor, values: Tensor) -> None:
        fmt, start, end = self.format, self.packed, self.packed + keys.shape[1]
        while end > self._codes["key"].shape[1] * _GROUP:
            self._grow(2 * self._codes["key"].shape[1])
        first, last = start // _GROUP, -(-end // _GROUP)
        if fmt.keys == "channel":
            codes, scale, minimum = self._encoded(keys.unflatten(1, (-1, _GROUP)), 2)
            codes = codes.flatten(1, 2)
            self._store("key", (slice(None), slice(first, last)), scale.squeeze(2), None if minimum is None else minimum.squeeze(2))
        else:
            codes = self._encode_by_token(keys, "key", slice(start, end))
        groups = slice(first, last)
        fields = ((self._key_codes, codes), (self._value_codes, self._encode_by_token(values, "value", slice(start, end))))
        for access, new in fields:
            there = access(groups)
            there[:, start - first * _GROUP : end - first * _GROUP] = new
            access(groups, there)
        self.packed = end

    def _key_codes(self, groups: slice, new: Tensor | None = None) -> Tensor:  # (heads, tokens, width) uint8
        """Reads the codes of these groups, or writes `new` ones."""
        stored, bits = self._codes["key"], self.format.bits
        if new is not None:
            rows = torch.nn.functional.pad(new, (0, -self.width % _FOUR)).unflatten(1, (-1, _GROUP)).transpose(2, 3)
            stored[:, groups] = _with_nibbles(rows, bits, _GROUP).unflatten(2, (-1, _FOUR)).transpose(3, 4)
            return new
        rows = _without_nibbles(stored[:, groups].transpose(3, 4).flatten(2, 3), bits, _GROUP, _GROUP)
        codes: Tensor = rows.transpose(2, 3).flatten(1, 2)[:, :, : self.width]
        return codes.contiguous()

    def _value_codes(self, groups: slice, new: Tensor | None = None) -> Tensor:
        fours = slice(groups.start * _GROUP // _FOUR, groups.stop * _GROUP // _FOUR)
        stored, bits = self._codes["value"], self.format.bits
        if new is not None:
            stored[:, fours] = _with_nibbles(new, bits, self._channels).unflatten(1, (-1, _FOUR)).transpose(2, 3)
            return new
        return _without_nibbles(stored[:, fours].transpose(2, 3).flatten(1, 2), bits, self.width, self._channels).contiguous()

    def _encode_by_token(self, x: Tensor, part: str, tokens: slice) -> Tensor:
        encoded = [self._encoded(piece, 2) for piece in x.split(self._channels, dim=2)]
        for i, (_, scale, minimum) in enumerate(encoded):
            self._store(part, (slice(None), i, tokens), scale.squeeze(2), None if minimum is None else minimum.squeeze(2))
        return torch.cat([codes for codes, _, _ in encoded], dim=2)

    def _encoded(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
        fmt = self.format
        assert fmt.levels
        if fmt.minimum:
            low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
            scale, minimum = as_float16((high - low) / fmt.levels[-1]), as_float16(low)
        else:
            scale, minimum = as_float16(x.abs().amax(dim, keepdim=True) / fmt.largest), None
        return encode(x, fmt.levels, scale, minimum), scale, minimum

    def _decoded(self, codes: Tensor, scale: Tensor | None, minimum: Tensor | None) -> Tensor:
        assert scale is not None
        return decode(codes, self.format.levels, scale, minimum)

    def _decoded_by_token(self, codes: Tensor, part: str) -> Tensor:  # (heads, tokens, width)
        pieces = [
            self._decoded(piece, *(None if s is None else s[:, i, : self.packed].float().unsqueeze(2) for s in self._pair(part)))
            for i, piece in enumerate(codes.split(self._channels, dim=2))
        ]
        return torch.cat(pieces, dim=2)

    def _pair(self, part: str) -> tuple[Tensor, Tensor | None]:
        return self._scales[part], self._scales.get(f"{part} minimum")

    def _store(self, part: str, where: Any, scale: Tensor, minimum: Tensor | None) -> None:
        self._scales[part][where] = scale.half()
        if minimum is not None:
            self._scales[f"{part} minimum"][where] = minimum.half()

    def _written(self, name: str, groups: int) -> Tensor:
        entries = self._scales[name]
        by_channel = name.startswith("key") and self.format.keys == "channel"
        return entries[:, :groups] if by_channel else entries[:, :, : self.packed]

    def _in_order(self, packed: Tensor, rest: Tensor) -> Tensor:
        sink = self.format.sink
        tokens: Tensor = torch.cat([rest[:, :sink], packed, rest[:, sink:]], dim=1).unflatten(0, (self.sequences, self.heads))
        return tokens

    def _grow(self, groups: int) -> None:
        both, fmt = self.sequences * self.heads, self.format
        scales, row = -(-self.width // self._channels), -(-self.width * fmt.bits // 8)
        by_token, by_channel = (both, scales, groups * _GROUP), (both, groups, self.width)
        shapes = {"key": by_channel if fmt.keys == "channel" else by_token, "value": by_token}
        old_codes, old_scales = self._codes, self._scales
        self._codes = {
            "key": torch.zeros(both, groups, -(-self.width // _FOUR), _GROUP * fmt.bits // 8, _FOUR, dtype=torch.uint8),
            "value": torch.zeros(both, groups * _GROUP // _FOUR, row, _FOUR, dtype=torch.uint8),
        }
        names = ("key", "key minimum", "value", "value minimum") if fmt.minimum else ("key", "value")
        self._scales = {name: torch.zeros(shapes[name.split()[0]], dtype=torch.float16) for name in names}
        for new, old in ((self._codes, old_codes), (self._scales, old_scales)):
            for name, entries in old.items():
                new[name][tuple(slice(0, n) for n in entries.shape)] = entries


def _halves(entries: Tensor | None) -> Any:
    return None if entries is None else entries.view(torch.int16).numpy()


def _with_nibbles(codes: Tensor, bits: int, channels: int) -> Tensor:  # (..., n) -> (..., bytes)
    """Packs blocks of 32 codes (or the remainder of a group of channels): the first half into low nibbles, the second into high."""
    if bits == 8:
        return codes
    packed = []
    for piece in codes.split(channels, dim=-1):
        for block in piece.split(32, dim=-1):
            half = -(-block.shape[-1] // 2)
            low, high = block[..., :half].clone(), block[..., half:]
            low[..., : high.shape[-1]] |= high << 4
            packed.append(low)
    return torch.cat(packed, dim=-1)


def _without_nibbles(packed: Tensor, bits: int, n: int, channels: int) -> Tensor:  # (..., bytes) -> (..., n)
    if bits == 8:
        return packed
    codes, at = [], 0
    for first in range(0, n, channels):
        left = min(channels, n - first)
        for block in range(0, left, 32):
            count = min(32, left - block)
            half = -(-count // 2)
            both, at = packed[..., at : at + half], at + half
            codes += [both & 15, both[..., : count - half] >> 4]
    return torch.cat(codes, dim=-1)


def _isa() -> str | None:
    """The fastest native instruction set here, or the one that FEWBITS_KERNEL forces; None: use torch."""
    return processor.fastest([] if processor.native_missing() else processor.native().attention_isas())
