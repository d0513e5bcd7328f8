from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from fewbits import embedded, model
from fewbits.artifact import Artifact, quantize
from fewbits.errors import InputError, MissingError
from fewbits.formats import get
from fewbits.model import checkpoints
from fewbits.planning import uniform
from fewbits.progress import silent
from fewbits.targets import get as target

TOKENS = torch.tensor([[0, 5, 100, 7, 900, 33, 12]])


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return module(TOKENS).logits


def test_every_parameter_is_a_weight_or_kept(embedded_model: model.Model) -> None:
    stored = set(embedded_model.checkpoint.names())
    assert {f"{w.name}.weight" for w in embedded_model.weights} | set(embedded_model.rest) == stored
    kinds = {w.kind for w in embedded_model.weights}
    assert kinds == {"embedding", "attention", "mlp"}
    assert embedded_model.weights[0].tied_to == "lm_head"


def test_the_reference_is_what_transformers_loads(embedded_model: model.Model) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32).eval()
    assert torch.equal(logits(embedded_model.module()), logits(theirs))


def test_a_sharded_checkpoint_is_the_same_model(embedded_model: model.Model, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(embedded.MODEL).save_pretrained(tmp_path, max_shard_size="2MB")
    shutil.copyfile(embedded.MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharded = model.open(tmp_path)
    assert sharded.weights == embedded_model.weights
    assert "model.safetensors.index.json" in {file.name for file in sharded.checkpoint.files()}  # its hash is the model's too
    assert torch.equal(logits(sharded.module()), logits(embedded_model.module()))


def test_conv1d_is_seen_as_outputs_by_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=1024, n_positions=64)).eval()
    theirs.save_pretrained(tmp_path)
    ours = model.open(tmp_path)
    attention = next(w for w in ours.weights if w.name.endswith("c_attn"))
    assert attention.transposed and attention.shape == (192, 64)
    assert torch.equal(ours.load(attention), theirs.transformer.h[0].attn.c_attn.weight.T)
    assert torch.equal(logits(ours.module()), logits(theirs))


def test_a_bias_with_two_names_is_looked_for_once(tmp_path: Path) -> None:
    """BERT's masked-word head calls one vector `predictions.bias` and `predictions.decoder.bias`; a checkpoint holds the first."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=16)).save_pretrained(tmp_path)
    opened = model.open(tmp_path)
    assert "cls.predictions.bias" in opened.rest and "cls.predictions.decoder.bias" not in opened.rest
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(opened.module()(ids).logits, BertForMaskedLM.from_pretrained(tmp_path)(ids).logits)


def test_a_checkpoint_without_the_base_prefix_opens(tmp_path: Path) -> None:
    """Older GPT-2 files say `h.0.attn`, not `transformer.h.0.attn`."""
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=1024, n_positions=64)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    assert any(w.name == "transformer.h.0.mlp.c_fc" for w in model.open(tmp_path).weights)


def test_an_artifact_gives_back_what_was_quantized(embedded_model: model.Model, tmp_path: Path) -> None:
    plan = uniform(embedded_model.weights, target("gguf"), get("q4_k"), ["o_proj=keep"])
    made = quantize(embedded_model, plan, tmp_path / "a", silent)
    opened = Artifact(tmp_path / "a")
    assert opened.plan == made.plan and opened.provenance.sha256 == embedded_model.fingerprint
    for weight in opened.weights:
        w = embedded_model.load(weight)
        error = ((opened.decoded(weight) - w).norm() / w.norm()).item()
        assert error == 0 if weight.name.endswith("o_proj") else 0.02 < error < 0.12
    for name in opened.rest:
        assert torch.equal(opened.tensor(name), embedded_model.tensor(name))


def test_the_same_input_gives_the_same_bytes(embedded_model: model.Model, tmp_path: Path) -> None:
    plan = uniform(embedded_model.weights, target("gguf"), get("q3_k"))
    for name in ("a", "b"):
        quantize(embedded_model, plan, tmp_path / name, silent)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "fewbits.json").write_text("{"),
        lambda folder: (folder / "fewbits.json").write_text("{}"),
        lambda folder: (folder / "fewbits.json").write_text(json.dumps(json.loads((folder / "fewbits.json").read_text()) | {"schema": 99})),
        lambda folder: (folder / "plan.json").write_text("{}"),
        lambda folder: (folder / "weights-00001.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "weights-00001.safetensors").unlink(),
    ],
)
def test_a_damaged_artifact_is_refused(damage, embedded_model: model.Model, tmp_path: Path) -> None:
    plan = uniform(embedded_model.weights, target("gguf"), get("q8_0"))
    quantize(embedded_model, plan, tmp_path / "a", silent)
    damage(tmp_path / "a")
    with pytest.raises(InputError):
        opened = Artifact(tmp_path / "a")
        opened.decoded(opened.weights[0])


def test_a_hub_id_that_is_not_cached_is_not_fetched_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MissingError, match="--offline"):
        checkpoints.open("fewbits/no-such-model", offline=True)


def test_a_hub_id_opens_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def cached(repo: str, **settings: object) -> str:
        asked.append((repo, settings["local_files_only"]))
        return str(embedded.MODEL)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert checkpoints.open("someone/some-model").path == embedded.MODEL
    assert asked == [("someone/some-model", True)]
