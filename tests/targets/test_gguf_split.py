"""A GGUF in parts, as llama.cpp splits one: loaded by llama.cpp and by us as if it were whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from gguf_models import GGUF, LLAMA_CPP, MODELS, TEXT, needs_llama_cpp, save_random, write

from fewbits import model
from fewbits.artifact import Artifact
from fewbits.artifact.draft import Draft
from fewbits.errors import InputError
from fewbits.progress import silent
from fewbits.store.files import Staged
from fewbits.targets.gguf import Gguf, first_part, types

LIMIT = 20_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Path, Path]:
    """An artifact, its whole file, and the folder of its parts."""
    place = tmp_path_factory.mktemp("split")
    source = model.open(save_random(MODELS["mixtral"](), place / "tiny"))
    artifact, whole = write(source, "q8_0", ["embed=fp16"], place)
    target = Gguf(split_bytes=LIMIT)
    with Staged(place / "parts", target.marker) as staged:
        target.write(artifact, staged, silent)
    return artifact, whole, place / "parts"


def test_parts_are_named_and_numbered_as_llama_cpp_does(made: tuple[Artifact, Path, Path]) -> None:
    _, whole, folder = made
    files = sorted(folder.glob("*.gguf"))
    readers = [gguf.GGUFReader(file) for file in files]
    assert len(files) > 3
    assert [file.name for file in files] == [f"model-{i + 1:05}-of-{len(files):05}.gguf" for i in range(len(files))]
    expected = gguf.GGUFReader(whole)
    for number, reader in enumerate(readers):
        fields = {name: (field.contents(), field.types[0].name) for name, field in reader.fields.items()}
        assert fields["split.no"] == (number, "UINT16") and fields["split.count"] == (len(files), "UINT16")
        assert fields["split.tensors.count"] == (len(expected.tensors), "INT32")
        assert sum(int(tensor.n_bytes) for tensor in reader.tensors) <= LIMIT or len(reader.tensors) == 1
        assert ("tokenizer.ggml.tokens" in fields) == (number == 0)
    found = [tensor for reader in readers for tensor in reader.tensors]
    assert [tensor.name for tensor in found] == [tensor.name for tensor in expected.tensors]
    for one, other in zip(found, expected.tensors, strict=True):
        assert one.tensor_type == other.tensor_type and (one.data == other.data).all()


@needs_llama_cpp
def test_llama_cpp_gives_the_same_logits_from_the_parts(made: tuple[Artifact, Path, Path]) -> None:
    artifact, whole, folder = made
    tokens = artifact.tokenizer.encode(TEXT)[:40]
    one, other = (LLAMA_CPP.open(file, 64) for file in (whole, first_part(folder)))
    assert torch.equal(one.logits(tokens), other.logits(tokens))
    one.close()
    other.close()


def test_the_first_part_opens_all_of_them(made: tuple[Artifact, Path, Path]) -> None:
    _, whole, folder = made
    first = first_part(folder)
    one, other = model.open(whole), model.open(first)
    assert one.weights == other.weights and one.rest == other.rest
    for weight in one.weights:
        assert torch.equal(one.load(weight), other.load(weight))
    assert types(first) == types(whole)
    assert other.checkpoint.files() == sorted(folder.glob("*.gguf"))


def test_what_the_parts_will_weigh_is_known_before(made: tuple[Artifact, Path, Path]) -> None:
    artifact, _, folder = made
    source = model.open(folder.parent / "tiny")
    said = Gguf(split_bytes=LIMIT).overhead(Draft(source, artifact.plan)) + artifact.plan.nbytes
    assert said == sum(file.stat().st_size for file in folder.iterdir())


def test_a_part_quantized_again_is_whole(made: tuple[Artifact, Path, Path], tmp_path: Path) -> None:
    _, file = write(model.open(first_part(made[2])), "q4_0", [], tmp_path)
    assert not [name for name in gguf.GGUFReader(file).fields if name.startswith("split.")]


def test_parts_that_do_not_belong_together_are_refused(made: tuple[Artifact, Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(made[2], tmp_path / "parts")
    first, second, third, *_ = sorted(folder.glob("*.gguf"))
    with pytest.raises(InputError, match="is part 2 of"):
        model.open(second)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(InputError, match="is not part 2 of"):
        model.open(first)
    second.unlink()
    with pytest.raises(InputError, match=f"`{second}` is missing"):
        model.open(first)
    second.write_bytes(content)
    first.rename(folder / "other.gguf")
    with pytest.raises(InputError, match="but not named as one"):
        model.open(folder / "other.gguf")
    with pytest.raises(InputError, match="no first parts"):
        first_part(folder)


def test_a_file_that_is_not_split_says_nothing_of_parts(made: tuple[Artifact, Path, Path]) -> None:
    assert not [name for name in gguf.GGUFReader(made[1]).fields if name.startswith("split.")]
    assert GGUF.marker is None and first_part(made[1]) == made[1]
