"""Sizes, raw form, layer groups and capability flags of a layout."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BufferTooSmallError
from kvstore.layout import Capabilities, LayerLayout, Layout, LayoutError, capabilities
from kvstore.pipeline.rope import DynamicNtk, Explicit, LongRope, Rope

ROPE = Rope(64, 10_000.0, 64)
UNIFORM = Layout.uniform(layers=4, kv_heads=2, head_dim=64, rope=ROPE)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any mix of layers, at least one of which holds KV."""
    layer = st.one_of(
        st.builds(
            LayerLayout,
            kv_heads=st.integers(1, 4),
            head_dim=st.integers(1, 9),
            value_head_dim=st.none() | st.integers(1, 9),
        ),
        st.builds(
            LayerLayout,
            kv_heads=st.integers(1, 4),
            head_dim=st.integers(1, 9),
            attention=st.sampled_from(["sliding", "chunked"]),
            window=st.integers(1, 99),
        ),
        st.builds(LayerLayout, attention=st.sampled_from(["shared", "none"])),
    )
    layers = draw(
        st.lists(layer, min_size=1, max_size=12).filter(lambda all: any(one.holds_kv for one in all))
    )
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    return Layout(tuple(layers), dtype, draw(st.sampled_from(["none", "alibi", "learned"])))


# Sizes and views


@given(layouts(), st.integers(0, 5))
def test_the_raw_form_is_keys_then_values_of_each_layer_without_gaps(layout: Layout, tokens: int) -> None:
    raw = bytearray(layout.block_bytes(tokens))
    views = layout.views(raw, tokens)
    parts = []
    for number, pair in enumerate(views):
        if pair is None:
            assert layout.layer_bytes(number, tokens) == 0
            continue
        for array, shape in zip(
            pair, (layout.key_shape(number, tokens), layout.value_shape(number, tokens)), strict=True
        ):
            assert array.shape == shape
            assert array.itemsize == layout.itemsize
            array[...] = np.arange(array.size).reshape(shape) + len(parts)
            parts.append(array.tobytes())
    assert bytes(raw) == b"".join(parts)
    assert (
        len(raw)
        == tokens * layout.token_bytes
        == sum(layout.layer_bytes(number, tokens) for number in range(len(layout.layers)))
    )


@given(layouts(), st.integers(1, 3))
def test_a_range_of_layers_seen_alone_equals_its_part_of_the_whole(layout: Layout, tokens: int) -> None:
    raw = np.random.default_rng(0).bytes(layout.block_bytes(tokens))
    whole = layout.views(raw, tokens)
    for first, last in itertools.combinations(range(len(layout.layers) + 1), 2):
        span = layout.span(range(first, last), tokens)
        for number, keys, values in layout.layer_views(raw[span], range(first, last), tokens):
            pair = whole[number]
            assert pair is not None
            assert keys.tobytes() == pair[0].tobytes()
            assert values.tobytes() == pair[1].tobytes()


def test_views_write_through_to_a_buffer_that_can_be_written_and_only_there() -> None:
    raw = np.zeros(UNIFORM.block_bytes(3) + 100, np.uint8)  # longer than needed, as a slot in an arena is
    pair = UNIFORM.views(raw, 3)[1]
    assert pair is not None
    pair[1][...] = 1.0
    start = UNIFORM.span(range(1, 2), 3).start + pair[0].nbytes
    assert raw[start : start + pair[1].nbytes].any()
    assert not np.delete(raw, np.s_[start : start + pair[1].nbytes]).any()
    frozen = UNIFORM.views(raw.tobytes(), 3)[1]
    assert frozen is not None
    with pytest.raises(ValueError, match="read-only"):
        frozen[0][...] = 1.0


def test_bfloat16_comes_as_the_bits() -> None:
    layout = Layout.uniform(layers=1, kv_heads=1, head_dim=2, rope=None, dtype="bfloat16")
    pair = layout.views(np.asarray([0x3F80, 0xC000, 1, 2], "<u2"), 1)[0]
    assert pair is not None
    assert pair[0].dtype == np.uint16
    assert pair[0].tolist() == [[[0x3F80, 0xC000]]]


def test_a_short_buffer_is_refused_with_both_sizes() -> None:
    with pytest.raises(BufferTooSmallError, match="3 tokens need 6144 bytes, the buffer holds 6143"):
        UNIFORM.views(bytearray(UNIFORM.block_bytes(3) - 1), 3)


# Layer groups


@given(layouts(), st.integers(1, 15))
def test_groups_are_contiguous_hold_kv_and_are_near_equal_but_the_first_ones(
    layout: Layout, count: int
) -> None:
    groups = layout.groups(count)
    holding = sum(layer.holds_kv for layer in layout.layers)
    assert len(groups) == min(count, holding)
    assert [layer for group in groups for layer in group] == list(range(len(layout.layers)))
    sizes = [layout.span(group, 1).stop - layout.span(group, 1).start for group in groups]
    assert sum(sizes) == layout.token_bytes
    largest = max(layout.layer_bytes(layer, 1) for layer in range(len(layout.layers)))
    assert min(sizes) > 0
    # Each cut is half a layer off at most, unless a layer wider than a share pushes its neighbours.
    lengths = [1 if number < _short(len(groups)) else 2 for number in range(len(groups))]
    part = layout.token_bytes / sum(lengths)
    if largest <= part:
        assert all(abs(size - part * length) <= largest for size, length in zip(sizes, lengths, strict=True))


def _short(count: int) -> int:
    """How many of `count` groups are half as long: a quarter, at most three, at least one."""
    return max(1, min(3, count // 4))


def test_groups_of_equal_layers_differ_by_one_layer_and_the_first_ones_are_half_as_long() -> None:
    layout = Layout.uniform(layers=30, kv_heads=3, head_dim=64, rope=ROPE)
    for count in range(2, 31):
        lengths, short = [len(group) for group in layout.groups(count)], _short(count)
        assert max(lengths[short:]) - min(lengths[short:]) <= 1
        assert max(abs(each - max(1, 30 / (2 * count - short))) for each in lengths[:short]) < 1
    assert [len(group) for group in layout.groups(2)] == [10, 20]
    assert [len(group) for group in layout.groups(1)] == [30]
    with pytest.raises(LayoutError, match="0 layer groups asked for"):
        layout.groups(0)


# Capabilities


def test_rope_of_static_frequencies_may_shift() -> None:
    assert capabilities(UNIFORM) == Capabilities("shift")
    explicit = Layout.uniform(
        layers=1, kv_heads=1, head_dim=4, rope=Rope(4, 1e4, 4, scaling=Explicit((1.0, 8.0)))
    )
    assert capabilities(explicit).reuse == "shift"


@pytest.mark.parametrize("positions", ["alibi", "none"])
def test_keys_without_position_move_unchanged(positions: str) -> None:
    found = capabilities(Layout.uniform(layers=1, kv_heads=1, head_dim=4, rope=None, positions=positions))
    assert found.reuse == "shift"
    assert "move" in found.notes[0]


def test_image_positions_restrict_to_prefixes_with_a_reason() -> None:
    """Shifting M-RoPE keys by one difference gave wrong answers."""
    found = capabilities(Layout.uniform(layers=2, kv_heads=1, head_dim=64, rope=ROPE, positions="mrope"))
    assert found.reuse == "prefix"
    assert "M-RoPE" in found.reasons[0]


def test_learned_positions_restrict_to_prefixes() -> None:
    found = capabilities(Layout.uniform(layers=2, kv_heads=1, head_dim=64, rope=None, positions="learned"))
    assert found.reuse == "prefix"
    assert "absolute positions" in found.reasons[0]


def test_recurrent_layers_restrict_to_exact_matches() -> None:
    """A recurrent state cannot be shifted or cut, yet engines tried."""
    attention, recurrent = UNIFORM.layers[0], LayerLayout(attention="none")
    found = capabilities(Layout((attention, recurrent, recurrent, attention, recurrent)))
    assert found.reuse == "exact"
    assert found.reasons == (
        "layers 1–2, 4 keep a recurrent state, which cannot be cut back to fewer tokens",
    )


def test_dynamic_ntk_restricts_to_exact_matches() -> None:
    rope = msgspec.structs.replace(ROPE, scaling=DynamicNtk(2.0, 4096))
    found = capabilities(Layout.uniform(layers=2, kv_heads=1, head_dim=64, rope=rope))
    assert found.reuse == "exact"
    assert "dynamic NTK" in found.reasons[0]


def test_every_restriction_is_told_and_the_hardest_holds() -> None:
    layers = (UNIFORM.layers[0], LayerLayout(attention="none"))
    found = capabilities(Layout(layers, positions="mrope"))
    assert found.reuse == "exact"
    assert len(found.reasons) == 2


def test_notes_name_windows_shared_layers_nope_layers_and_the_longrope_regime() -> None:
    long = Rope(4, 1e4, 4, scaling=LongRope((1.0, 1.0), (2.0, 2.0), 4096, 1.19))
    layout = Layout(
        (
            LayerLayout(1, 4, rope=long),
            LayerLayout(1, 4),
            LayerLayout(1, 4, attention="sliding", window=512, rope=long),
            LayerLayout(1, 4, attention="chunked", window=8192, rope=long),
            LayerLayout(attention="shared"),
        )
    )
    found = capabilities(layout)
    assert found.reuse == "shift"
    assert found.reasons == ()
    text = "\n".join(found.notes)
    for part in (
        "layers 2 read only the last 512",
        "layers 3 attend inside",
        "layers 4 read the KV",
        "layers 1 hold",
    ):
        assert part in text
    assert "up to 4096 tokens only" in text


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 0, "head_dim": 64}, "at least 1"),
        ({"kv_heads": 2, "head_dim": 64, "value_head_dim": 0}, "at least 1"),
        ({"kv_heads": 2, "head_dim": 64, "attention": "sliding"}, "window None"),
        ({"kv_heads": 2, "head_dim": 64, "attention": "sliding", "window": 0}, "window 0"),
        ({"kv_heads": 2, "head_dim": 64, "window": 512}, "window 512 does not go with attention 'full'"),
        ({"kv_heads": 2, "head_dim": 64, "attention": "local"}, "'local'"),
        ({"kv_heads": 2, "head_dim": 32, "rope": ROPE}, "rope is for head_dim 64, the layer has 32"),
        ({"kv_heads": 2, "head_dim": 64, "attention": "none"}, "holds no KV"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        LayerLayout(**fields)


def test_a_layout_that_cannot_be_is_refused() -> None:
    layer = UNIFORM.layers[0]
    with pytest.raises(LayoutError, match="dtype 'int8' is not one of float16, bfloat16, float32"):
        Layout((layer,), "int8")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="positions 'rotary'"):
        Layout((layer,), positions="rotary")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="positions 'alibi' with a layer that has rope"):
        Layout((layer,), positions="alibi")
    with pytest.raises(LayoutError, match="positions 'rope' with no layer that has rope"):
        Layout((LayerLayout(1, 4),))
    for layers in ((), (LayerLayout(attention="none"),)):
        with pytest.raises(LayoutError, match="no layer holds KV"):
            Layout(layers)


def test_values_as_wide_as_keys_have_one_spelling() -> None:
    assert LayerLayout(2, 64, 64) == LayerLayout(2, 64)
    assert LayerLayout(1, 64, 512).value_dim == 512
