"""One run of a static graph: which tokens it computes, and the memory it is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graphs import EMPTY, Form
from .kv_allocation import KvAllocation
from .runtime import CompiledGraph, Done, Execution, Tensors


@dataclass(frozen=True, eq=False)
class Call:
    """A run of the graph of `size` tokens for up to `size` tokens: their ids, positions and slots, each int32 [n]."""

    size: int
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]


class BoundCall:
    """The graphs of one (C, S, W), one for each layer group, bound to one allocation.

    `more` takes further outputs of the last graph, where it has them.
    The KV is bound where it lies; only the few numbers that say which tokens to compute are copied for each run.
    """

    def __init__(
        self,
        graphs: Sequence[CompiledGraph],
        layer_groups: Sequence[range],
        kv: KvAllocation,
        *,
        size: int,
        hidden: int,
        form: Form,
        more: Tensors | None = None,
    ) -> None:
        # Not `kv` itself, which can then be freed while calls are bound to its memory.
        self._slot_positions, self._padding_slot = kv.slot_positions, kv.padding_slot
        self._held = [_named(kv, layers) for layers in layer_groups]
        # Where graphs of the form read_only_past leave the new keys and values, by layer group.
        self._new: list[dict[str, NDArray[Any]]] = []
        self._form, self._shape = form, (size, hidden)
        self._token_ids = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._slots = np.zeros(size, np.int32)
        self._new_positions = np.zeros(size, np.int32)
        self._past_positions = np.zeros(kv.slots, np.int32)
        self._bindings = []
        for graph, layers, held in zip(graphs, layer_groups, self._held, strict=True):
            tensors: dict[str, NDArray[Any]] = {"positions": self._positions, **held}
            if layers.start == 0:
                tensors["token_ids"] = self._token_ids
            if form == "in_place":
                tensors |= {"slots": self._slots, "slot_positions": kv.slot_positions}
                tensors |= {f"{name}_out": array for name, array in held.items()}
            else:
                tensors |= {"new_positions": self._new_positions, "slot_positions": self._past_positions}
                new = {
                    name: np.zeros((array.shape[0], size, array.shape[2]), array.dtype)
                    for name, array in held.items()
                }
                tensors |= {f"{name}_out": array for name, array in new.items()}
                self._new.append(new)
            if layers == layer_groups[-1]:
                tensors |= more or {}
            self._bindings.append(graph.bind(tensors))

    def run(self, group: int, call: Call, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """As `start`, and wait until it is over."""
        computed, execution = self.start(group, call, hidden)
        execution.wait()
        return computed

    def start(
        self, group: int, call: Call, hidden: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], Execution]:
        """Compute layer group `group` for `call` from the hidden states of the group before (None for the first).

        Returns hidden states float32 [size, hidden], good when it is over; rows beyond the call's tokens are padding.
        Nothing else may be started here before that.
        """
        self._fill(call)
        computed = np.empty(self._shape, np.float32)
        binding = self._bindings[group]
        binding.rebind(
            {"hidden_out": computed} if hidden is None else {"hidden": hidden, "hidden_out": computed}
        )
        execution = binding.start()
        if self._form == "read_only_past":
            execution.wait()
            for name, new in self._new[group].items():
                self._held[group][name][:, call.slots] = new[:, : len(call.slots)]
            return computed, Done()
        return computed, execution

    def _fill(self, call: Call) -> None:
        n = len(call.token_ids)
        if n == call.size and self._form == "in_place":  # no padding: half the time, between any two graphs
            self._token_ids[:] = call.token_ids
            self._positions[:] = call.positions
            self._slots[:] = call.slots
            return
        self._token_ids[:n] = call.token_ids
        self._positions[:n] = call.positions
        self._positions[n:] = call.positions[-1]
        if self._form == "in_place":
            self._slots[:n] = call.slots
            self._slots[n:] = self._padding_slot
        else:
            self._new_positions[:n] = call.positions
            self._new_positions[n:] = EMPTY
            self._past_positions[:] = self._slot_positions
            self._past_positions[call.slots] = EMPTY


def _named(kv: KvAllocation, layers: range) -> dict[str, NDArray[Any]]:
    """Keys and values of these layers by the names of the graphs' inputs."""
    keys = {f"k{layer}": kv.keys[layer] for layer in layers}
    return keys | {f"v{layer}": kv.values[layer] for layer in layers}
