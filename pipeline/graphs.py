"""ONNX graphs with fixed shapes that compute any C tokens over a KV allocation of S slots.

Which tokens those are is data, not shape, so one graph serves prefill, decode, prefix reuse and the recompute of
scattered tokens. Inputs of a layer graph, in the order of the model:

    token_ids       int32 [C]            first part only; later parts take `hidden` float32 [C, hidden]
    positions       int32 [C]            ascending; below the context length
    slots           int32 [C]            where the new keys and values go
    slot_positions  int32 [S]            position held by each slot, EMPTY if none; new tokens included
    k<i>, v<i>      [kv_heads, S, head_dim] for each layer i of the part

Outputs: `hidden_out` float32 [C, hidden], and `k<i>_out`, `v<i>_out` like their inputs with the new tokens in place.
Output and input may be bound to the same memory; then nothing but the new tokens is written.

One rule masks everything: slot s is visible to token c if slot_positions[s] <= positions[c]. Padding tokens are sent
to a slot that stays EMPTY; they take any valid position and change no other token's result.

Attention over S slots costs the same however many are held, so a graph may have a window of W <= S slots: new tokens
go anywhere into the S slots, but only the first W are read. Whoever runs it sees to it that no slot from W on is
visible to its tokens; then W changes the time and nothing else.

The form `read_only_past` is for compilers that cannot scatter into a graph input. There, `slots` is replaced by
`new_positions` int32 [C] (the tokens' positions, EMPTY for padding), slot_positions must be EMPTY wherever a new
token goes, and the outputs `k<i>_out`, `v<i>_out` are [kv_heads, C, head_dim]: the new tokens alone, for the host to
put into their slots.

With `attention`, a further output `attention` float32 [C, W]: the softmax probabilities with which each token reads
each slot, summed over heads and the layers of the part. It says which held tokens a question is about.

With `peek`, two further outputs `next_keys` and `next_values` float32 [kv_heads, C, head_dim]: those of the layer after
the part, rotated as in the KV. They say where what that layer holds is not what it would compute now.

Only standard operators of opset 21 are used. Attention is MatMul, Add, Softmax, MatMul: the Attention operator of
opset 23 was no faster on ONNX Runtime CPU (C = 16, 64, 256 at S = 1024), and the explicit form leaves the
probabilities open, which selection by attention needs as a further output. Query heads that share a KV head form one
matrix, so keys and values are never repeated. No activation is quantised: a token's KV must not depend on the tokens
computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from .weights import Weights

EMPTY = np.iinfo(np.int32).max
"""Position of a slot that holds nothing: later than any token's."""

Form = Literal["in_place", "read_only_past"]
KvDtype = Literal["float32", "float16"]

_OPSET, _IR = 21, 10
_MASKED = -1e30  # finite, so that a token that sees no slot at all gets no NaN


@dataclass(frozen=True)
class Graph:
    """A model whose weights are external data in `weights.path`. Names, dtypes and shapes are in the model itself.

    `pack` tells a runtime whether its own arrangement of the matrices is worth the memory.
    """

    name: str
    model: onnx.ModelProto
    weights: Weights
    pack: bool = True
    window: int | None = None
    """W of a graph with layers."""


def layer_graph(
    weights: Weights,
    *,
    tokens: int,
    slots: int,
    layers: range,
    kv_dtype: KvDtype = "float32",
    form: Form = "in_place",
    window: int | None = None,
    attention: bool = False,
    peek: bool = False,
) -> Graph:
    """Graph of consecutive `layers` for `tokens` (C) tokens over `slots` (S) slots; see the top of this file.

    window: W, by default S. Raises ValueError unless 0 < W <= S.
    """
    window = slots if window is None else window
    if not 0 < window <= slots:
        raise ValueError(f"a window of {window} slots over {slots} slots: at least 1 and no more than all")
    return _LayerGraph(weights, tokens, slots, window, layers, kv_dtype, form, attention, peek).build()


def head_graph(weights: Weights, rows: int) -> Graph:
    """Graph from `hidden` float32 [rows, hidden] to `logits` float32 [rows, vocab].

    The matrix is used as it lies in the file (transB), so a tied embedding exists once; packing it would cost as
    much memory as the matrix and save 1 ms of 8 for one row.
    """
    config, b = weights.config, _Builder(weights)
    b.input("hidden", TensorProto.FLOAT, [rows, config.hidden])
    normed = b.rms_norm("hidden", b.weight("final_norm"), config.norm_eps)
    matrix = b.weight("embedding" if config.tied else "head")
    b.op("Gemm", [normed, matrix], out="logits", transB=1)
    b.output("logits", TensorProto.FLOAT, [rows, config.vocab])
    return Graph(f"head-{rows}", b.model(f"head_{rows}"), weights, pack=False)


@dataclass
class _Builder:
    """Collects nodes, initialisers, inputs and outputs of one model."""

    weights: Weights
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, name: str, dtype: int, shape: Sequence[int]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def op(self, kind: str, inputs: Sequence[str], out: str | None = None, **attributes: Any) -> str:
        """Add a node with one output; returns the output's name."""
        return self.ops(kind, inputs, 1, [out] if out else None, **attributes)[0]

    def ops(
        self, kind: str, inputs: Sequence[str], count: int, out: list[str] | None = None, **attributes: Any
    ) -> list[str]:
        """Add a node with `count` outputs; returns their names."""
        node = f"{kind}_{len(self.nodes)}"
        names = out or [f"{node}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=node, **attributes))
        return names

    def weight(self, name: str) -> str:
        """A tensor of the weights file, by reference."""
        if name not in self.initializers:
            tensor = self.weights.tensors[name]
            proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=tensor.shape)
            proto.data_location = TensorProto.EXTERNAL
            where = {"location": self.weights.path.name, "offset": tensor.offset, "length": tensor.nbytes}
            for key, value in where.items():
                proto.external_data.add(key=key, value=str(value))
            self.initializers[name] = proto
        return name

    def ints(self, *values: int) -> str:
        """An int64 constant: shapes and axes."""
        return self.constant("ints_" + "_".join(map(str, values)), np.array(values, dtype=np.int64))

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(value, name)
        return name

    def reshape(self, value: str, *shape: int) -> str:
        return self.op("Reshape", [value, self.ints(*shape)])

    def split(self, value: str, axis: int, *sizes: int) -> list[str]:
        return self.ops("Split", [value, self.ints(*sizes)], len(sizes), axis=axis)

    def rms_norm(self, value: str, scale: str, epsilon: float) -> str:
        """x / sqrt(mean(x²) + eps) · scale over the last axis, spelt as runtimes expect it for fusion."""
        square = self.op("Pow", [value, self.constant("two", np.array(2, np.float32))])
        mean = self.op("ReduceMean", [square, self.ints(-1)], keepdims=1)
        shifted = self.op("Add", [mean, self.constant("epsilon", np.array(epsilon, np.float32))])
        return self.op("Mul", [self.op("Div", [value, self.op("Sqrt", [shifted])]), scale])

    def model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, list(self.initializers.values())
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR,
            producer_name="npu-kvstore",
        )


class _LayerGraph:
    def __init__(
        self,
        weights: Weights,
        tokens: int,
        slots: int,
        window: int,
        layers: range,
        kv_dtype: KvDtype,
        form: Form,
        attention: bool,
        peek: bool,
    ) -> None:
        self.c = weights.config
        self.b = _Builder(weights)
        self.weights, self.tokens, self.layers = weights, tokens, layers
        self.slots, self.window = slots, window
        self.kv_dtype, self.form, self.peek = kv_dtype, form, peek
        self.sums: list[str] | None = [] if attention else None  # of each layer, [C, keys]
        self.kv_type = TensorProto.FLOAT if kv_dtype == "float32" else TensorProto.FLOAT16

    def build(self) -> Graph:
        b, c = self.b, self.c
        first, last = self.layers.start, self.layers.stop - 1
        if first == 0:
            b.input("token_ids", TensorProto.INT32, [self.tokens])
        else:
            b.input("hidden", TensorProto.FLOAT, [self.tokens, c.hidden])
        b.input("positions", TensorProto.INT32, [self.tokens])
        b.input("slots" if self.form == "in_place" else "new_positions", TensorProto.INT32, [self.tokens])
        b.input("slot_positions", TensorProto.INT32, [self.slots])

        self.mask = self._mask()
        self.cos, self.sin = self._rope_table()
        if self.form == "in_place":
            self.indices = self._scatter_indices()
        hidden = b.op("Gather", [b.weight("embedding"), "token_ids"]) if first == 0 else "hidden"
        for layer in self.layers:
            name = f"layers.{layer}"
            attended = self._attention(
                layer, b.rms_norm(hidden, b.weight(f"{name}.attention_norm"), c.norm_eps)
            )
            hidden = b.op("Add", [hidden, b.op("MatMul", [attended, b.weight(f"{name}.output")])])
            fed = self._feed_forward(name, b.rms_norm(hidden, b.weight(f"{name}.ffn_norm"), c.norm_eps))
            hidden = b.op("Add", [hidden, fed], out="hidden_out" if layer == last else None)
        b.output("hidden_out", TensorProto.FLOAT, [self.tokens, c.hidden])
        if self.sums is not None:
            b.op(
                "Slice", [b.op("Sum", self.sums), b.ints(0), b.ints(self.window), b.ints(1)], out="attention"
            )
            b.output("attention", TensorProto.FLOAT, [self.tokens, self.window])
        if self.peek:
            norm = b.weight(f"layers.{last + 1}.attention_norm")
            _, *new = self._project(last + 1, b.rms_norm("hidden_out", norm, c.norm_eps))
            for kind, value in zip(("keys", "values"), new, strict=True):
                b.op("Identity", [value], out=f"next_{kind}")
                b.output(f"next_{kind}", TensorProto.FLOAT, [c.kv_heads, self.tokens, c.head_dim])
        name = (
            f"layers-{first}-{last}-c{self.tokens}-s{self.slots}-w{self.window}-{self.kv_dtype}-{self.form}"
        )
        name += "" if self.sums is None else "-attention"
        name += "-peek" if self.peek else ""
        return Graph(name, b.model(name.replace("-", "_")), self.weights, window=self.window)

    def _mask(self) -> str:
        """What is added to the scores, float32 [C, keys]: 0 where visible."""
        b = self.b
        held = self._within("slot_positions", axis=0)
        if self.form == "read_only_past":
            held = b.op("Concat", [held, "new_positions"], axis=0)
        visible = b.op("LessOrEqual", [held, b.reshape("positions", self.tokens, 1)])
        masked = b.constant("masked", np.array(_MASKED, np.float32))
        return b.op("Where", [visible, b.constant("zero", np.array(0, np.float32)), masked])

    def _rope_table(self) -> tuple[str, str]:
        """Factors of x and of x with its halves swapped, each float32 [C, head_dim]."""
        b = self.b
        cos = b.op("Gather", [b.weight("rope.cos"), "positions"])
        sin = b.op("Gather", [b.weight("rope.sin"), "positions"])
        return (
            b.op("Concat", [cos, cos], axis=1),
            b.op("Concat", [b.op("Neg", [sin]), sin], axis=1),
        )

    def _scatter_indices(self) -> str:
        """(KV head, slot) of each new row, int64 [kv_heads, C, 2]."""
        b, shape = self.b, (self.c.kv_heads, self.tokens, 1)
        slots = b.reshape(b.op("Cast", ["slots"], to=TensorProto.INT64), 1, self.tokens, 1)
        heads = np.broadcast_to(np.arange(self.c.kv_heads).reshape(-1, 1, 1), shape)
        return b.op(
            "Concat",
            [b.constant("kv_heads", heads.copy()), b.op("Expand", [slots, b.ints(*shape)])],
            axis=2,
        )

    def _attention(self, layer: int, normed: str) -> str:
        """[C, hidden] → [C, heads * head_dim], before the output projection."""
        b, c = self.b, self.c
        group = c.heads // c.kv_heads
        q, k, v = self._project(layer, normed)
        keys, values = self._extend(f"k{layer}", k), self._extend(f"v{layer}", v)

        q = b.reshape(q, c.kv_heads, group * self.tokens, c.head_dim)
        scores = b.op("MatMul", [q, b.op("Transpose", [keys], perm=[0, 2, 1])])
        scores = b.op("Add", [b.reshape(scores, c.heads, self.tokens, -1), self.mask])
        probabilities = b.op("Softmax", [scores], axis=-1)  # [heads, C, keys]
        if self.sums is not None:
            self.sums.append(b.op("ReduceSum", [probabilities, b.ints(0)], keepdims=0))
        probabilities = b.reshape(probabilities, c.kv_heads, group * self.tokens, -1)
        attended = b.reshape(b.op("MatMul", [probabilities, values]), c.heads, self.tokens, c.head_dim)
        return b.reshape(b.op("Transpose", [attended], perm=[1, 0, 2]), self.tokens, -1)

    def _project(self, layer: int, normed: str) -> tuple[str, str, str]:
        """[C, hidden] → queries [heads, C, head_dim], keys and values [kv_heads, C, head_dim], rotated."""
        b, c, name = self.b, self.c, f"layers.{layer}"
        qkv = b.op("MatMul", [normed, b.weight(f"{name}.qkv")])
        if c.qkv_bias:
            qkv = b.op("Add", [qkv, b.weight(f"{name}.qkv_bias")])
        qkv = b.op("Transpose", [b.reshape(qkv, self.tokens, -1, c.head_dim)], perm=[1, 0, 2])
        if c.qk_norm:
            q, k, v = b.split(qkv, 0, c.heads, c.kv_heads, c.kv_heads)
            q = self._rotate(b.rms_norm(q, b.weight(f"{name}.query_norm"), c.norm_eps))
            k = self._rotate(b.rms_norm(k, b.weight(f"{name}.key_norm"), c.norm_eps))
        else:
            qk, v = b.split(qkv, 0, c.heads + c.kv_heads, c.kv_heads)
            q, k = b.split(self._rotate(qk), 0, c.heads, c.kv_heads)
        return q, k, v

    def _rotate(self, heads: str) -> str:
        """RoPE over [n, C, head_dim] with pairs (i, i + head_dim/2)."""
        b, half = self.b, self.c.head_dim // 2
        low, high = b.split(heads, 2, half, half)
        swapped = b.op("Concat", [high, low], axis=2)
        return b.op("Add", [b.op("Mul", [heads, self.cos]), b.op("Mul", [swapped, self.sin])])

    def _extend(self, name: str, new: str) -> str:
        """Put new rows [kv_heads, C, head_dim] beside the past; returns float32 [kv_heads, keys, head_dim]."""
        b, c, out = self.b, self.c, f"{name}_out"
        past = b.input(name, self.kv_type, [c.kv_heads, self.slots, c.head_dim])
        if self.form == "in_place":
            new = new if self.kv_dtype == "float32" else b.op("Cast", [new], to=self.kv_type)
            held = self._within(b.op("ScatterND", [past, self.indices, new], out=out), axis=1)
            b.output(out, self.kv_type, [c.kv_heads, self.slots, c.head_dim])
        else:
            b.op("Cast", [new], out=out, to=self.kv_type)
            b.output(out, self.kv_type, [c.kv_heads, self.tokens, c.head_dim])
            held = b.op("Concat", [self._within(past, axis=1), out], axis=1)
        return held if self.kv_dtype == "float32" else b.op("Cast", [held], to=TensorProto.FLOAT)

    def _within(self, value: str, axis: int) -> str:
        """The part of `value` that belongs to the window; `axis` is that of slots."""
        if self.window == self.slots:
            return value
        return self.b.op("Slice", [value, self.b.ints(0), self.b.ints(self.window), self.b.ints(axis)])

    def _feed_forward(self, name: str, normed: str) -> str:
        """down(silu(gate(x)) * up(x)), [C, hidden] → [C, hidden]."""
        b, ffn = self.b, self.c.ffn
        gate, up = b.split(b.op("MatMul", [normed, b.weight(f"{name}.gate_up")]), 1, ffn, ffn)
        active = b.op("Mul", [b.op("Mul", [gate, b.op("Sigmoid", [gate])]), up])
        return b.op("MatMul", [active, b.weight(f"{name}.down")])
