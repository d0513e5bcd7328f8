"""onnxruntime's quantized products: MatMulNBits of 2, 4 and 8 bits, and MatMulInteger after DynamicQuantizeLinear, which it fuses.

Weights are constants of a session, because onnxruntime lays out only constants for its kernels; so every copy is a session. All share one
pool of threads.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version as installed_version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.benchmarks.contenders import Multiplier, Product, copies
from fewbits.benchmarks.shapes import Packed


class _Sessions(Multiplier):
    def __init__(self, model: Any, weight: Packed, threads: int, cold: int) -> None:
        import onnxruntime

        self._source = weight
        self._rows = weight.shape[0]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if _share_threads(threads):
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = threads
        content = model.SerializeToString()
        self._sessions = [
            onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"]) for _ in range(copies(self.nbytes, cold))
        ]

    def bind(self, x: Tensor) -> Product:
        given, out = np.ascontiguousarray(x.numpy()), np.empty((len(x), self._rows), np.float32)
        bound = []
        for session in self._sessions:
            binding = session.io_binding()
            binding.bind_cpu_input("x", given)
            binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
            bound.append((session, binding))

        def run(number: int) -> object:
            session, binding = bound[number % len(bound)]
            session.run_with_iobinding(binding)
            return given, out  # the function keeps them alive: the bindings hold only their addresses

        return Product(run, lambda: torch.from_numpy(out))

    def decoded(self, rows: Tensor) -> Tensor:
        return self._source.decoded(rows)

    def close(self) -> None:
        self._sessions.clear()


class MatMulNBits(_Sessions):
    """`weight` is in intB_gG, whose codes are the operator's own bytes."""

    def __init__(self, weight: Packed, threads: int, cold: int) -> None:
        from onnx import TensorProto, helper, numpy_helper

        rows, cols = weight.shape
        bits, group = int(weight.fmt.name[3]), weight.fmt.group
        assert group
        codes = weight.parts["codes"].numpy()
        stored = (codes.view(np.uint8) ^ 128 if bits == 8 else codes).reshape(rows, cols // group, group * bits // 8)
        scales = weight.parts["scales"].float().numpy()
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
            K=cols, N=rows, bits=bits, block_size=group, accuracy_level=4,
        )  # fmt: skip
        constants = [numpy_helper.from_array(stored, "w"), numpy_helper.from_array(scales.reshape(-1), "s")]
        self.name = f"onnxruntime {bits}-bit g{group}"
        self.setting = f"{version()}, MatMulNBits, accuracy level 4"
        self.nbytes = stored.nbytes + scales.nbytes
        super().__init__(_model([node], constants, cols, rows, helper, TensorProto), weight, threads, cold)


class MatMulInteger(_Sessions):
    """`weight` is in int8_channel. One scale and zero point for all of x."""

    rounding = "tensor"

    def __init__(self, weight: Packed, threads: int, cold: int) -> None:
        from onnx import TensorProto, helper, numpy_helper

        rows, cols = weight.shape
        stored = np.ascontiguousarray(weight.parts["codes"].numpy().T)
        scales = weight.parts["scales"].float().numpy().reshape(-1)
        nodes = [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"]),
            helper.make_node("MatMulInteger", ["q", "w", "x_zero", "w_zero"], ["sums"]),
            helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["x_scale", "s"], ["scales"]),
            helper.make_node("Mul", ["floats", "scales"], ["y"]),
        ]
        named = {"w": stored, "s": scales, "w_zero": np.zeros(rows, np.int8)}
        constants = [numpy_helper.from_array(values, name) for name, values in named.items()]
        self.name = "onnxruntime int8"
        self.setting = f"{version()}, DynamicQuantizeLinear + MatMulInteger"
        self.nbytes = stored.nbytes + scales.nbytes
        super().__init__(_model(nodes, constants, cols, rows, helper, TensorProto), weight, threads, cold)


def version() -> str:
    return f"onnxruntime {installed_version('onnxruntime')}"


def _model(nodes: list[Any], constants: list[Any], cols: int, rows: int, helper: Any, types: Any) -> Any:
    inputs = [helper.make_tensor_value_info("x", types.FLOAT, ["m", cols])]
    outputs = [helper.make_tensor_value_info("y", types.FLOAT, ["m", rows])]
    graph = helper.make_graph(nodes, "product", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@cache
def _share_threads(threads: int) -> bool:
    """One pool for all sessions: threads of another session would spin on the cores that this one needs. It can be made once in a process,
    and before the first session; otherwise sessions have their own."""
    import onnxruntime

    try:
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
    except Exception:
        return False
    return True
