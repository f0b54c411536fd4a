"""The static graphs by themselves: what they are made of, and the one rule that decides what a token sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from kvstore.pipeline.graphs import EMPTY, Form, Graph, KvDtype, head_graph, layer_graph
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.runtime import GraphRefused
from kvstore.pipeline.weights import Weights, open_weights
from tests.tiny_models import write_tiny_gguf

C, S = 8, 32
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("graphs")
    write_tiny_gguf(folder / "model.gguf", layers=3)
    return open_weights(folder / "model.gguf", folder / "cache")


@pytest.fixture(scope="module")
def runtime() -> OnnxRuntime:
    return OnnxRuntime(threads=1)


def inputs_for(graph: Graph, seed: int = 0) -> Arrays:
    """8 tokens at positions 10 … 17 into slots 20 … 27, behind 10 tokens in slots 0 … 9; random KV everywhere."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for value in graph.model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        arrays[value.name] = rng.standard_normal(shape).astype(dtype)
    if "token_ids" in arrays:
        arrays["token_ids"] = rng.integers(0, 300, C).astype(np.int32)
    arrays["positions"] = np.arange(10, 10 + C, dtype=np.int32)
    arrays["slot_positions"] = np.full(S, EMPTY, np.int32)
    arrays["slot_positions"][:10] = np.arange(10)
    if "slots" in arrays:
        arrays["slots"] = np.arange(20, 20 + C, dtype=np.int32)
        arrays["slot_positions"][20 : 20 + C] = arrays["positions"]
    else:
        arrays["new_positions"] = arrays["positions"].copy()
    return arrays


def run(runtime: OnnxRuntime, graph: Graph, inputs: Arrays, in_place: bool = False) -> Arrays:
    """Outputs of one run; `inputs` are not changed."""
    inputs = {name: array.copy() for name, array in inputs.items()}
    outputs: Arrays = {}
    for value in graph.model.graph.output:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        same = inputs.get(value.name.removesuffix("_out")) if in_place else None
        outputs[value.name] = np.zeros(shape, dtype) if same is None else same
    runtime.compile(graph).bind({**inputs, **outputs}).start().wait()
    return outputs


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
def test_graphs_are_valid_static_and_of_standard_operators(
    weights: Weights, form: Form, kv_dtype: KvDtype, layers: range
) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=layers, form=form, kv_dtype=kv_dtype)
    path = weights.folder / "checked.onnx"
    onnx.save(graph.model, path)
    onnx.checker.check_model(path, full_check=True)
    assert {node.domain for node in graph.model.graph.node} == {""}
    assert not {node.op_type for node in graph.model.graph.node if "Quantize" in node.op_type}
    for value in [*graph.model.graph.input, *graph.model.graph.output]:
        assert all(dim.dim_value > 0 for dim in value.type.tensor_type.shape.dim), value.name
    assert graph.model.ByteSize() < 100_000, "weights belong into the weights file"


def test_the_head_is_valid_and_uses_the_embedding_as_it_lies(weights: Weights) -> None:
    graph = head_graph(weights, rows=1)
    onnx.save(graph.model, weights.folder / "head.onnx")
    onnx.checker.check_model(weights.folder / "head.onnx", full_check=True)
    names = {tensor.name for tensor in graph.model.graph.initializer if tensor.external_data}
    assert names == {"embedding", "final_norm"}


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_in_place_and_into_a_copy_are_bit_equal(
    weights: Weights, runtime: OnnxRuntime, kv_dtype: KvDtype
) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3), kv_dtype=kv_dtype)
    inputs = inputs_for(graph)
    copied, in_place = run(runtime, graph, inputs), run(runtime, graph, inputs, in_place=True)
    for name, array in copied.items():
        np.testing.assert_array_equal(in_place[name], array, err_msg=name)


def test_only_the_new_slots_are_written(weights: Weights, runtime: OnnxRuntime) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3))
    inputs = inputs_for(graph)
    outputs = run(runtime, graph, inputs, in_place=True)
    others = np.setdiff1d(np.arange(S), inputs["slots"])
    for name in (f"{kind}{layer}" for kind in "kv" for layer in range(3)):
        np.testing.assert_array_equal(outputs[f"{name}_out"][:, others], inputs[name][:, others])
        assert (outputs[f"{name}_out"][:, 20 : 20 + C] != inputs[name][:, 20 : 20 + C]).all()


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("window", [28, 30, S])
def test_a_window_that_holds_all_that_is_seen_changes_nothing(
    weights: Weights, runtime: OnnxRuntime, form: Form, kv_dtype: KvDtype, window: int
) -> None:
    """Slots behind the window may hold whatever: later tokens, or padding's remains."""
    options: dict[str, Any] = {
        "tokens": C,
        "slots": S,
        "layers": range(3),
        "form": form,
        "kv_dtype": kv_dtype,
    }
    whole = layer_graph(weights, **options, attention=True)
    narrow = layer_graph(weights, **options, attention=True, window=window)
    inputs = inputs_for(whole)
    inputs["slot_positions"][30:] = [18, EMPTY]
    expected, found = run(runtime, whole, inputs), run(runtime, narrow, inputs)
    seen = found.pop("attention")
    assert seen.shape == (C, window)
    np.testing.assert_allclose(seen, expected["attention"][:, :window], atol=1e-5)
    assert (expected.pop("attention")[:, window:] == 0).all()
    for name, array in expected.items():
        # Sums over another width are added up in another order. One slot seen too many, or too few, changes 5 and more.
        rounding = 1e-4 if kv_dtype == "float32" else 1e-3
        np.testing.assert_allclose(found[name], array, atol=rounding, err_msg=name)
    onnx.save(narrow.model, weights.folder / "narrow.onnx")
    onnx.checker.check_model(weights.folder / "narrow.onnx", full_check=True)


@pytest.mark.parametrize("window", [0, -1, S + 1])
def test_a_window_that_is_none_is_refused(weights: Weights, window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        layer_graph(weights, tokens=C, slots=S, layers=range(1), window=window)


def test_a_read_only_past_gives_the_same(weights: Weights, runtime: OnnxRuntime) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3))
    portable = layer_graph(weights, tokens=C, slots=S, layers=range(3), form="read_only_past")
    inputs = inputs_for(graph)
    past = inputs["slot_positions"].copy()
    past[inputs["slots"]] = EMPTY
    kv = {name: array for name, array in inputs.items() if name[0] in "kv"}
    given = {"token_ids": inputs["token_ids"], "positions": inputs["positions"], **kv}
    given |= {"new_positions": inputs["positions"], "slot_positions": past}
    expected, outputs = run(runtime, graph, inputs), run(runtime, portable, given)
    np.testing.assert_allclose(outputs["hidden_out"], expected["hidden_out"], atol=1e-4)
    for name in kv:
        np.testing.assert_allclose(outputs[f"{name}_out"], expected[f"{name}_out"][:, 20 : 20 + C], atol=1e-4)


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
def test_a_token_sees_a_slot_if_it_holds_no_later_position(
    weights: Weights, runtime: OnnxRuntime, form: Form
) -> None:
    """Change the KV of one slot: exactly the tokens at or behind its position change."""
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3), form=form)
    inputs = inputs_for(graph)
    inputs["slot_positions"][:10] = [0, 1, 2, 3, 4, 5, EMPTY, 13, 500, 12]
    before = run(runtime, graph, inputs)["hidden_out"]
    for slot in range(10):
        changed = {name: array.copy() for name, array in inputs.items()}
        changed["k0"][:, slot] += 1
        changed["v2"][:, slot] += 1
        after = run(runtime, graph, changed)["hidden_out"]
        differs = (after != before).any(axis=1)
        np.testing.assert_array_equal(differs, inputs["positions"] >= inputs["slot_positions"][slot])


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
def test_padding_changes_no_other_token(weights: Weights, runtime: OnnxRuntime, form: Form) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3), form=form)
    real, results = 5, []
    for seed in range(2):
        inputs = inputs_for(graph)
        inputs["token_ids"][real:] = np.random.default_rng(seed).integers(0, 300, C - real)
        if form == "in_place":
            inputs["slot_positions"][inputs["slots"][real:]] = EMPTY
            inputs["slots"][real:] = S - 1
        else:
            inputs["new_positions"][real:] = EMPTY
        inputs["positions"][real:] = seed * 17
        results.append(run(runtime, graph, inputs)["hidden_out"][:real])
    np.testing.assert_array_equal(results[0], results[1])


def test_a_token_that_sees_nothing_is_finite(weights: Weights, runtime: OnnxRuntime) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3))
    inputs = inputs_for(graph)
    inputs["slot_positions"][:] = EMPTY
    assert np.isfinite(run(runtime, graph, inputs)["hidden_out"]).all()


def test_layer_groups_in_a_row_are_bit_equal_to_one_graph(weights: Weights, runtime: OnnxRuntime) -> None:
    whole = layer_graph(weights, tokens=C, slots=S, layers=range(3))
    inputs = inputs_for(whole)
    expected = run(runtime, whole, inputs)
    hidden: Arrays = {}
    for layers in (range(1), range(1, 3)):
        part = layer_graph(weights, tokens=C, slots=S, layers=layers)
        names = [value.name for value in part.model.graph.input]
        outputs = run(runtime, part, {name: {**inputs, **hidden}[name] for name in names})
        hidden = {"hidden": outputs.pop("hidden_out")}
        for name, array in outputs.items():
            np.testing.assert_array_equal(array, expected[name])
    np.testing.assert_array_equal(hidden["hidden"], expected["hidden_out"])


def test_a_tokens_kv_does_not_depend_on_its_batch_mates(weights: Weights, runtime: OnnxRuntime) -> None:
    """The fault this excludes: activations quantised with one scale for the whole call."""
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(1))
    inputs = inputs_for(graph)
    expected = run(runtime, graph, inputs)["k0_out"][:, 20]
    inputs["token_ids"][1:] = np.random.default_rng(9).integers(0, 300, C - 1)
    np.testing.assert_array_equal(run(runtime, graph, inputs)["k0_out"][:, 20], expected)


def test_a_graph_that_the_device_refuses_is_named(weights: Weights, runtime: OnnxRuntime) -> None:
    graph = layer_graph(weights, tokens=C, slots=S, layers=range(3))
    graph.model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(GraphRefused, match=rf"{graph.name}.*NoSuchOperator"):
        runtime.compile(graph)


def test_memory_that_is_not_contiguous_is_refused(weights: Weights, runtime: OnnxRuntime) -> None:
    compiled = runtime.compile(head_graph(weights, rows=2))
    with pytest.raises(ValueError, match="hidden must be C-contiguous"):
        compiled.bind({"hidden": np.zeros((64, 2), np.float32).T})
