"""An artifact in transformers: loaded by its own machinery, computed by the kernels, the same function as the reference runtime's."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from mixtures import EPS, MIXTURES, with_tokenizer
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import auto

from fewbits import artifact, formats, kernels, model, targets
from fewbits.artifact import Artifact
from fewbits.errors import InputError, MissingError
from fewbits.formats.runtime import activations
from fewbits.inference import registration
from fewbits.inference.emulated_kv_cache import EmulatedKVCache
from fewbits.inference.packed_weights import PackedWeight, packed_weights
from fewbits.inference.rounded_inputs import rounding_hook
from fewbits.inference.transformers_loader import FewbitsConfig, FewbitsQuantizer
from fewbits.model import Model, weights
from fewbits.planning import uniform
from fewbits.progress import silent
from fewbits.verification.runtimes import torch as torch_runtime

TOKENS = torch.tensor([[0, 5, 100, 7, 900, 33, 12, 41, 5, 77, 1023, 64, 8, 15]])
EVERY_KIND = ["mlp=q4_k", "q_proj=int8_channel", "k_proj=fp8_e4m3_channel", "v_proj=int3_tensor", "o_proj=keep", "embed_tokens=int6_g32"]
SMALL: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
ARCHITECTURES: dict[str, tuple[str, Any]] = {
    "conv1d": ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=1024, n_positions=64)),
    "scaled embedding": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=16)),
    "biases": ("Qwen2ForCausalLM", transformers.Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)),
    "positions of its own": (
        "OPTForCausalLM",
        transformers.OPTConfig(
            vocab_size=1024, hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96,
            max_position_embeddings=64,
        ),
    ),
    "encoder": ("BertForSequenceClassification", transformers.BertConfig(**SMALL, max_position_embeddings=64)),
    "fused": ("Phi3ForCausalLM", transformers.Phi3Config(**SMALL, num_key_value_heads=2, pad_token_id=0)),
    "mixtral": ("MixtralForCausalLM", MIXTURES["mixtral"][1]),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MIXTURES["qwen3_moe"][1]),
    "transposed experts": ("GptOssForCausalLM", MIXTURES["gpt_oss"][1]),
    "convolution": (
        "ViTForImageClassification",
        transformers.ViTConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96, image_size=16, patch_size=4
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(embedded_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    plan = uniform(embedded_model.weights, targets.get("fewbits"), formats.get("int4_g32"), EVERY_KIND)
    return artifact.quantize(embedded_model, plan, tmp_path_factory.mktemp("mixed") / "a", silent)


@pytest.fixture(scope="module")
def loaded(mixed: Artifact) -> Any:
    return AutoModelForCausalLM.from_pretrained(mixed.path)


def made(source: Model, folder: Path, format: str = "int4_g32", **how: Any) -> Artifact:
    return artifact.quantize(source, uniform(source.weights, targets.get("fewbits"), formats.get(format), **how), folder, silent)


def exactly(module: Any) -> Any:
    for matrix in packed_weights(module):
        matrix.exact = True
    return module


def outputs(module: Any, inputs: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = module(inputs.to(module.dtype) if inputs.is_floating_point() else inputs).logits
    return logits


def same_function(ours: Any, reference: Any, inputs: Tensor = TOKENS) -> None:
    """Both are float32 computations of one function, each a rounding error from what float64 makes of it. The reference's is measured;
    ours sums the same products in another order, so its error is of the same size: twice that for each of the two."""
    reference.set_experts_implementation("eager")  # the fused ones have no float64
    logits, theirs = outputs(ours, inputs), outputs(reference, inputs)
    error = (outputs(copy.deepcopy(reference).double(), inputs) - theirs).abs().max()
    assert logits.dtype == torch.float32 and (logits - theirs).abs().max() <= 4 * error


class TestLoading:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_the_logits_are_those_of_the_decoded_weights(self, name: str, tmp_path: Path) -> None:
        kind, config = ARCHITECTURES[name]
        torch.manual_seed(0)
        theirs: PreTrainedModel = getattr(transformers, kind)(config)
        for parameter in theirs.parameters():  # norms and biases too: what is left out must show
            torch.nn.init.normal_(parameter, std=0.1, mean=float(parameter.dim() == 1))
        theirs.save_pretrained(with_tokenizer(tmp_path))
        packed = made(model.open(tmp_path), tmp_path / "a")
        assert {entry.format for entry in packed.plan.entries} >= {"int4_g32"}
        ours, info = getattr(transformers, kind).from_pretrained(packed.path, output_loading_info=True)
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert len(packed_weights(ours)) == len(packed.weights)
        inputs = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) if name == "convolution" else TOKENS
        same_function(exactly(ours), packed.module(), inputs)

    def test_a_mixed_plan_with_a_tied_embedding(self, mixed: Artifact) -> None:
        ours = AutoModelForCausalLM.from_pretrained(mixed.path, quantization_config=FewbitsConfig(exact=True))
        assert all(matrix.exact for matrix in packed_weights(ours))
        same_function(ours, mixed.module())

    def test_the_output_reads_the_embedding_s_own_parts(self, loaded: Any) -> None:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert not list(loaded.lm_head.parameters()) and not list(loaded.lm_head.buffers())

    def test_no_weight_is_kept_in_float(self, loaded: Any, mixed: Artifact) -> None:
        held = {id(tensor): tensor.nbytes for tensor in [*loaded.parameters(), *loaded.state_dict(keep_vars=True).values()]}
        assert sum(held.values()) == mixed.plan.nbytes + sum(4 * mixed.tensor(name).numel() for name in mixed.rest)

    def test_a_model_in_several_files(self, embedded_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(artifact, "SHARD_BYTES", 1 << 20)
        packed = made(embedded_model, tmp_path / "a", "int8_channel")
        assert len(packed.manifest.shards) > 2
        same_function(exactly(AutoModelForCausalLM.from_pretrained(packed.path)), packed.module())

    def test_the_base_model_alone(self, loaded: Any, mixed: Artifact) -> None:
        base = AutoModel.from_pretrained(mixed.path)
        with torch.inference_mode():
            assert torch.equal(base(TOKENS).last_hidden_state, loaded.model(TOKENS).last_hidden_state)

    def test_it_computes_in_float32_unless_told(self, loaded: Any, mixed: Artifact) -> None:
        assert loaded.dtype == torch.float32
        half = AutoModelForCausalLM.from_pretrained(mixed.path, dtype=torch.bfloat16)
        assert half.model.norm.weight.dtype == torch.bfloat16 and outputs(half).dtype == torch.bfloat16
        for matrix, wide in zip(packed_weights(half), packed_weights(loaded), strict=True):
            assert all(torch.equal(part, wide.parts[name]) for name, part in matrix.parts.items())  # nothing packed was cast

    def test_what_a_model_keeps_in_float32_does_not_widen_scales(self, mixed: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"q_proj"}, raising=False)
        ours = AutoModelForCausalLM.from_pretrained(mixed.path, dtype=torch.bfloat16)
        assert ours.model.layers[0].self_attn.q_proj.scales.dtype == torch.float16
        outputs(ours)

    def test_a_deep_copy_has_parts_of_its_own(self, loaded: Any) -> None:
        copied = copy.deepcopy(loaded)
        assert torch.equal(outputs(copied), outputs(loaded)) and copied.lm_head.weight is copied.model.embed_tokens.weight
        copied.model.embed_tokens.codes.zero_()
        assert not torch.equal(outputs(copied), outputs(loaded))


class TestMatrix:
    @pytest.mark.parametrize("format", formats.all())
    def test_a_lookup_decodes_the_rows_asked_for(self, format: str) -> None:
        matrix, w = packed(format, (40, 256))
        ids = torch.tensor([[3, 39, 3], [0, 17, 21]])
        holder = torch.nn.Embedding(40, 256)
        del holder._parameters["weight"]
        holder.weight = matrix  # type: ignore[assignment]
        assert torch.equal(holder(ids), w[ids])

    @pytest.mark.parametrize("format", ["int4_g32", "q4_k", "fp16", "nvfp4_tensor"])
    @pytest.mark.parametrize("dims", [(256,), (5, 256), (2, 3, 256), (0, 256)])
    def test_products_of_all_kinds(self, format: str, dims: tuple[int, ...]) -> None:
        matrix, w = packed(format, (40, 256))
        x, bias = torch.randn(dims, generator=torch.Generator().manual_seed(1)), torch.randn(40, generator=torch.Generator().manual_seed(2))
        rounding = 2 * 256 * EPS * (x.abs() @ w.abs().T + bias.abs())  # two sums of 256 products and a bias, each off by half of that
        matrix.exact = True
        product = torch.nn.functional.linear(x, matrix, bias)  # type: ignore[arg-type]
        assert product.shape == (*dims[:-1], 40)
        assert ((product - (x @ w.T + bias)).abs() <= rounding).all()
        matrix.exact = False
        # inputs are rounded in runs of 32, by half a step at most: 1/127 of the run's largest
        step = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(*dims[:-1], 8, 32).flatten(-2) / 127
        assert ((torch.nn.functional.linear(x, matrix, bias) - product).abs() <= step / 2 @ w.abs().T * 1.001 + 2 * rounding).all()  # type: ignore[arg-type]

    def test_what_is_neither_product_nor_lookup_gets_decoded_values(self) -> None:
        matrix, w = packed("int4_g32", (40, 256))
        assert torch.equal(torch.add(matrix, 1), w + 1) and torch.equal(matrix.T, w.T) and torch.equal(matrix[3], w[3])  # type: ignore[call-overload]
        assert matrix.shape == w.shape and matrix.size(1) == 256 and matrix.dim() == 2 and matrix.numel() == w.numel()
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
        assert torch.equal(x @ matrix, x @ w)  # the other way round: no product of the kernels

    @pytest.mark.parametrize("format", ["int8_channel", "int4_g32", "int8_channel_asym"])
    @pytest.mark.parametrize("name", [name for name in activations.KNOWN if name != "none"])
    def test_inputs_are_rounded_as_the_plan_says(self, format: str, name: str) -> None:
        matrix, w = packed(format, (40, 256))
        chosen = activations.parse(name)
        assert chosen
        matrix.activation = chosen.calibrated(-2.0, 2.5) if chosen.static else chosen
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
        rounded = activations.quantized(x, matrix.activation)
        assert not torch.equal(rounded, x)
        rounding = 2 * 256 * EPS * (rounded.abs() @ w.abs().T)
        assert ((matrix.product(x) - rounded @ w.T).abs() <= rounding).all()


def packed(format: str, shape: tuple[int, int]) -> tuple[PackedWeight, Tensor]:
    """A matrix that was filled, and what it decodes to."""
    fmt, w = formats.get(format), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    grid = fmt.fit(w)
    parts = kernels.pack(fmt, w if fmt.is_cast else fmt.encode(w, grid), grid)
    holder = torch.nn.Module()
    matrix = PackedWeight(holder, torch.Size(shape), weight=weights.Weight("w", shape, "other", "fp32"), fmt=fmt, dtype=torch.float32)
    for name, part in parts.items():
        setattr(holder, name, part)
    return matrix, kernels.decode(fmt, parts, shape)


class TestGenerating:
    def test_it_continues_as_the_decoded_weights_do(self, mixed: Artifact) -> None:
        ours, reference = exactly(AutoModelForCausalLM.from_pretrained(mixed.path)), mixed.module()
        how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
        assert torch.equal(ours.generate(TOKENS, **how), reference.generate(TOKENS, **how))

    def test_rounding_inputs_on_the_way_costs_little_beside_the_formats(self, loaded: Any, mixed: Artifact, embedded_model: Model) -> None:
        floats, exact, fast = (outputs(each).double().log_softmax(-1) for each in (embedded_model.module(), mixed.module(), loaded))
        of_formats, of_rounding = (float((p.exp() * (p - q)).sum(-1).mean()) for p, q in ((floats, exact), (exact, fast)))
        assert 0 < of_rounding < 0.05 * of_formats

    def test_several_sequences_and_beams(self, loaded: Any) -> None:
        both = loaded.generate(TOKENS.repeat(2, 1), max_new_tokens=4, do_sample=False, num_beams=2)
        assert both.shape == (2, TOKENS.shape[1] + 4) and torch.equal(both[0], both[1])

    def test_a_compiler_sees_one_graph(self, loaded: Any) -> None:
        """A lookup and products: of the whole model it takes seconds, and the rest is transformers'."""

        def some(ids: Tensor) -> Tensor:
            out: Tensor = loaded.model.layers[0].mlp(loaded.model.embed_tokens(ids))
            return out

        with torch.no_grad():
            assert torch.equal(torch.compile(some, backend="eager", fullgraph=True)(TOKENS), some(TOKENS))


class TestRounding:
    def test_activations_of_the_plan_reach_the_modules_that_multiply(self, embedded_model: Model, tmp_path: Path) -> None:
        chosen = activations.parse("int8")
        mine = made(embedded_model, tmp_path / "a", "int8_channel", activation=chosen)
        ours = exactly(AutoModelForCausalLM.from_pretrained(mine.path))
        modules = dict(ours.named_modules())
        readers = torch_runtime.readers(mine.plan, mine.weights)
        assert readers and all(modules[name].weight.activation == chosen for name in readers)
        assert modules["model.embed_tokens"].weight.activation is None and "lm_head" not in readers
        reference = torch_runtime.of_module(mine.module(), readers)
        theirs, logits = reference.logits(TOKENS[0].tolist()), outputs(ours)[0]
        plain = outputs(mine.module())[0]
        # a rounding error of float32 may take a value over the edge of an int8 step here and there: little beside all the rounding
        assert (logits - theirs).norm() < 0.1 * (theirs - plain).norm()

    def test_a_convolution_s_inputs_are_rounded_place_by_place(self, tmp_path: Path) -> None:
        kind, config = ARCHITECTURES["convolution"]
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(with_tokenizer(tmp_path))
        mine = made(model.open(tmp_path), tmp_path / "a", "int8_channel", activation=activations.parse("int8"))
        ours, reference, inputs = exactly(getattr(transformers, kind).from_pretrained(mine.path)), mine.module(), torch.randn(1, 3, 16, 16)
        plain, modules = outputs(reference, inputs), dict(reference.named_modules())
        (convolution,) = (weight.name for weight in mine.weights if weight.kind == "convolution")
        assert mine.plan[convolution].activation
        for name, activation in torch_runtime.readers(mine.plan, mine.weights).items():
            modules[name].register_forward_pre_hook(rounding_hook(activation))
        theirs = outputs(reference, inputs)
        assert (outputs(ours, inputs) - theirs).norm() < 0.1 * (theirs - plain).norm()

    @pytest.mark.parametrize("kv", ["int8", "fp8"])
    def test_the_cache_of_the_plan_is_used(self, kv: str, embedded_model: Model, tmp_path: Path) -> None:
        mine = made(embedded_model, tmp_path / "a", "int8_channel", kv=kv)
        ours = exactly(AutoModelForCausalLM.from_pretrained(mine.path))
        tokens = torch.randint(0, 2048, (1, 80), generator=torch.Generator().manual_seed(0))
        reference = torch_runtime.of_module(mine.module(), kv=kv)
        cache, logits = None, []
        pieces = reference._kv.pieces(tokens[0].tolist())  # type: ignore[attr-defined]
        with torch.inference_mode():
            for piece in pieces:
                out = ours(torch.tensor([piece]), past_key_values=cache)
                cache, logits = out.past_key_values, [*logits, out.logits[0]]
        theirs, plain = reference.logits(tokens[0].tolist()), outputs(mine.module(), tokens)[0]
        assert isinstance(cache, EmulatedKVCache)
        assert (torch.cat(logits) - theirs).norm() < 0.1 * (theirs - plain).norm()
        told = ours.generate(tokens, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
        assert isinstance(told.past_key_values, EmulatedKVCache) and told.past_key_values.get_seq_length() == 119
        assert ours(tokens, use_cache=False).past_key_values is None


class TestRefusing:
    def test_saving_names_what_to_do_instead(self, loaded: Any, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="fewbits export"):
            loaded.save_pretrained(tmp_path / "saved")

    def test_a_cast_of_the_whole_model_is_refused_before_it_computes_nonsense(self, mixed: Artifact) -> None:
        ours = AutoModelForCausalLM.from_pretrained(mixed.path).to(torch.bfloat16)
        with pytest.raises(InputError, match="dtype="):
            outputs(ours)

    def test_another_device(self) -> None:
        """As transformers asks: it needs another package to take a `device_map` at all."""
        ours = FewbitsQuantizer(FewbitsConfig())
        for where in (torch.device("cuda"), "cuda", {"": "cuda:0"}, {"": 0}, {"model": "cpu", "lm_head": "disk"}):
            with pytest.raises(MissingError, match="run on the CPU"):
                ours.validate_environment(device_map=where)
        for where in (None, "auto", "cpu", {"": torch.device("cpu")}):
            ours.validate_environment(device_map=where)
        assert ours.update_device_map("auto") == {"": "cpu"} and ours.update_device_map(None) is None

    def test_a_newer_schema_and_a_folder_that_lost_its_fewbits_json(self, mixed: Artifact, tmp_path: Path) -> None:
        import shutil

        folder = Path(shutil.copytree(mixed.path, tmp_path / "copied"))
        content = json.loads((folder / "fewbits.json").read_text())
        (folder / "fewbits.json").write_text(json.dumps(content | {"schema": "9.0"}))
        with pytest.raises(InputError, match=r"schema 9\.0"):
            AutoModelForCausalLM.from_pretrained(folder)
        (folder / "fewbits.json").unlink()
        with pytest.raises(InputError, match=r"no fewbits\.json"):
            AutoModelForCausalLM.from_pretrained(folder)

    def test_gradients(self, loaded: Any) -> None:
        with pytest.raises(RuntimeError, match="does not require grad"):
            loaded(TOKENS, labels=TOKENS).loss.backward()


class TestRegistering:
    def test_importing_fewbits_loads_nothing_and_importing_transformers_then_registers_it(self) -> None:
        script = (
            "import sys, fewbits\n"
            "assert not {'torch', 'transformers', 'fewbits.inference.transformers_loader'} & sys.modules.keys()\n"
            "from transformers import AutoModelForCausalLM\n"
            "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
            "print(AUTO_QUANTIZER_MAPPING['fewbits'].__name__, [type(f).__name__ for f in sys.meta_path].count('_Waiting'))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "FewbitsQuantizer 0\n", done.stderr

    def test_where_transformers_is_there_already_it_is_registered_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "fewbits")
        monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "fewbits")
        monkeypatch.delitem(sys.modules, "fewbits.inference.transformers_loader")
        monkeypatch.setattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ())
        registration.register_when_imported()
        assert auto.AUTO_QUANTIZER_MAPPING["fewbits"] is importlib.import_module("fewbits.inference.transformers_loader").FewbitsQuantizer
