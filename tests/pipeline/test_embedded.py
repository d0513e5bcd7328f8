from __future__ import annotations

import re

import pytest
import torch

from fewbits import demonstration, embedded, model
from fewbits.artifact import quantize
from fewbits.calibration.text import windows
from fewbits.embedded import smollm2
from fewbits.formats import get
from fewbits.planning import uniform
from fewbits.progress import silent
from fewbits.targets import get as target
from fewbits.targets.export import export
from fewbits.verification import crosscheck, runtimes


def test_it_is_small_enough_to_ship() -> None:
    folder = embedded.MODEL.parent
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc") < 8_000_000


def test_every_column_count_takes_a_k_quant(embedded_model: model.Model) -> None:
    assert all(w.shape[1] % 256 == 0 and w.dtype == "fp16" for w in embedded_model.weights)


def test_the_held_out_text_was_learnt_from_others_like_it(embedded_model: model.Model) -> None:
    """The model card's bits per byte, measured again on the verification slice."""
    text = embedded.verification_text()
    cut = windows.windows(text, embedded_model.tokenizer, 512)
    module = embedded_model.module()
    nll = 0.0
    with torch.inference_mode():
        for window in cut[::8]:
            ids = torch.tensor([window])
            nll += float(torch.nn.functional.cross_entropy(module(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    read = sum(len(embedded_model.tokenizer.decode(w[1:]).encode()) for w in cut[::8])
    bits = nll / 0.6931471805599453 / read
    card = (embedded.MODEL / "README.md").read_text()
    stated = float(re.search(r"\| verification \|[^|]*\|[^|]*\| ([\d.]+) \|", card)[1])
    assert stated < 1.9
    assert bits == pytest.approx(stated, rel=0.05)  # every eighth window only


def test_calibration_and_verification_text_are_different_texts() -> None:
    def lines(text: str) -> set[str]:
        return {line.strip() for line in text.splitlines() if len(line.strip()) > 60}

    shared = lines(embedded.calibration_text()) & lines(embedded.verification_text())
    assert len(shared) < 0.02 * len(lines(embedded.verification_text()))  # sibling modules say the same thing in a few lines


def test_the_demo_plans_writes_and_judges_in_both_runtimes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of its eleven rows."""
    monkeypatch.setattr(demonstration, "_ROWS", ((None, "gguf"), (None, "onnx"), ("q4_k", "gguf"), ("4.5bpw", "gguf")))
    result = demonstration.demo(tmp_path, tokens=1022)
    assert result.passed and not result.skipped and (tmp_path / "report.html").is_file()
    assert {row.verdict.runtime for row in result.rows} == {"llama.cpp", "onnxruntime"}
    kl = {row.format: row.verdict.kl_mean for row in result.rows if row.target == "gguf"}
    assert kl["float"] < kl["4.5bpw"] < 0.7 * kl["q4_k"]


@pytest.mark.slow
def test_the_demo_runs_every_file_in_its_runtime_and_passes(tmp_path) -> None:
    result = demonstration.demo(tmp_path, tokens=2044)
    rows = {(r.format, r.verdict.runtime): r for r in result.rows}
    assert result.passed and not result.skipped and (tmp_path / "report.html").is_file()
    assert {runtime for _, runtime in rows} == {"llama.cpp", "onnxruntime"}
    planned = {"5bpw", "4.5bpw", "3.4375bpw"}
    assert {fmt for fmt, _ in rows} == {"float", "q8_0", "int8_channel", "q4_k", "int4_g32", "q3_k"} | planned
    assert all((tmp_path / r.file).stat().st_size == r.verdict.bytes for r in result.rows)
    kl = {name: r.verdict.kl_mean for (name, runtime), r in rows.items() if runtime == "llama.cpp"}
    assert kl["float"] < kl["q8_0"] < kl["q4_k"] < kl["int4_g32"] < kl["q3_k"]
    # for the same bytes a plan is far better than one format for all
    assert kl["4.5bpw"] < 0.6 * kl["q4_k"] and kl["3.4375bpw"] < 0.7 * kl["q3_k"]
    onnx = {name: r.verdict for (name, runtime), r in rows.items() if runtime == "onnxruntime"}
    assert onnx["5bpw"].kl_mean < 0.6 * onnx["int4_g32"].kl_mean and onnx["5bpw"].bits_per_weight <= onnx["int4_g32"].bits_per_weight


def test_a_file_that_is_not_what_it_says_fails_the_cross_check(embedded_model: model.Model, tmp_path) -> None:
    """The MLPs in another format of the same size: KL to float alone would hardly show it."""
    plan = uniform(embedded_model.weights, target("gguf"), get("q4_k"))
    made = quantize(embedded_model, plan, tmp_path / "a", silent)
    other_plan = uniform(embedded_model.weights, target("gguf"), get("q4_k"), ["mlp=q4_0"])
    other = export(quantize(embedded_model, other_plan, tmp_path / "b", silent), tmp_path / "b.gguf", to="gguf")
    honest = export(made, tmp_path / "a.gguf", to="gguf")
    cut = windows.windows(embedded.verification_text(), embedded_model.tokenizer, 256, 1000)
    judge = runtimes.get("llama.cpp")
    for path, agrees in ((honest, True), (other, False)):
        session = judge.open(path, 256)
        assert crosscheck.crosscheck(made, target("gguf"), session, cut, floor=1e-7).agrees is agrees
        session.close()


def test_taking_smollm2_off_its_grid_leaves_the_function_as_it_is() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
    )  # fmt: skip
    module = LlamaForCausalLM(config).eval().double()
    ids = torch.arange(40)[None]
    before = module(ids).logits
    tensors = {k: v.clone().float() for k, v in module.state_dict().items()}
    smollm2.rescale_channels(tensors, config)
    changed = [k for k, v in tensors.items() if not torch.equal(v, module.state_dict()[k].float())]
    assert len(changed) == 2 * 9  # every linear and norm of both layers
    module.load_state_dict({k: v.double() for k, v in tensors.items()})
    # factors are rounded to float32 on each side: 2^-23 of relative error per product, grown by two layers
    assert (module(ids).logits - before).abs().max() < 1e-5 * before.abs().max()


def test_the_noise_on_the_embedding_is_at_most_half_a_step() -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    step = w.reshape(-1, 32).abs().amax(-1, keepdim=True) / 127
    moved = (smollm2.add_half_a_step(w) - w).reshape(-1, 32) / step
    assert 0.45 < moved.abs().max() <= 0.5001
