"""Matrices of a file found in a checkpoint by their content."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbits.errors import InputError
from fewbits.model.matching import Match
from fewbits.model.matching.fingerprints import bits_of, in_any_order, in_order
from fewbits.model.matching.search import match
from fewbits.model.weights import Weight


@dataclass
class Matrices:
    """Stands for a checkpoint, or for a file whose matrices are compared in one type."""

    tensors: dict[str, Tensor]
    type: str = "F32"
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> list[Weight]:
        return [Weight(name, (t.shape[0], t.shape[1]), self.kinds.get(name, "mlp"), "fp32") for name, t in self.tensors.items()]

    def stored(self, weight: Weight) -> Tensor:
        return self.tensors[weight.name]

    def kind(self, weight: Weight) -> str:
        return self.type

    def nbytes(self, parameter: str) -> int:
        return self.tensors[parameter.removesuffix(".weight")].nbytes


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def found(checkpoint: dict[str, Tensor], matrix: Tensor, kind: str = "F32") -> Match:
    matching = match(Matrices(checkpoint), Matrices({"blk.0.x": matrix}, kind))
    assert not matching.unmatched
    return matching.matches["blk.0.x"]


def rebuilt(matched: Match, checkpoint: dict[str, Tensor]) -> Tensor:
    """The matrix that a match describes, by the plain reading of its fields."""
    rows = [checkpoint[matched.sources[s]][r] for s, r in zip(matched.source, matched.rows, strict=True)]
    whole = torch.stack(rows)
    whole = whole if matched.columns is None else whole[:, torch.from_numpy(matched.columns)]
    return whole.T if matched.transposed else whole


CHECKPOINT = {f"layers.{i}.{name}": random(24, 16, seed=10 * i + j) for i in range(2) for j, name in enumerate(("q", "k", "v"))}


def test_a_whole_weight_is_found_in_order() -> None:
    matched = found(CHECKPOINT, CHECKPOINT["layers.1.k"].clone())
    assert matched.in_order and matched.sources == ("layers.1.k",)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_of_any_weights_in_any_order_are_found(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.sampled_from(sorted(CHECKPOINT)), st.integers(0, 23)), min_size=2, max_size=40))
    matrix = torch.stack([CHECKPOINT[name][row] for name, row in rows])
    matched = found(CHECKPOINT, matrix)
    assert torch.equal(rebuilt(matched, CHECKPOINT), matrix)
    assert [(matched.sources[s], int(r)) for s, r in zip(matched.source, matched.rows, strict=True)] == rows


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_numbers_are_compared_in_the_type_of_the_file(kind: str, dtype: torch.dtype) -> None:
    matrix = CHECKPOINT["layers.0.v"][[5, 3, 4]].to(dtype)
    assert found(CHECKPOINT, matrix, kind).rows.tolist() == [5, 3, 4]


def test_a_transposed_part_is_found() -> None:
    part = CHECKPOINT["layers.0.k"][8:20].T.contiguous()
    matched = found(CHECKPOINT, part)
    assert matched.transposed and matched.rows.tolist() == list(range(8, 20))
    assert torch.equal(rebuilt(matched, CHECKPOINT), part)


def test_columns_in_another_order_are_found_with_rows_in_another_order() -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    rows = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    matrix = CHECKPOINT["layers.1.q"][rows][:, order].contiguous()
    matched = found(CHECKPOINT, matrix)
    assert matched.columns is not None and matched.columns.tolist() == order.tolist() and matched.rows.tolist() == rows.tolist()
    assert torch.equal(rebuilt(matched, CHECKPOINT), matrix)


def test_one_changed_number_is_named_with_its_tensor_and_never_matched() -> None:
    changed = CHECKPOINT["layers.0.q"].clone()
    changed[7, 3] = torch.nextafter(changed[7, 3], torch.tensor(9.0))
    matching = match(Matrices(CHECKPOINT), Matrices({"blk.0.attn_q": changed, "blk.0.attn_k": CHECKPOINT["layers.0.k"]}))
    assert set(matching.matches) == {"blk.0.attn_k"}
    (missing,) = matching.unmatched
    assert (missing.tensor, missing.rows, missing.found) == ("blk.0.attn_q.weight", 24, 23)


def test_a_flipped_sign_of_zero_is_another_number() -> None:
    checkpoint = {"layers.0.q": torch.zeros(4, 8)}
    changed = torch.zeros(4, 8)
    changed[2, 7] = -0.0
    assert match(Matrices(checkpoint), Matrices({"blk.0.x": changed})).unmatched


def test_equal_rows_of_one_weight_are_taken_in_order() -> None:
    embedding = random(50, 16)
    embedding[10:40] = 0  # tokens that were never trained
    matched = found({"embed": embedding, **CHECKPOINT}, embedding.clone())
    assert matched.rows.tolist() == list(range(50))


def test_equal_weights_are_told_apart_by_their_block() -> None:
    twin = random(24, 16, seed=99)
    checkpoint = {**CHECKPOINT, "layers.0.o": twin, "layers.1.o": twin.clone()}
    file = {f"blk.{i}.{name}": checkpoint[f"layers.{i}.{name}"] for i in range(2) for name in ("q", "k", "v", "o")}
    matches = match(Matrices(checkpoint), Matrices(file)).matches
    assert [matches[f"blk.{i}.o"].sources for i in range(2)] == [("layers.0.o",), ("layers.1.o",)]


def test_an_embedding_equal_to_the_output_is_told_apart_by_its_kind() -> None:
    same = random(24, 16)
    kinds = {"embed": "embedding", "head": "output"}
    file = Matrices({"token_embd": same, "output": same.clone()}, kinds={"token_embd": "embedding", "output": "output"})
    matches = match(Matrices({"embed": same, "head": same.clone()}, kinds=kinds), file).matches
    assert matches["token_embd"].sources == ("embed",) and matches["output"].sources == ("head",)


def test_weights_that_nothing_tells_apart_are_refused_and_not_guessed() -> None:
    twin = random(24, 16, seed=99)
    checkpoint = Matrices({"layers.0.a": twin, "layers.0.b": twin.clone()})
    with pytest.raises(InputError, match="nothing says which"):
        match(checkpoint, Matrices({"blk.0.x": twin.clone()}))


def test_hashes_do_not_collide_where_only_signs_differ() -> None:
    base = random(1, 64).repeat(64 * 63 // 2, 1)
    pairs = [(i, j) for i in range(64) for j in range(i)]
    for row, (i, j) in enumerate(pairs):
        base[row, i] *= -1
        base[row, j] *= -1
    for kind in ("F32", "F16"):
        assert len(np.unique(in_order(bits_of(base, kind)))) == len(pairs)


def test_a_hash_in_any_order_does_not_depend_on_the_order() -> None:
    matrix = random(20, 33)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    bits, moved = bits_of(matrix, "F16"), bits_of(matrix[:, order], "F16")
    assert np.array_equal(in_any_order(bits), in_any_order(moved))
    assert not np.array_equal(in_order(bits), in_order(moved))
