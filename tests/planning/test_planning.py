from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fewbits import formats, planning, targets
from fewbits.errors import InputError
from fewbits.formats.runtime.activations import Activation
from fewbits.model.weights import Weight

GGUF = "gguf"
WEIGHTS = [
    Weight("model.embed_tokens", (512, 256), "embedding", "fp16", tied_to="lm_head"),
    Weight("model.layers.0.self_attn.q_proj", (256, 256), "attention", "fp16"),
    Weight("model.layers.0.mlp.down_proj", (256, 768), "mlp", "fp16"),
    Weight("model.layers.0.mlp.odd", (64, 172), "mlp", "fp32"),
    Weight("model.layers.0.mlp.narrow", (64, 64), "mlp", "fp32"),
]


def plan(name: str, *overrides: str) -> planning.Plan:
    return planning.uniform(WEIGHTS, targets.get(GGUF), formats.get(name), overrides)


def test_every_weight_is_in_the_plan_with_a_reason() -> None:
    made = plan("q4_k")
    assert [e.weight for e in made.entries] == [w.name for w in WEIGHTS]
    assert all(e.reason for e in made.entries)


def test_a_weight_that_does_not_fit_gets_the_next_format_and_the_reason() -> None:
    made = plan("q4_k")
    narrow, odd = made["model.layers.0.mlp.narrow"], made["model.layers.0.mlp.odd"]
    assert narrow.format == "q4_0" and narrow.fallback
    assert "64 columns do not divide into q4_k's blocks of 256" in narrow.reason
    assert odd.format == "fp16"  # 172 columns: no block of 32 either
    assert {e.weight for e in made.fallbacks} == {narrow.weight, odd.weight}


def test_a_fallback_never_has_fewer_bits_than_what_was_asked_for() -> None:
    for fmt in formats.all().values():
        asked = fmt.bits_per_weight((256, 256))
        for entry in plan(fmt.name).fallbacks:
            assert formats.get(entry.format).bits_per_weight((256, 256)) >= asked


def test_the_last_override_that_matches_wins() -> None:
    made = plan("q4_k", "layers=q8_0", "self_attn=keep")
    assert made["model.layers.0.mlp.down_proj"].format == "q8_0"
    assert made["model.layers.0.self_attn.q_proj"].format == "fp16"
    assert made["model.layers.0.self_attn.q_proj"].reason == "--override self_attn=keep"
    assert made["model.embed_tokens"].format == "q4_k"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q4_k", "not of the form"),
        ("(=q4_k", "not a regular expression"),
        ("nothing=q4_k", "matches no weight"),
        ("mlp=q4_z", "no format is named"),
    ],
)
def test_a_wrong_override_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan("q8_0", text)


def test_a_plan_survives_json() -> None:
    made = plan("q4_k", "down_proj=q8_0")
    back = planning.read(made.to_json(), WEIGHTS)
    assert [(e.weight, e.format, e.method, e.reason, e.nbytes) for e in back.entries] == [
        (e.weight, e.format, e.method, e.reason, e.nbytes) for e in made.entries
    ]


def test_a_plan_edited_by_hand_is_priced_anew() -> None:
    text = json.loads(plan("q4_k").to_json())
    text["weights"]["model.layers.0.mlp.down_proj"]["format"] = "q8_0"
    made = planning.read(json.dumps(text), WEIGHTS, targets.get("gguf"))
    assert made["model.layers.0.mlp.down_proj"].nbytes == 256 * 768 // 32 * 34
    assert made.nbytes > plan("q4_k").nbytes


def rounded_plan() -> planning.Plan:
    overrides = ["q_proj=keep"]
    return planning.uniform(
        WEIGHTS, targets.get("fewbits"), formats.get("int8_channel"), overrides, activation=Activation("int8"), kv="INT4"
    )


def test_activations_are_for_every_quantized_matmul_but_the_output() -> None:
    made = rounded_plan()
    assert made.kv == "int4"
    assert set(made.activations) == {w.name for w in WEIGHTS} - {"model.embed_tokens", "model.layers.0.self_attn.q_proj"}
    untied = [Weight("lm_head", (512, 256), "output", "fp16"), WEIGHTS[2]]
    made = planning.uniform(untied, targets.get("fewbits"), formats.get("int8_channel"), activation=Activation("int8"))
    assert set(made.activations) == {WEIGHTS[2].name}


def test_activations_and_cache_survive_json() -> None:
    made = rounded_plan()
    static = Activation("int8", static=True, range="mse").calibrated(-1.0, 3.0)
    made = planning.with_activations(made, {WEIGHTS[2].name: static})
    assert made[WEIGHTS[2].name].activation == static and made[WEIGHTS[3].name].activation == Activation("int8")
    assert planning.read(made.to_json(), WEIGHTS) == made


def test_a_plan_without_them_is_written_as_before() -> None:
    content = json.loads(plan("q8_0").to_json())
    assert "kv" not in content and all("activation" not in row for row in content["weights"].values())
    back = planning.read(json.dumps(content), WEIGHTS)
    assert back.kv is None and back.activations == {}


@pytest.mark.parametrize("target", ["gguf", "onnx"])
def test_a_target_that_cannot_say_so_refuses_activations_and_cache(target: str) -> None:
    with pytest.raises(InputError, match="does not round the input of") as refused:
        planning.uniform(WEIGHTS[1:3], targets.get(target), formats.get("int8_channel"), activation=Activation("int8"))
    assert "--to fewbits" in refused.value.hint
    with pytest.raises(InputError, match="cannot say that the KV cache is int8"):
        planning.uniform(WEIGHTS[1:3], targets.get(target), formats.get("int8_channel"), kv="int8")
    with pytest.raises(InputError, match="does not round the input of"):
        planning.checked(replace(rounded_plan(), kv=None), WEIGHTS, targets.get(target))


def edited_rounded(change) -> str:
    text = json.loads(rounded_plan().to_json())
    change(text)
    return json.dumps(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited_rounded(lambda t: t.update(kv="int5")), "no KV cache format is named `int5`"),
        (edited_rounded(lambda t: t["weights"]["model.layers.0.mlp.odd"].update(activation="int8")), "no activation"),
        (edited_rounded(lambda t: t["weights"]["model.layers.0.mlp.odd"].update(activation={"format": "int9"})), "int9"),
        (edited_rounded(lambda t: t["weights"]["model.layers.0.mlp.odd"]["activation"].update(scale=1.0)), "dynamic"),
    ],
)
def test_a_plan_with_a_wrong_activation_or_cache_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planning.read(text, WEIGHTS)


def test_an_embedding_that_nothing_multiplies_has_no_activation() -> None:
    alone = Weight("wte", (512, 256), "embedding", "fp16")
    made = planning.uniform([alone], targets.get("fewbits"), formats.get("int8_channel"))
    with pytest.raises(InputError, match="looked up, not multiplied"):
        planning.read(planning.with_activations(made, {"wte": Activation("int8")}).to_json(), [alone])


def edited(change) -> str:
    text = json.loads(plan("q4_k").to_json())
    change(text)
    return json.dumps(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a plan"),
        ("[]", "not a plan"),
        ('{"schema": 1}', "not a plan"),
        (edited(lambda t: t.update(schema=2)), "schema 2"),
        (edited(lambda t: t["weights"].pop("model.embed_tokens")), "leaves out `model.embed_tokens`"),
        (edited(lambda t: t["weights"].update(other={"format": "q4_k"})), "names `other`"),
        (edited(lambda t: t["weights"]["model.layers.0.mlp.odd"].update(format="q4_k")), "do not divide"),
        (edited(lambda t: t["weights"]["model.embed_tokens"].update(format="q3_s6")), "q3_s6"),
    ],
)
def test_a_wrong_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planning.read(text, WEIGHTS, targets.get("gguf"))


@pytest.mark.parametrize("words", [["--help"], ["formats"], ["quantize", "--help"]])
def test_verbs_without_weights_load_no_torch(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['fewbits', *{words!r}]\nfrom fewbits import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("target", targets.all().values(), ids=lambda target: target.name)
def test_a_target_carries_every_format_that_plans_choose_from(target: targets.Target) -> None:
    """For a weight of one type or the other: MLX has scales in the type of the model."""
    weights = [Weight("any", (512, 512), "mlp", dtype) for dtype in ("fp16", "bf16")]
    assert len(target.candidates) >= 8
    refused = [name for name in target.candidates if all(planning.refuses(weight, target, formats.get(name)) for weight in weights)]
    assert not refused
