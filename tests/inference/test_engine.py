"""`fewbits run` and the native decode step, against the same artifact in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits import artifact as artifacts
from fewbits import embedded, formats, kernels, planning, targets
from fewbits import model as models
from fewbits.artifact import Artifact
from fewbits.devices.processor import native, native_missing
from fewbits.errors import InputError
from fewbits.inference import decode_kv_caches, engine, llama, stepped_model
from fewbits.inference.decode_matrices import StoredWeight, decode_matrices
from fewbits.inference.engine import Choice
from fewbits.progress import silent
from fewbits.verification.crosscheck import round_to_int8
from fewbits.verification.runtimes import torch as torch_runtime

pytestmark = pytest.mark.skipif(native_missing() is not None, reason="no native module")
TEXT = "The function returns a new list of the keys in the dictionary, sorted by the values that they had before the call was made."


def _artifact(source: models.Model, name: str, folder: Path, overrides: list[str] | None = None) -> Artifact:
    plan = planning.uniform(source.weights, targets.get("fewbits"), formats.get(name), overrides or (), "rtn", None, None)
    return artifacts.quantize(source, plan, folder, silent)


def _tiny(folder: Path, kind: str, **settings: Any) -> models.Model:
    import transformers

    config_class, model_class = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForCausalLM")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    module = model_class(config_class(**shape, vocab_size=embedded_vocabulary(), max_position_embeddings=256, **settings))
    with torch.no_grad():  # as initialised, biases are zero and norms one: what is forgotten would not be missed
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(4.0 if "embed" not in name else 1.0)
    module.save_pretrained(folder)
    for file in embedded.MODEL.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return models.open(folder)


def embedded_vocabulary() -> int:
    return int(json.loads((embedded.MODEL / "config.json").read_text())["vocab_size"])


def _steps(decoder: llama.LlamaDecoder, tokens: list[int]) -> Tensor:
    return torch.stack([decoder.step(token).clone() for token in tokens])


def _kl(reference: Tensor, logits: Tensor) -> float:
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def source() -> models.Model:
    return models.open(embedded.MODEL)


FAMILIES = {
    "llama": ("Llama", {}),
    "llama, llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "llama, biases, untied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_floats_are_computed_as_torch_does(name: str, tmp_path: Path) -> None:
    """With float32 weights and a cache of float16, which holds keys and values to 2^-11: what they add to the logits is measured by giving
    torch the same rounded cache."""
    kind, settings = FAMILIES[name]
    made = _artifact(_tiny(tmp_path / "float", kind, **settings), "fp32", tmp_path / "packed")
    tokens = [int(t) for t in torch.randint(5, embedded_vocabulary(), (40,), generator=torch.Generator().manual_seed(1))]
    module = made.module()
    with torch.no_grad():
        exact = module.double()(input_ids=torch.tensor([tokens])).logits[0].float()
    rounded = _with_half_cache(module.float(), tokens)
    allowed = 4 * float((rounded - exact).abs().max()) + 64 * 2.0**-24 * float(exact.abs().max())
    decoder = llama.LlamaDecoder(made, "float", 64, silent)
    assert float((decoder.prompt(tokens) - exact).abs().max()) <= allowed
    decoder.forget()
    assert float((_steps(decoder, tokens) - exact).abs().max()) <= allowed
    decoder.forget()
    both = torch.cat([decoder.prompt(tokens[:17]), _steps(decoder, tokens[17:])])
    assert float((both - exact).abs().max()) <= allowed


def _with_half_cache(module: Any, tokens: list[int]) -> Tensor:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Half(DynamicLayer):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)

    cache = DynamicCache()
    cache.layer_class_to_replicate, cache.layers = Half, []
    with torch.no_grad():
        return module(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "int4_g32", "q3_k", "fp8_e4m3_channel", "fp16", "bf16", "nvfp4_tensor"])
def test_packed_weights_differ_by_their_rounded_inputs_alone(name: str, source: models.Model, tmp_path: Path) -> None:
    """What torch loses with inputs rounded to 8 bits in the same runs of 32 explains what these kernels lose; floats and float8 lose
    nothing but the cache's half. KL is quadratic in the error, so who rounds elsewhere is as far off again: a factor of two."""
    made = _artifact(source, name, tmp_path / "packed")
    tokens = made.tokenizer(TEXT * 2)["input_ids"]
    assert len(tokens) > 40
    wanted = torch_runtime.of_module(made.module()).logits(tokens)
    decoder = llama.LlamaDecoder(made, "float", 128, silent)
    integers = formats.get(name).levels is not None and kernels.bind(formats.get(name), (256, 256)).multiplies
    limit = 1e-6 + (2 * _kl(wanted, _with_rounded_inputs(made, tokens)) if integers else 0)
    assert _kl(wanted, decoder.prompt(tokens)) < limit
    decoder.forget()
    assert _kl(wanted, _steps(decoder, tokens)) < limit


def _with_rounded_inputs(made: Artifact, tokens: list[int]) -> Tensor:
    module = made.module()
    for child in module.modules():
        if isinstance(child, torch.nn.Linear):
            child.register_forward_pre_hook(lambda _, inputs: (round_to_int8(inputs[0], 32), *inputs[1:]))
    return torch_runtime.of_module(module).logits(tokens)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_a_packed_cache_is_the_one_that_torch_imitates(kv: str, source: models.Model, tmp_path: Path) -> None:
    """With float weights both compute the same numbers, but for float32's own rounding, which may turn a code of the cache."""
    made = _artifact(source, "fp32", tmp_path / "packed")
    tokens = made.tokenizer(TEXT * 4)["input_ids"][:110]
    assert len(tokens) > 2 * 33
    module = made.module()
    wanted, without = torch_runtime.of_module(module, kv=kv).logits(tokens), torch_runtime.of_module(module).logits(tokens)
    cost = _kl(without, wanted)
    assert cost > 0
    decoder = llama.LlamaDecoder(made, kv, 128, silent)
    assert _kl(wanted, decoder.prompt(tokens)) < cost / 20
    decoder.forget()
    assert _kl(wanted, _steps(decoder, tokens)) < cost / 20


def test_weights_that_share_input_and_format_are_one_matrix() -> None:
    w = torch.randn(48, 64)

    def piece(name: str, rows: int) -> StoredWeight:
        fmt = formats.get(name)
        from fewbits import methods

        return StoredWeight(name, methods.get("rtn").quantize(w[:rows], fmt).parts, (rows, 64))

    assert [m.shape[0] for m in decode_matrices([piece("q8_0", 32), piece("q8_0", 16), piece("q8_0", 16)])] == [64]
    assert [m.shape[0] for m in decode_matrices([piece("q8_0", 32), piece("q4_0", 16), piece("q8_0", 16)])] == [32, 16, 16]
    assert [m.shape[0] for m in decode_matrices([piece("q8_0", 24), piece("q8_0", 24)])] == [24, 24]  # no whole stripes
    assert [m.shape[0] for m in decode_matrices([piece("int8_tensor", 32), piece("int8_tensor", 32)])] == [32, 32]  # a scale each
    joined = decode_matrices([piece("q8_0", 32), piece("q8_0", 16)])[0]
    x = torch.randn(3, 64)
    apart = [matrix.matmul(x) for p in (piece("q8_0", 32), piece("q8_0", 16)) for matrix in decode_matrices([p])]
    assert torch.equal(joined.matmul(x), torch.cat(apart, dim=1))


def test_a_cache_of_halves_reads_what_was_written() -> None:
    cache = decode_kv_caches.HalfCache(2, 3, 8, 40)
    keys, values = torch.randn(3, 37, 8), torch.randn(3, 37, 8)
    cache.append(1, 0, keys[:, :20], values[:, :20])
    cache.append(1, 20, keys[:, 20:], values[:, 20:])
    read_keys, read_values = cache.read(1, 37)
    assert torch.equal(read_keys, keys.half().float()) and torch.equal(read_values, values.half().float())


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_decodes_the_same(threads: int, source: models.Model, tmp_path: Path) -> None:
    made = _artifact(source, "q4_0", tmp_path / "packed")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _steps(llama.LlamaDecoder(made, "float", 32, silent), [5, 6, 7, 8])
        torch.set_num_threads(threads)
        assert torch.equal(_steps(llama.LlamaDecoder(made, "float", 32, silent), [5, 6, 7, 8]), alone)
    finally:
        torch.set_num_threads(before)


def test_arrays_of_another_model_are_refused(source: models.Model, tmp_path: Path) -> None:
    decoder = llama.LlamaDecoder(_artifact(source, "q8_0", tmp_path / "packed"), "float", 16, silent)
    with pytest.raises(InputError, match="outgrown the context of 16"):
        decoder.prompt([5] * 17)
    with pytest.raises(InputError, match="no token 1000000"):
        decoder.step(1000000)
    empty = native().Decoder(64, 4, 2, 16, 96, 1e-5)
    norm = torch.ones(64).numpy()
    with pytest.raises(ValueError, match="other rows than the model"):
        empty.add_layer(norm, None, None, [], [], norm, [], [])
    with pytest.raises(ValueError, match="multiple"):
        native().Decoder(64, 3, 2, 16, 96, 1e-5)
    matrix = ("float32", "", 128, [torch.zeros(128, 63).view(torch.uint8).numpy()], None)
    with pytest.raises(ValueError, match="row of bytes"):
        empty.add_layer(norm, None, None, [matrix], [], norm, [], [])


class TestRun:
    def test_native_and_transformers_write_the_same_text(self, source: models.Model, tmp_path: Path, monkeypatch: Any) -> None:
        made = _artifact(source, "fp32", tmp_path / "packed")
        native_text = engine.run(made.path, "Return the", max_tokens=24)
        assert native_text.stats.engine == "native" and native_text.stats.new_tokens == len(native_text.tokens) > 0
        monkeypatch.setattr(llama, "unsupported", lambda *_: "it was told so")
        other = engine.run(made.path, "Return the", max_tokens=24)
        assert other.stats.engine == "transformers: it was told so"
        assert other.tokens == native_text.tokens and other.text == native_text.text

    def test_what_the_native_step_does_not_know_runs_through_transformers(self, tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=embedded_vocabulary(), n_positions=64, n_embd=64, n_layer=2, n_head=4)).save_pretrained(
            tmp_path / "f"
        )
        for file in embedded.MODEL.glob("tokenizer*"):
            (tmp_path / "f" / file.name).write_bytes(file.read_bytes())
        made = _artifact(models.open(tmp_path / "f"), "q8_0", tmp_path / "packed")
        generated = engine.run(made.path, "Return the", max_tokens=5)
        assert generated.stats.engine.startswith("transformers: `gpt2`") and generated.stats.weight_bytes > 0 and generated.stats.kernels

    def test_sampling_follows_its_seed(self, source: models.Model, tmp_path: Path) -> None:
        made = _artifact(source, "q8_0", tmp_path / "packed")
        texts = [engine.run(made.path, "Return the", max_tokens=12, temperature=1.5, top_p=0.9, seed=seed).tokens for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        with pytest.raises(InputError, match="top-p"):
            Choice(0.5, 0.0)

    def test_top_p_leaves_out_the_unlikely(self) -> None:
        logits = torch.tensor([0.6, 0.3, 0.1]).log()
        generator = torch.Generator().manual_seed(0)
        assert {stepped_model.next_token(logits, Choice(1.0, 0.5), generator) for _ in range(50)} == {0}
        assert {stepped_model.next_token(logits, Choice(1.0, 0.7), generator) for _ in range(50)} == {0, 1}

    def test_text_is_shown_as_it_grows(self, source: models.Model, tmp_path: Path) -> None:
        made, shown = _artifact(source, "q8_0", tmp_path / "packed"), []
        generated = engine.run(made.path, "Return the", max_tokens=12, on_text=shown.append)
        assert "".join(shown) == generated.text and len(shown) > 1

    def test_command_line(self, run: Any, source: models.Model, tmp_path: Path) -> None:
        made = _artifact(source, "q4_0", tmp_path / "packed")
        code, out, err = run("run", made.path, "Return the", "-n", "8", "--stats")
        assert code == 0 and out.strip() and "tokens/s" in err and "native-" in err
        code, out, _ = run("run", made.path, "Return the", "-n", "8", "--kv", "int8", "--json")
        result = json.loads(out)
        assert code == 0 and result["stats"]["new_tokens"] == 8 and result["stopped"] == "length"
        code, _, err = run("run", tmp_path, "hello")
        assert code == 2 and "fewbits.json" in err


def test_bench_decode_compares_with_llama_cpp(run: Any, source: models.Model, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    made = _artifact(source, "q8_0", tmp_path / "packed")
    words = ("bench", "decode", "--artifact", made.path, "--prompt", "16", "--threads", "1", "--rounds", "2", "--peers", "--json")
    code, out, err = run(*words)
    assert code == 0, err
    phases = {(row["name"], row["contender"]): row for row in json.loads(out)["phases"]}
    assert set(phases) == {(name, by) for name in ("one token", "prompt") for by in ("fewbits", "llama.cpp")}
    assert phases["one token", "llama.cpp"]["speedup"]["median"] > 0 and phases["one token", "fewbits"]["speedup"] is None
