"""Models run block by block: the same bits as the whole module, a part of it in memory."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mixtures
import pytest
import torch
import transformers
from gguf_models import MODELS, save_random
from safetensors.torch import load_file
from torch import Tensor, nn

from fewbits import artifact as artifacts
from fewbits import formats, planning, targets
from fewbits import model as models
from fewbits.calibration import collect
from fewbits.errors import InputError, MissingError
from fewbits.formats.runtime.activations import Activation
from fewbits.model import Model, chain, experts
from fewbits.model.blocks import Blocks
from fewbits.model.state import Layout
from fewbits.model.weights import Weight
from fewbits.progress import silent
from fewbits.store.cache import Cache
from fewbits.store.mapped import Room
from fewbits.verification import metrics, streamed
from fewbits.verification.forecast.side_by_side import Stream, compare_streams
from fewbits.verification.runtimes import torch as torch_runtime
from fewbits.verification.session import PART, Session

WINDOWS = [list(range(3, 19)), list(range(40, 49)), list(range(7, 23))]
EVERYTHING, NOTHING = 1 << 40, 0


def run(session: Session, folder: Path, windows: list[list[int]] = WINDOWS, memory: int = EVERYTHING) -> list[Tensor]:
    return [torch.cat(list(parts)) for parts in session.each(windows, Room(folder, memory))]


def assert_equal_to_the_whole(source: Model, folder: Path) -> None:
    whole = torch_runtime.of_module(source.module())
    for memory in (EVERYTHING, NOTHING):
        for window, logits in zip(WINDOWS, run(torch_runtime.of_model(source), folder, memory=memory), strict=True):
            assert torch.equal(logits, whole.logits(window))


@pytest.mark.parametrize("name", MODELS)
def test_block_by_block_gives_the_bits_of_the_whole_module(name: str, tmp_path: Path) -> None:
    source = models.open(save_random(MODELS[name](), tmp_path / "model"))
    assert Blocks(source).is_chain
    assert_equal_to_the_whole(source, tmp_path)


_TEXT = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
OTHERS: dict[str, tuple[bool, Any]] = {
    # takes the first of what a block returns
    "bloom": (True, transformers.BloomConfig(vocab_size=512, hidden_size=64, n_layer=3, n_head=4)),
    "falcon": (True, transformers.FalconConfig(**_TEXT)),
    "mamba2": (
        True,
        transformers.Mamba2Config(
            vocab_size=512, hidden_size=64, num_hidden_layers=3, state_size=16, head_dim=16, num_heads=8, n_groups=2, chunk_size=16
        ),
    ),
    # a second input made of the tokens for every block, several hidden states for each token, and keys that later blocks read again
    "gemma3n": (
        True,
        transformers.Gemma3nTextConfig(
            **_TEXT, vocab_size_per_layer_input=512, hidden_size_per_layer_input=16, num_key_value_heads=2, head_dim=16,
            intermediate_size=96, num_kv_shared_layers=2, laurel_rank=8, layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2,
        ),
    ),
    # one set of weights in two blocks
    "zamba2": (
        False,
        transformers.Zamba2Config(
            **_TEXT, intermediate_size=96, mamba_d_state=16, mamba_ngroups=1, n_mamba_heads=8, num_mem_blocks=1,
            layers_block_type=["mamba", "hybrid"] * 2, hybrid_layer_ids=[1, 3], adapter_rank=8, chunk_size=16,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_chain_of_blocks_is_run_whole(name: str, tmp_path: Path) -> None:
    is_chain, config = OTHERS[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    source = models.open(tmp_path / "model")
    assert Blocks(source).is_chain == is_chain
    assert_equal_to_the_whole(source, tmp_path)
    if not is_chain:
        with pytest.raises(InputError, match="share their weights"):
            collect(source, mixtures.samples_of(WINDOWS), tmp_path / "stats")


LEAKS = {
    "from a block to a later one": "read the output of other blocks",
    "past the last block": "are not all that the logits depend on",
    "of a sum over the tokens": "are given `position_ids` of shape",
}


class TestChains:
    @pytest.fixture
    def llama(self, tmp_path: Path) -> Model:
        return models.open(save_random(MODELS["llama"](), tmp_path / "model"))

    @pytest.mark.parametrize("leak", LEAKS)
    def test_a_leak_is_noticed(self, llama: Model, leak: str) -> None:
        blocks = Blocks(llama)
        first, last = blocks.stubs[0], blocks.stubs[-1]
        plain, ends = type(last).forward, blocks.module.lm_head.forward

        def forward(stub: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if stub is last and leak == "from a block to a later one":
                kwargs["position_ids"] = first.answer if first.answer is not None else first.hidden
            if stub is last and leak == "of a sum over the tokens":
                kwargs["position_ids"] = first.hidden.sum(1)
            return plain(stub, hidden, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            assert isinstance(chain.layout_of(blocks), Layout)
            patch.setattr(type(last), "forward", forward)
            if leak == "past the last block":
                patch.setattr(blocks.module.lm_head, "forward", lambda x: ends(x + first.hidden))
            found = chain.layout_of(blocks)
            assert isinstance(found, str) and LEAKS[leak] in found

    def test_an_input_made_of_the_tokens_is_part_of_the_state(self, llama: Model) -> None:
        blocks = Blocks(llama)
        plain, last = type(blocks.stubs[-1]).forward, blocks.stubs[-1]

        def forward(stub: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if stub is last:
                kwargs["position_ids"] = blocks.stubs[0].hidden
            return plain(stub, hidden, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(last), "forward", forward)
            layout = chain.layout_of(blocks)
        assert isinstance(layout, Layout) and [list(pieces) for pieces in layout.given] == [[]] * (len(blocks) - 1) + [[("position_ids",)]]
        assert layout.given[-1]["position_ids",].where == slice(layout.changing, 2 * layout.changing)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return mixtures.save_all(tmp_path_factory)


@pytest.fixture(params=list(mixtures.MIXTURES))
def mixture(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Model:
    return models.open(folders[request.param])


def joined(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files, by the kind of statistics, block and name."""
    return {
        f"{'-'.join(file.stem.split('-')[:2])} {name}": tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


class TestExperts:
    def test_weights_begin_where_a_cache_line_does_wherever_they_lie_in_their_file(self, mixture: Model) -> None:
        """Of one row, sums depend on it on some processors: without this, the test below fails there alone."""
        assert any(mixture.checkpoint.load(name).data_ptr() % 64 for name in mixture.checkpoint.names())
        assert not any(mixture.load(weight).data_ptr() % 64 for weight in mixture.weights)

    def test_one_at_a_time_they_compute_the_same_bits(self, mixture: Model, tmp_path: Path) -> None:
        assert_equal_to_the_whole(mixture, tmp_path)

    def test_one_at_a_time_they_are_given_the_same_statistics(self, mixture: Model, tmp_path: Path) -> None:
        samples = mixtures.samples_of(WINDOWS * 2)
        held, one_by_one = (collect(mixture, samples, tmp_path / str(memory), memory=memory) for memory in (EVERYTHING, NOTHING))
        expected, tensors = (joined(statistics.folder) for statistics in (held, one_by_one))  # one pass, or one for each expert
        assert expected.keys() == tensors.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, tensors[name]), name

    def test_no_more_than_one_is_held(self, mixture: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        alive: list[weakref.ref[Tensor]] = []
        most, load = 0, mixture.load

        def counted(weight: Weight) -> Tensor:
            nonlocal most
            matrix = load(weight)
            if weight.expert is not None:
                alive.append(weakref.ref(matrix))
                most = max(most, sum(each() is not None for each in alive))
            return matrix

        monkeypatch.setattr(mixture, "load", counted)
        run(torch_runtime.of_model(mixture), tmp_path, memory=NOTHING)
        assert most == 1

    def test_a_changed_expert_is_the_one_that_is_multiplied(self, mixture: Model) -> None:
        chosen = next(weight for weight in mixture.weights if weight.expert == 1)
        kl = []
        for memory in (EVERYTHING, NOTHING):
            stream = Stream({chosen.name: lambda: 2 * mixture.load(chosen)})
            kl.append(compare_streams(mixture, WINDOWS, {"doubled": stream}, memory, silent).measured["doubled"].kl)
        assert kl[0] == kl[1] and max(kl[0]) > 0

    def test_values_that_nobody_supplies_are_nan(self) -> None:
        parameter = experts.placeholder((4, 3, 5))
        assert [int(each.storage_offset()) for each in parameter] == [0, 1, 2, 3] and parameter.isnan().all()


@pytest.fixture(scope="module")
def made(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> artifacts.Artifact:
    plan = planning.uniform(
        embedded_model.weights, targets.get("fewbits"), formats.get("int8_channel"), [], "rtn", Activation("int8"), None
    )
    return artifacts.quantize(embedded_model, plan, tmp_path_factory.mktemp("made") / "artifact", silent)


class TestArtifacts:
    def test_inputs_are_rounded_as_in_the_whole_module(self, made: artifacts.Artifact, tmp_path: Path) -> None:
        readers = torch_runtime.readers(made.plan, made.weights)
        whole, exact = torch_runtime.of_module(made.module(), readers), torch_runtime.of_module(made.module())
        for window, logits in zip(WINDOWS, run(torch_runtime.of_artifact(made), tmp_path), strict=True):
            assert torch.equal(logits, whole.logits(window)) and not torch.equal(logits, exact.logits(window))


class TestParts:
    def test_logits_are_made_a_part_at_a_time(self, embedded_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        window = [int(i) for i in torch.arange(PART + 70) % 500]
        whole = torch_runtime.of_module(embedded_model.module()).logits(window)
        (parts,) = torch_runtime.of_model(embedded_model).each([window], Room(tmp_path, NOTHING))
        logits = list(parts)
        assert [len(part) for part in logits] == [PART, 70]
        # a product of other numbers of rows may add up in another order
        torch.testing.assert_close(torch.cat(logits), whole, rtol=1e-5, atol=1e-4)

    def test_the_last_token_alone_in_a_part_is_not_judged(self, embedded_model: Model) -> None:
        windows = [[int(i) for i in torch.arange(PART + 1) % 500], list(range(9))]
        session = torch_runtime.of_model(embedded_model)
        measured = metrics.compare_logits(session, {"same": torch_runtime.of_model(embedded_model)}, windows, silent)["same"]
        assert len(measured.kl) == PART + 8 and set(measured.kl) == {0.0}


class TestReferenceCache:
    def test_the_reference_is_run_once(self, embedded_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = Cache(tmp_path / "cache")
        first = run(torch_runtime.of_model(embedded_model, cache), tmp_path)
        monkeypatch.setattr(Blocks, "filled", lambda *_: pytest.fail("a block was run again"))
        for before, after in zip(first, run(torch_runtime.of_model(embedded_model, Cache(tmp_path / "cache")), tmp_path), strict=True):
            assert torch.equal(before, after)

    def test_other_text_has_a_reference_of_its_own(self, embedded_model: Model, tmp_path: Path) -> None:
        cache, room = Cache(tmp_path / "cache"), Room(tmp_path, NOTHING)
        for window in ([1, 2, 3, 4], [1, 2, 3, 5]):
            (parts,) = torch_runtime.of_model(embedded_model, cache).each([window], room)
            assert torch.equal(torch.cat(list(parts)), torch_runtime.of_module(embedded_model.module()).logits(window))

    def test_of_large_blocks_at_most_one_is_run_again(self, embedded_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streamed, "_WORTH_CACHING", 0)
        wanted = run(torch_runtime.of_model(embedded_model), tmp_path)
        filled, ran = Blocks.filled, list[int]()

        @contextmanager
        def counted(self: Blocks, index: int) -> Iterator[nn.Module]:
            ran.append(index)
            if ran == [0, 1, 2]:
                raise KeyboardInterrupt
            with filled(self, index) as block:
                yield block

        monkeypatch.setattr(Blocks, "filled", counted)
        cache = Cache(tmp_path / "cache")
        with pytest.raises(KeyboardInterrupt):
            run(torch_runtime.of_model(embedded_model, cache), tmp_path)
        resumed = run(torch_runtime.of_model(embedded_model, Cache(tmp_path / "cache")), tmp_path)
        assert ran == [0, 1, 2, *range(2, len(Blocks(embedded_model)))]
        assert all(map(torch.equal, wanted, resumed))
        assert len(list((tmp_path / "cache").glob("reference-*"))) == 1


class TestRoom:
    def test_beyond_its_limit_it_is_a_file_without_a_name(self, tmp_path: Path) -> None:
        room = Room(tmp_path, 400)
        inside, outside = room.new((10, 10)), room.new((10, 10))
        inside[3], outside[3] = 1.0, 2.0
        assert (float(inside.sum()), float(outside.sum())) == (10.0, 20.0)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert len(mapped) == 1 and "(deleted)" in mapped[0] and not list(tmp_path.iterdir())

    def test_a_full_disk_is_said_before_anything_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.posix_fallocate", full)
        with pytest.raises(MissingError, match="disk is full"):
            Room(tmp_path, 0).new((10, 10))
        assert not list(tmp_path.iterdir())
