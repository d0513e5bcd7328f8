"""Statistics taken block by block are those of the whole model run at once, and add up."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from fewbits import calibration, embedded, model
from fewbits.calibration import folder, text
from fewbits.calibration.collector import Collector, loss_gradient
from fewbits.calibration.folder import Statistics
from fewbits.calibration.text.samples import Samples
from fewbits.errors import InputError
from fewbits.model import Model
from fewbits.model.blocks import Blocks
from fewbits.model.walk import batches
from fewbits.store.cache import Cache
from fewbits.store.mapped import Room

EPS = torch.finfo(torch.float32).eps / 2


def samples_of(ids: list[list[int]]) -> Samples:
    digest = hashlib.sha256(str(ids).encode()).hexdigest()
    return Samples(tuple(map(tuple, ids)), ("test",) * len(ids), 0, digest, 1)


@pytest.fixture(scope="module")
def windows(embedded_model: Model) -> list[list[int]]:
    return text.windows.windows(embedded.calibration_text(), embedded_model.tokenizer, 48)[:8]


@pytest.fixture(scope="module")
def whole(embedded_model: Model, windows: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return calibration.collect(embedded_model, samples_of(windows), tmp_path_factory.mktemp("whole") / "stats")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=2048, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return with_tokenizer(folder)


def with_tokenizer(folder: Path) -> Model:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.MODEL / name, folder / name)
    return model.open(folder)


def direct(source: Model, ids: list[list[int]]) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Inputs and output gradients of every weight, from the whole module under plain autograd; labels drawn in the same order."""
    module = source.module()
    paths = {w.name: w.name for w in source.weights if w.kind != "embedding"}
    paths |= {w.name: w.tied_to for w in source.weights if w.kind == "embedding" and w.tied_to}
    inputs: dict[str, list[Tensor]] = {name: [] for name in paths}
    gradients: dict[str, list[Tensor]] = {name: [] for name in paths}

    def watch(name: str) -> None:
        def see(_: nn.Module, x: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name].append(x[0].detach()[0])
            y.register_hook(lambda g: gradients[name].append(g[0]))

        module.get_submodule(paths[name]).register_forward_hook(see)

    for name in paths:
        watch(name)
    generator = torch.Generator().manual_seed(0)
    for row in ids:
        logits = module(input_ids=torch.tensor([row]), use_cache=False).logits
        logits.backward(loss_gradient(logits.detach(), generator))
    return inputs, gradients


@pytest.mark.parametrize("which", ["embedded_model", "gpt2"])
def test_block_by_block_equals_the_whole_model(
    which: str, request: pytest.FixtureRequest, windows: list[list[int]], tmp_path: Path
) -> None:
    source: Model = request.getfixturevalue(which)
    statistics = calibration.collect(source, samples_of(windows), tmp_path / "stats")
    order = [i for half in (0, 1) for i in range(half, len(windows), 2)]  # as batches are made: one half, then the other
    inputs, gradients = direct(source, [windows[i] for i in order])
    assert {name for name in statistics.names if statistics.site(name)} == set(inputs)
    count = len(windows) // 2
    for name, seen in inputs.items():
        ours = statistics.of(name)
        assert ours.input
        for half in (0, 1):
            x = torch.stack(seen[half * count : (half + 1) * count]).double()
            g = torch.stack(gradients[name][half * count : (half + 1) * count]).double()
            later, first = x[:, 1:].flatten(0, 1), x[:, 0]
            # activations themselves differ in float32's last bits between a batch of eight and one sample
            close = {"rtol": 2e-4, "atol": 2e-4 * float(x.square().mean())}
            torch.testing.assert_close(ours.input.square[half], later.square().sum(0), **close)
            torch.testing.assert_close(ours.input.total[half], later.sum(0), **close | {"atol": 1e-3 * float(x.abs().mean()) * len(later)})
            torch.testing.assert_close(ours.input.firsts(half).double(), first, rtol=1e-4, atol=1e-4)
            assert ours.input.moment is not None and ours.fisher is not None and ours.sensitivity is not None
            torch.testing.assert_close(
                ours.input.moment[half].double(), later.T @ later, rtol=1e-3, atol=1e-4 * float(later.square().sum(0).max())
            )
            w = g.square().mean(-1)
            torch.testing.assert_close(ours.sensitivity[half], torch.stack([w[:, 0].sum(), w[:, 1:].sum()]), rtol=2e-3, atol=1e-12)
            assert ours.gradient_square is not None
            torch.testing.assert_close(ours.gradient_square[half], g.square().sum((0, 1)), rtol=5e-3, atol=1e-9)
            flat, weight = x.flatten(0, 1), w.flatten()
            fisher = (flat * weight.unsqueeze(1)).T @ flat
            torch.testing.assert_close(ours.fisher[half].double(), fisher, rtol=5e-3, atol=1e-4 * float(fisher.diagonal().max()))


def test_some_real_inputs_are_kept(whole: Statistics, embedded_model: Model, windows: list[list[int]]) -> None:
    name = "model.layers.1.mlp.down_proj"
    inputs, _ = direct(embedded_model, windows)
    everything = torch.cat([x[1:] for x in inputs[name]])
    for half in (0, 1):
        drawn = whole.input(name).drawn(half)
        inputs_of_half = torch.cat([x[1:] for x in inputs[name][half::2]])
        assert len(drawn) == 8 * len(windows) // 2
        distance = torch.cdist(drawn, inputs_of_half).min(1).values
        assert (distance < 1e-2 * everything.norm(dim=1).mean()).all()


def test_weights_that_read_the_same_tensor_share_its_statistics(whole: Statistics) -> None:
    q, k, o = (f"model.layers.1.self_attn.{name}_proj" for name in "qko")
    assert whole.site(k) == whole.site(q) == q
    assert whole.site(o) == o
    assert whole.site("model.layers.1.mlp.up_proj") == "model.layers.1.mlp.gate_proj"


def test_hidden_states_on_disk_change_nothing(embedded_model: Model, windows: list[list[int]], whole: Statistics, tmp_path: Path) -> None:
    mapped = calibration.collect(embedded_model, samples_of(windows), tmp_path / "stats", memory=0)
    files = sorted(path.name for path in whole.folder.iterdir())
    assert sorted(path.name for path in mapped.folder.iterdir()) == files
    for name in files:  # also: two runs give the same bytes
        assert (whole.folder / name).read_bytes() == (mapped.folder / name).read_bytes(), name
    assert not [path for path in tmp_path.iterdir() if path.name != "stats"]


def test_merged_runs_equal_one(embedded_model: Model, windows: list[list[int]], whole: Statistics, tmp_path: Path) -> None:
    for name, part in (("a", windows[:4]), ("b", windows[4:])):
        calibration.collect(embedded_model, samples_of(part), tmp_path / name)
    merged = folder.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert merged.about["runs"] == [Statistics(tmp_path / name).about["runs"][0] for name in "ab"]
    for path in whole.folder.glob("input-*.safetensors"):
        one, two = load_file(path), load_file(tmp_path / "merged" / path.name)
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            field = key.rpartition(":")[2]
            if field in {"count", "first_half"} or field.startswith("histogram") or "low" in field or "high" in field:
                # a batch of another size may round an activation's last bit the other way; on this model none does
                assert torch.equal(torch.sort(tensor.flatten())[0], torch.sort(two[key].flatten())[0]), key
            elif field in {"total", "square", "moment"}:
                # a sum of n products, taken in another order: at most n roundings of the sum of magnitudes each
                n = sum(map(len, windows))
                scale = one[key.replace("moment", "square").replace("total", "square")].sum(1).max() + n
                assert (tensor - two[key]).abs().max() <= 2 * n * EPS * float(scale), key


def test_another_models_statistics_do_not_merge(whole: Statistics, gpt2: Model, windows: list[list[int]], tmp_path: Path) -> None:
    calibration.collect(gpt2, samples_of(windows[:2]), tmp_path / "other", gradients=False)
    with pytest.raises(InputError, match="another model"):
        folder.merge([whole.folder, tmp_path / "other"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_lengths_may_differ_and_nothing_is_padded(embedded_model: Model, windows: list[list[int]], tmp_path: Path) -> None:
    ids = [row[: 20 + 5 * i] for i, row in enumerate(windows)]
    assert sum(batch.ids.numel() for batch in batches(ids)) == sum(map(len, ids))
    statistics = calibration.collect(embedded_model, samples_of(ids), tmp_path / "stats", gradients=False, hessians=False)
    seen = statistics.input("model.layers.3.mlp.down_proj")
    assert seen.tokens() == sum(map(len, ids)) and seen.tokens(0) == sum(map(len, ids[::2]))
    assert seen.moment is None


def test_keys_and_values_ranges_are_those_of_the_cache(embedded_model: Model, windows: list[list[int]], whole: Statistics) -> None:
    with torch.inference_mode():
        cache = embedded_model.module()(input_ids=torch.tensor(windows), use_cache=True).past_key_values
    for index in range(4):
        ranges = whole.kv(index)
        for name, x in (("key", cache.layers[index].keys), ("value", cache.layers[index].values)):
            torch.testing.assert_close(ranges[f"{name}_low"], x.amin((0, 2)), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ranges[f"{name}_high"], x.amax((0, 2)), rtol=1e-4, atol=1e-5)


def test_lookups_are_counted(whole: Statistics, windows: list[list[int]]) -> None:
    lookup = whole.of("model.embed_tokens").lookup
    assert lookup is not None and lookup.fisher is not None
    assert torch.equal(lookup.usage, torch.bincount(torch.tensor(windows).flatten(), minlength=2048))


def test_experts_that_calibration_reached_are_counted(tmp_path: Path, windows: list[list[int]]) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
        num_experts_per_tok=2, vocab_size=2048, max_position_embeddings=128,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe", save_original_format=False)
    source = with_tokenizer(tmp_path / "moe")
    statistics = calibration.collect(source, samples_of(windows), tmp_path / "stats", gradients=False, hessians=False)
    counts = statistics.about["experts"]
    assert len(counts) == 2
    for row in counts.values():
        assert len(row) == 8 and sum(row) == 2 * sum(map(len, windows))


def test_the_gradients_predict_the_kl_of_a_disturbed_weight(embedded_model: Model, tmp_path: Path) -> None:
    """The second moments of gradients under the model's own labels are the curvature of KL: their forecast must come true."""
    ids = text.windows.windows(embedded.calibration_text(), embedded_model.tokenizer, 256)[:16]
    statistics = calibration.collect(embedded_model, samples_of(ids), tmp_path / "stats")
    module = embedded_model.module()
    with torch.inference_mode():
        float_logits = [module(torch.tensor([row])).logits[0].log_softmax(-1) for row in ids]
    for weight in embedded_model.weights[1::7]:
        w = embedded_model.load(weight)
        error = 0.05 * w.std() * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))
        predicted = statistics.of(weight.name).damage(error, w)
        with torch.inference_mode():
            module.get_submodule(weight.name).weight.add_(error)
            disturbed = [module(torch.tensor([row])).logits[0].log_softmax(-1) for row in ids]
            module.get_submodule(weight.name).weight.copy_(w)
        kl = float(torch.stack([(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(float_logits, disturbed, strict=True)]).mean())
        # 4,096 labels drawn once: the estimate scatters by some 10 %; splitting rows from columns costs as much again
        assert 0.7 < predicted / kl < 1.4, (weight.name, predicted, kl)


def test_labels_are_drawn_from_the_model() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0]).expand(1, 40_000, 4)
    gradient = loss_gradient(logits, torch.Generator().manual_seed(0))[0]
    p = logits[0, 0].softmax(-1)
    drawn = (p - gradient).mean(0)
    assert torch.allclose(drawn, p, atol=4 * (0.25 / 40_000) ** 0.5)  # four standard errors of a share
    assert torch.allclose((p - gradient).sum(-1), torch.ones(40_000), atol=1e-5)


def test_batches_hold_one_half_and_one_length() -> None:
    ids = [[0] * length for length in (5, 7, 5, 7, 5, 5, 9)]
    for batch in batches(ids):
        assert batch.ids.shape[1] in (5, 7, 9)
    assert [batch.where.start for batch in batches(ids)] == sorted(batch.where.start for batch in batches(ids))
    assert sum(len(batch.ids) for batch in batches(ids) if batch.half == 0) == 4


def test_only_a_block_is_in_memory(embedded_model: Model, windows: list[list[int]], tmp_path: Path) -> None:
    blocks = Blocks(embedded_model)
    collector = Collector(blocks, windows, Room(tmp_path, 0), Cache(tmp_path / "cache"), hessians=False, gradients=False)
    for index, _, _ in collector.forward(lambda items, *_: iter(items)):
        done = [w for i in range(min(index + 1, len(blocks))) for w in blocks.weights(i)]
        assert not any(blocks.submodule(w.name).weight.numel() for w in done)
