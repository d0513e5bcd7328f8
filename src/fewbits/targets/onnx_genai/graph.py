"""The graph of one step: new tokens and the KV cache before them go in, logits and the cache after them come out.

    input_ids                [batch, sequence]          attention_mask  [batch, past + sequence], ones for what counts
    past_key_values.N.key    [batch, heads, past, width], and .value; the outputs present.N.key and .value hold the new ones too
    logits                   [batch, sequence, vocabulary]

A prompt is a step with an empty cache. Operators are those that ONNX Runtime has made for decoders; each node is named by the module
that it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from fewbits.artifact import manifest
from fewbits.errors import InputError
from fewbits.targets.onnx_genai.data import table

if TYPE_CHECKING:
    from fewbits.artifact import Artifact
    from fewbits.artifact.draft import Draft
    from fewbits.model.onnx.external_data import Array
    from fewbits.targets.onnx.storage import Store
    from fewbits.targets.onnx_genai.families import Decoder

_OPSET, _IR_VERSION = 20, 10  # the oldest that have all that is used: newer ones only keep older runtimes out
_MICROSOFT = "com.microsoft"


def build(artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder, placed: Mapping[str, Array], level: int) -> Any:
    """The whole ModelProto; the values of its initializers are in the data file."""
    drawn = _Drawing(artifact, stores, decoder, placed)
    drawn.model()
    if lost := placed.keys() - drawn.read:
        raise InputError(
            f"`{sorted(lost)[0]}` has no place in the graph of {decoder.family.model_type}", "is it a model of another architecture?"
        )
    graph = helper.make_graph(
        drawn.nodes,
        decoder.family.model_type,
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *_cache(decoder, "past_key_values", "past"),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", decoder.vocabulary]),
            *_cache(decoder, "present", "total"),
        ],
        [*drawn.constants.values(), *(array.initializer() for array in placed.values())],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)]
    about = artifact.provenance
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="fewbits", producer_version=about.fewbits)
    described = manifest.graph_metadata(about, artifact.plan) | {"fewbits.accuracy_level": str(level)}
    helper.set_model_props(model, described)
    return model


def _cache(decoder: Decoder, names: str, length: str) -> list[Any]:
    shape = ["batch", decoder.kv_heads, length, decoder.head_size]
    ends = [f"{names}.{layer}.{what}" for layer in range(decoder.layers) for what in ("key", "value")]
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ends]


class _Drawing:
    def __init__(self, artifact: Artifact | Draft, stores: Mapping[str, Store], decoder: Decoder, placed: Mapping[str, Array]) -> None:
        self.decoder, self._stores, self._placed = decoder, stores, placed
        self._holder = {name: weight.name for weight in artifact.weights for name in (weight.name, weight.tied_to) if name}
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.read: set[str] = set()  # the arrays that nodes read: none may be left over

    def model(self) -> None:
        decoder, names = self.decoder, self.decoder.family.norms
        lengths = self._lengths()
        x = self._embedding("model.embed_tokens", "input_ids")
        if decoder.family.scaled_embedding:
            x = self._node("Mul", "model.embed_tokens", x, self._constant("embedding_scale", np.float32(decoder.hidden**0.5)))
        y: str | None = None  # the output of the last half of a layer, not yet added to x
        for i in range(decoder.layers):
            layer = f"model.layers.{i}"
            normed, x = self._added(f"{layer}.{names.before_attention}", x, y)
            y = self._attention(i, normed, lengths)
            if names.after_attention:
                y = self._norm(f"{layer}.{names.after_attention}", y)
            normed, x = self._added(f"{layer}.{names.before_mlp}", x, y)
            y = self._mlp(f"{layer}.mlp", normed)
            if names.after_mlp:
                y = self._norm(f"{layer}.{names.after_mlp}", y)
        normed, _ = self._added("model.norm", x, y)
        logits = self._linear("lm_head", normed)
        if decoder.logit_softcap:
            cap = self._constant("logit_softcap", np.float32(decoder.logit_softcap))
            logits = self._node("Mul", "logits", self._node("Tanh", "logits", self._node("Div", "logits", logits, cap)), cap)
        self._node("Identity", "logits", logits, outputs=("logits",))

    def _lengths(self) -> tuple[str, str]:
        """What attention needs of the mask: the position of each sequence's last token, and the length of the longest."""
        one = self._constant("one", np.array([1], np.int64))
        counted = self._node("ReduceSum", "lengths", "attention_mask", one, keepdims=0)
        last = self._node("Cast", "lengths.last", self._node("Sub", "lengths", counted, one), to=TensorProto.INT32)
        total = self._node("Shape", "lengths", "attention_mask", start=1, end=2)
        longest = self._node("Squeeze", "lengths", total)
        return last, self._node("Cast", "lengths.longest", longest, to=TensorProto.INT32)

    def _attention(self, i: int, x: str, lengths: tuple[str, str]) -> str:
        decoder, name = self.decoder, f"model.layers.{i}.self_attn"
        if f"{name}.qkv_proj" in self._holder:  # one matrix for the three: the operator takes them together
            qkv = [self._linear(f"{name}.qkv_proj", x), "", ""]
        else:
            qkv = [self._linear(f"{name}.{part}_proj", x) for part in "qkv"]
            for place, (part, heads) in enumerate((("q", decoder.heads), ("k", decoder.kv_heads))):
                if f"{name}.{part}_norm.weight" in self._placed:
                    qkv[place] = self._norm_of_heads(f"{name}.{part}_norm", qkv[place], heads)
        rope = decoder.ropes[i]
        tables = [] if rope is None else [self._array(table(part, rope)) for part in ("cos", "sin")]
        past = [f"past_key_values.{i}.{what}" for what in ("key", "value")]
        attributes: dict[str, Any] = {"num_heads": decoder.heads, "kv_num_heads": decoder.kv_heads, "scale": decoder.scale}
        attributes["do_rotary"] = int(rope is not None)
        if decoder.windows[i] > 0:
            attributes["local_window_size"] = decoder.windows[i]
        if decoder.attention_softcap:
            attributes["softcap"] = decoder.attention_softcap
        out = f"{name}/GroupQueryAttention"
        outputs = (out, f"present.{i}.key", f"present.{i}.value")
        self._node("GroupQueryAttention", name, *qkv, *past, *lengths, *tables, outputs=outputs, domain=_MICROSOFT, **attributes)
        return self._linear(f"{name}.o_proj", out)

    def _mlp(self, name: str, x: str) -> str:
        if f"{name}.gate_up_proj" in self._holder:
            gate, up = f"{name}/gate", f"{name}/up"
            self._node("Split", name, self._linear(f"{name}.gate_up_proj", x), outputs=(gate, up), axis=-1, num_outputs=2)
        else:
            gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        if self.decoder.family.activation == "silu":
            gate = self._node("Mul", f"{name}.act_fn", gate, self._node("Sigmoid", f"{name}.act_fn", gate))
        else:
            gate = self._node("Gelu", f"{name}.act_fn", gate, approximate="tanh")
        return self._linear(f"{name}.down_proj", self._node("Mul", name, gate, up))

    def _added(self, norm: str, x: str, y: str | None) -> tuple[str, str]:
        """The norm of x + y, and x + y itself."""
        if y is None:
            return self._norm(norm, x), x
        normed, total = f"{norm}/normed", f"{norm}/sum"
        weight, epsilon = self._array(f"{norm}.weight"), self.decoder.epsilon
        outputs = (normed, "", "", total)
        self._node("SkipSimplifiedLayerNormalization", norm, x, y, weight, outputs=outputs, domain=_MICROSOFT, epsilon=epsilon)
        return normed, total

    def _norm(self, name: str, x: str) -> str:
        return self._node("SimplifiedLayerNormalization", name, x, self._array(f"{name}.weight"), axis=-1, epsilon=self.decoder.epsilon)

    def _norm_of_heads(self, name: str, x: str, heads: int) -> str:
        width = self.decoder.head_size
        apart = self._constant(f"{heads}_heads", np.array([0, 0, heads, width], np.int64))
        together = self._constant(f"{heads}_heads_together", np.array([0, 0, heads * width], np.int64))
        return self._node("Reshape", f"{name}.together", self._norm(name, self._node("Reshape", f"{name}.apart", x, apart)), together)

    def _linear(self, name: str, x: str) -> str:  # (..., cols) -> (..., rows)
        holder = self._holder[name]
        store = self._stores[holder]
        if store.blocks is None:
            values = self._array(f"{holder}.values")
            if store.specs()["values"].dtype != "float32":
                values = self._node("Cast", name, values, to=TensorProto.FLOAT)
            y = self._node("MatMul", name, x, self._node("Transpose", name, values, perm=[1, 0]))
        else:
            rows, cols = store.shape
            attributes = self._blocks(store) | {"K": cols, "N": rows, "accuracy_level": store.accuracy_level}
            y = self._node("MatMulNBits", name, x, self._array(f"{holder}.codes"), *self._grid(holder), domain=_MICROSOFT, **attributes)
        bias = f"{name}.bias"
        return self._node("Add", name, y, self._array(bias)) if bias in self._placed else y

    def _embedding(self, name: str, ids: str) -> str:  # (...) -> (..., cols)
        store = self._stores[name]
        if store.blocks is None:
            values = self._node("Gather", name, self._array(f"{name}.values"), ids)
            return (
                values if store.specs()["values"].dtype == "float32" else self._node("Cast", f"{name}.found", values, to=TensorProto.FLOAT)
            )
        rows, cols = store.shape
        _, count, size = store.specs()["codes"].shape
        flat = self._constant("embedding_shape", np.array([rows, count * size], np.int64))
        codes = self._node("Reshape", name, self._array(f"{name}.codes"), flat)
        attributes = self._blocks(store) | {"gather_axis": 0, "quantize_axis": 1}
        values = self._node("GatherBlockQuantized", name, codes, ids, *self._grid(name), domain=_MICROSOFT, **attributes)
        if count * store.blocks.size == cols:
            return values
        ends = [self._constant(f"embedding_{what}", np.array([n], np.int64)) for what, n in (("start", 0), ("end", cols), ("axis", -1))]
        return self._node("Slice", name, values, *ends)

    def _grid(self, holder: str) -> list[str]:
        blocks = self._stores[holder].blocks
        return [self._array(f"{holder}.{part}") for part in (("scales", "zeros") if blocks and blocks.zeros else ("scales",))]

    def _blocks(self, store: Store) -> dict[str, Any]:
        assert store.blocks
        return {"bits": store.blocks.bits, "block_size": store.blocks.size}

    def _array(self, name: str) -> str:
        assert name in self._placed, name
        self.read.add(name)
        return name

    def _constant(self, name: str, value: Any) -> str:
        self.constants.setdefault(name, onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def _node(self, op: str, name: str, *inputs: str, outputs: tuple[str, ...] = (), domain: str = "", **attributes: Any) -> str:
        made = outputs or (f"{name}/{op}",)
        self.nodes.append(helper.make_node(op, inputs, made, name=f"{name}/{op}", domain=domain, **attributes))
        return made[0]
