"""Where channels can be rescaled: all such places are found, the function stays as it is, and statistics follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from recorded import measured
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewbits import formats, model, rewrites
from fewbits.artifact import quantize
from fewbits.calibration.statistics import WeightStatistics
from fewbits.model.blocks import Blocks
from fewbits.planning import unquantized
from fewbits.progress import silent
from fewbits.rewrites import Rewrite, folding
from fewbits.rewrites.folding import Fold
from fewbits.rewrites.rescaling import RewrittenModel
from fewbits.targets import get as target

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MAKERS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),  # biases of q, k and v
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),  # norms of q and k
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES)),  # gains 1 + w
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),  # q, k and v in one matrix, gate and up in one
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=1)
    ),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], model.Model]:
    """A small random model, norms and biases random too, as a folder that was opened."""
    made: dict[str, model.Model] = {}

    def of(name: str) -> model.Model:
        if name not in made:
            torch.manual_seed(0)
            module = MAKERS[name]()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.2 if parameter.dim() == 1 else 0.1)
            folder = tmp_path_factory.mktemp(name)
            module.save_pretrained(folder)
            made[name] = model.open(folder)
        return made[name]

    return of


def logits(opened: model.Model) -> Tensor:
    ids = torch.randint(200, (1, 48), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return opened.module()(ids).logits


def everywhere(source: model.Model) -> tuple[list[Fold], Rewrite]:
    """Every fold of a model, and random factors from 1/4 to 4 in all of them at once."""
    blocks, folds, whole = Blocks(source), [], Rewrite()
    for index in range(len(blocks)):
        folds += folding.trace(blocks, index).folds
    folds += folding.trace_outer(blocks).folds
    generator = torch.Generator().manual_seed(3)
    for fold in folds:
        factors = (4 * torch.rand(fold.channels, generator=generator) - 2).exp2()
        whole = whole.then(Rewrite.of(fold, factors[fold.source]))
    return folds, whole


def by_name(folds: list[Fold], block: str = ".0.") -> dict[str, tuple[str, ...]]:
    def short(name: str) -> str:
        return name.split(block)[1]

    return {short(fold.producer): tuple(map(short, fold.consumers)) for fold in folds if block in fold.producer}


# where channels may be rescaled

NORMS_OF_LLAMA = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LINEARS_OF_LLAMA = {"self_attn.v_proj": ("self_attn.o_proj",), "mlp.up_proj": ("mlp.down_proj",)}
LLAMA = NORMS_OF_LLAMA | LINEARS_OF_LLAMA
GEMMA = {
    "input_layernorm": NORMS_OF_LLAMA["input_layernorm"],
    "pre_feedforward_layernorm": NORMS_OF_LLAMA["post_attention_layernorm"],
    **LINEARS_OF_LLAMA,
}
PHI3 = {
    "input_layernorm": ("self_attn.qkv_proj",), "self_attn.qkv_proj": ("self_attn.o_proj",),
    "post_attention_layernorm": ("mlp.gate_up_proj",), "mlp.gate_up_proj": ("mlp.down_proj",),
}  # fmt: skip
GPT2 = {"ln_1": ("attn.c_attn",), "attn.c_attn": ("attn.c_proj",), "ln_2": ("mlp.c_fc",)}
EXPECTED = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3": GEMMA, "phi3": PHI3, "gpt2": GPT2}


@pytest.mark.parametrize("name", MAKERS)
def test_the_folds_of_an_architecture_are_found_and_leave_the_logits(name: str, opened: Callable[[str], model.Model]) -> None:
    """All of them, no others, and all at once. 1e-4 of the largest logit: a float32 product rounds to about 1e-6 of it."""
    source = opened(name)
    folds, rewrite = everywhere(source)
    assert by_name(folds, ".0.") == by_name(folds, ".1.") == EXPECTED[name]
    before, after = logits(source), logits(RewrittenModel(source, rewrite))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    moved = logits(RewrittenModel(source, Rewrite(rewrite.rows, {}, rewrite.offsets)))
    assert (moved - before).abs().max() > 0.1 * before.abs().max()  # the factors did something


def test_the_embedded_model_keeps_its_logits(embedded_model: model.Model) -> None:
    folds, rewrite = everywhere(embedded_model)
    assert len(folds) == 16 and all(by_name(folds, f".{i}.") == LLAMA for i in range(4))
    before, after = logits(embedded_model), logits(RewrittenModel(embedded_model, rewrite))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_grouped_heads_share_the_rows_of_v(opened: Callable[[str], model.Model]) -> None:
    """4 heads of 16 channels read 2 heads of v: columns 0-15 and 16-31 both come from rows 0-15."""
    fold = next(f for f in folding.trace(Blocks(opened("llama")), 0).folds if f.producer.endswith("v_proj"))
    assert fold.channels == 32
    assert fold.source.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    unlike = torch.ones(64)
    unlike[0] = 2  # column 16 comes from the same row
    with pytest.raises(ValueError, match="one factor"):
        Rewrite.of(fold, unlike)


def test_fused_matrices_fold_by_the_rows_that_allow_it(opened: Callable[[str], model.Model]) -> None:
    gpt2 = next(f for f in folding.trace(Blocks(opened("gpt2")), 0).folds if f.producer.endswith("c_attn"))
    assert gpt2.channels == 192 and gpt2.source.tolist() == list(range(128, 192))  # v comes after q and k
    phi3 = next(f for f in folding.trace(Blocks(opened("phi3")), 0).folds if f.producer.endswith("gate_up_proj"))
    assert phi3.channels == 192 and phi3.source.tolist() == list(range(96, 192))  # up comes after gate


def test_a_norm_that_something_else_reads_is_refused(opened: Callable[[str], model.Model]) -> None:
    blocks = Blocks(opened("llama"))
    with blocks.filled(0) as block:
        plain = block.mlp.forward
        block.mlp.forward = lambda x: plain(x) + 0.01 * x  # a reader that is no weight, and a weak one
    findings = folding.trace(blocks, 0)
    expected = {name: readers for name, readers in LLAMA.items() if name != "post_attention_layernorm"}
    assert by_name(findings.folds) == expected
    assert [name for name, _ in findings.refused] == ["model.layers.0.post_attention_layernorm"]


def test_the_output_matrix_is_rescaled_unless_it_is_tied(opened: Callable[[str], model.Model]) -> None:
    (fold,) = folding.trace_outer(Blocks(opened("llama"))).folds
    assert (fold.producer, fold.consumers) == ("model.norm", ("lm_head",))
    tied = folding.trace_outer(Blocks(opened("gpt2")))
    assert not tied.folds and "tied to `transformer.wte`" in tied.refused[0][1]


# factors and what they apply to


def test_a_rewrite_composes_and_survives_a_file(opened: Callable[[str], model.Model], tmp_path: Path) -> None:
    source = opened("gemma3")
    _, first = everywhere(source)
    second = Rewrite({n: f.flip(0) for n, f in first.rows.items()}, {n: f.flip(0) for n, f in first.columns.items()}, first.offsets)
    save_file(first.then(second).to_tensors(), tmp_path / "rewrite.safetensors")
    at_once = RewrittenModel(source, Rewrite.from_tensors(load_file(tmp_path / "rewrite.safetensors")))
    in_turn = RewrittenModel(RewrittenModel(source, first), second)
    for weight in source.weights:  # a product of four float32 numbers in two orders
        torch.testing.assert_close(at_once.load(weight), in_turn.load(weight), rtol=4e-7, atol=0)
    for name in source.rest:  # gains 1 + w: rounded at the size of the gain
        torch.testing.assert_close(at_once.tensor(name), in_turn.tensor(name), rtol=4e-7, atol=4e-7 * 16)


def test_an_artifact_of_a_rewritten_model_is_the_same_function(opened: Callable[[str], model.Model], tmp_path: Path) -> None:
    source = opened("gpt2")
    _, rewrite = everywhere(source)
    other = RewrittenModel(source, rewrite)
    written = quantize(other, unquantized(source.weights, target("gguf")), tmp_path / "a", silent)
    before = logits(source)
    assert (logits(written) - before).abs().max() < 1e-4 * before.abs().max()
    assert written.provenance.sha256 == source.fingerprint
    changed = [weight.name for weight in source.weights if not torch.equal(written.decoded(weight), source.load(weight))]
    assert sorted(changed) == sorted({*rewrite.columns, *(n for n in rewrite.rows if n.endswith("c_attn"))})


# statistics


def same(actual: WeightStatistics, expected: WeightStatistics, skip: tuple[str, ...] = ()) -> None:
    close = partial(torch.testing.assert_close, rtol=2e-6, atol=1e-30)  # a few roundings of float32 factors
    assert actual.input is not None and expected.input is not None
    for name in ("count", "total", "square", "low", "high", "first", "first_half", "some_half"):
        close(getattr(actual.input, name), getattr(expected.input, name))
    torch.testing.assert_close(actual.input.drawn(), expected.input.drawn(), rtol=2**-10, atol=2**-24)  # a float16 rounded twice
    for one, other in ((actual.input.moment, expected.input.moment), (actual.fisher, expected.fisher)):
        assert one is not None and other is not None
        # entries off the diagonal may cancel: their rounding is of the size of the diagonal's
        bound = 2e-6 * (other.diagonal(dim1=1, dim2=2).sqrt()[:, :, None] * other.diagonal(dim1=1, dim2=2).sqrt()[:, None])
        assert ((one - other).abs() <= bound).all()
    for name in {"sensitivity", "gradient_square", "fisher_square"} - set(skip):
        close(getattr(actual, name), getattr(expected, name))


def test_statistics_rescale_as_if_measured_again() -> None:
    torch.manual_seed(0)
    x, profile, size = torch.randn(6, 9, 24) + 0.3, torch.rand(10) + 0.1, torch.randn(6, 9, 1)
    columns, rows = torch.rand(24) * 4 + 0.1, torch.rand(10) * 4 + 0.1
    shared = profile * size * torch.randn(10).sign()  # one profile over the rows for all tokens: exact by what `rewritten` says
    both = rewrites.rewritten(measured(x, shared), "w", Rewrite({"w": rows}, {"w": columns}))
    same(both, measured(x / columns, shared / rows))
    g = torch.randn(6, 9, 10)  # any gradients: columns are exact
    same(rewrites.rewritten(measured(x, g), "w", Rewrite(columns={"w": columns})), measured(x / columns, g))
    by_rows = rewrites.rewritten(measured(x, g), "w", Rewrite({"w": rows}))
    torch.testing.assert_close(by_rows.gradient_square, measured(x, g / rows).gradient_square, rtol=1e-6, atol=0)
    untouched = measured(x, g)
    assert rewrites.rewritten(untouched, "other", Rewrite({"w": rows}, {"w": columns})) is untouched


def test_statistics_of_a_rewritten_model_are_those_it_would_record(opened: Callable[[str], model.Model]) -> None:
    """Not only the algebra: inputs recorded in the rewritten module itself."""
    source = opened("qwen3")
    _, rewrite = everywhere(source)
    name = "model.layers.1.self_attn.o_proj"
    before, after = inputs_of(source)[name], inputs_of(RewrittenModel(source, rewrite))[name]
    expected = rewrites.rewritten(measured(before), name, rewrite).input
    assert expected is not None
    torch.testing.assert_close(measured(after).input.mean_square(), expected.mean_square(), rtol=1e-4, atol=0)  # through two blocks


def inputs_of(source: model.Model, samples: int = 8, length: int = 24) -> dict[str, Tensor]:
    """What every weight reads: (samples, length, cols)."""
    module, inputs = source.module(), {}

    def see(name: str, _: torch.nn.Module, args: tuple[Tensor]) -> None:
        inputs[name] = args[0].reshape(samples, length, -1)

    for weight in source.weights:
        if weight.kind != "embedding":
            module.get_submodule(weight.name).register_forward_pre_hook(partial(see, weight.name))
    with torch.inference_mode():
        module(torch.randint(200, (samples, length), generator=torch.Generator().manual_seed(6)))
    return inputs


@pytest.mark.parametrize("name", ["awq", "smoothquant"])
def test_find_all_walks_the_model(name: rewrites.Name, opened: Callable[[str], model.Model]) -> None:
    source = opened("llama")
    seen = inputs_of(source)
    stats = {weight: measured(x) for weight, x in seen.items() if weight != "model.layers.1.mlp.down_proj"}
    fmt = formats.get("int3_g32" if name == "awq" else "int8_channel")
    keep = formats.get("fp32")
    rewrite, rows = rewrites.find_all(source, name, stats, lambda w: keep if "layers.0.mlp" in w else fmt, silent)
    assert len(rows) == 9 and all(row.after <= row.before for row in rows)
    reasons = {row.producer: row.reason for row in rows if row.parameter is None}
    assert reasons["model.layers.1.mlp.up_proj"].startswith("no statistics")
    assert reasons["model.layers.0.mlp.up_proj"] == reasons["model.layers.0.post_attention_layernorm"] == "a reader is kept in float"
    taken = {row.producer for row in rows if row.parameter is not None}
    assert taken and taken == set(rewrite.rows)
    before, after = logits(source), logits(RewrittenModel(source, rewrite))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_channels_of_inputs_that_are_not_rounded_are_left_alone(opened: Callable[[str], model.Model]) -> None:
    """And factors that were found before are taken again where nothing has changed."""
    source = opened("llama")
    stats = {weight: measured(x) for weight, x in inputs_of(source).items()}
    fmt = formats.get("int8_channel")
    every = rewrites.find_all(source, "smoothquant", stats, lambda _: fmt, silent, lambda _: "tensor")
    exempt = "model.layers.0.mlp.down_proj"

    def how(weight: str) -> rewrites.smoothquant.Activations | None:
        return None if weight == exempt else "token" if weight == "model.layers.1.mlp.down_proj" else "tensor"

    some, rows = rewrites.find_all(source, "smoothquant", stats, lambda _: fmt, silent, how, every)
    assert exempt in every[0].columns and exempt not in some.columns
    assert next(row.reason for row in rows if row.consumers == (exempt,)) == "its input is not rounded"
    others = {weight for weight in every[0].columns if how(weight) == "tensor"}
    assert others and all(torch.equal(some.columns[weight], every[0].columns[weight]) for weight in others)
    found = rewrites.find_all(source, "smoothquant", stats, lambda _: fmt, silent, how)[0]
    again = "model.layers.1.mlp.down_proj"
    token, alone = some.columns.get(again), found.columns.get(again)  # by a search, as without those found before
    assert (token is None) == (alone is None) and (token is None or torch.equal(token, alone))
    assert again in every[0].columns and (token is None or not torch.equal(token, every[0].columns[again]))
    before, after = logits(source), logits(RewrittenModel(source, some))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
