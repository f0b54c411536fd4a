"""Two identities have one digest if and only if all parts are equal, and the difference is named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.identity import FORMAT_VERSION, Adapter, Difference, Identity, IdentityError, digest_file
from kvstore.layout import LayerLayout, Layout
from kvstore.pipeline.rope import DynamicNtk, Explicit, Linear, Llama3, LongRope, Rope, Yarn

WEIGHTS, OTHER, TOKENIZER = "a1" * 32, "b2" * 32, "c3" * 32
LORA, LORA_2 = "3f2a" * 16, "77" * 32
replace = msgspec.structs.replace


def rope(scaling: Any = None, **changes: Any) -> Rope:
    return replace(Rope(4, 10000.0, 4, scaling=scaling), **changes)


SCALINGS = (
    None,
    Linear(8.0),
    Llama3(32.0, 1.0, 4.0, 8192),
    Yarn(4.0, 32768, 32.0, 1.0, 1.5, True),
    LongRope((1.0, 1.5), (2.0, 4.0), 4096, 1.19, "short"),
    DynamicNtk(2.0, 4096),
    Explicit((1.0, 8.0)),
)
LAYERS = (
    *(LayerLayout(2, 4, 6, rope=rope(scaling)) for scaling in SCALINGS),
    LayerLayout(2, 4, attention="sliding", window=512, rope=rope()),
)
BASE = Identity(
    weights=WEIGHTS,
    tokenizer=TOKENIZER,
    layout=Layout(LAYERS, "float16", "rope"),
    quantisation="Q4_0",
    adapters=(Adapter(LORA, 0.5), Adapter(LORA_2, 1.0)),
    projector="d4" * 32,
    tenant_salt=b"a secret",
)


def layer(number: int, **changes: Any) -> dict[str, Any]:
    layers = list(LAYERS)
    layers[number] = replace(layers[number], **changes)
    return {"layout": replace(BASE.layout, layers=tuple(layers))}


def scaled(number: int, **changes: Any) -> dict[str, Any]:
    return layer(number, rope=rope(replace(SCALINGS[number], **changes)))


MUTATIONS: dict[str, dict[str, Any]] = {
    "weights": {"weights": OTHER},
    "tokenizer": {"tokenizer": OTHER},
    "quantisation": {"quantisation": "Q8_0"},
    "projector": {"projector": ""},
    "tenant_salt": {"tenant_salt": b"another secret"},
    "codec": {"codec": "fine"},
    "format_version": {"format_version": FORMAT_VERSION + 1},
    f"adapters[{LORA[:16]}…].scale": {"adapters": (Adapter(LORA, 1.0), Adapter(LORA_2, 1.0))},
    f"adapters[{LORA_2[:16]}…]": {"adapters": (Adapter(LORA, 0.5),)},
    "layout.dtype": {"layout": replace(BASE.layout, dtype="bfloat16")},
    "layout.positions": {"layout": replace(BASE.layout, positions="mrope")},
    "layout.layers": {"layout": replace(BASE.layout, layers=LAYERS[:-1])},
    "layout.layers[0].kv_heads": layer(0, kv_heads=3),
    "layout.layers[0].head_dim": layer(0, head_dim=8, rope=replace(rope(), head_dim=8)),
    "layout.layers[0].value_head_dim": layer(0, value_head_dim=None),
    "layout.layers[0].attention": layer(0, attention="chunked", window=99),
    "layout.layers[7].window": layer(7, window=1024),
    "layout.layers[0].rope": layer(0, rope=None),
    "layout.layers[0].rope.head_dim": layer(0, head_dim=8, rope=replace(rope(), head_dim=8)),
    "layout.layers[3].rope.theta": layer(3, rope=rope(SCALINGS[3], theta=1e6)),
    "layout.layers[0].rope.rotary_dim": layer(0, rope=rope(rotary_dim=2)),
    "layout.layers[0].rope.pairing": layer(0, rope=rope(pairing="interleaved")),
    "layout.layers[0].rope.scaling": layer(0, rope=rope(Linear(8.0))),
    "layout.layers[1].rope.scaling": layer(1, rope=rope(DynamicNtk(8.0, 4096))),
    "layout.layers[1].rope.scaling.factor": scaled(1, factor=4.0),
    "layout.layers[2].rope.scaling.factor": scaled(2, factor=8.0),
    "layout.layers[2].rope.scaling.low_freq_factor": scaled(2, low_freq_factor=2.0),
    "layout.layers[2].rope.scaling.high_freq_factor": scaled(2, high_freq_factor=8.0),
    "layout.layers[2].rope.scaling.original_context": scaled(2, original_context=4096),
    "layout.layers[3].rope.scaling.factor": scaled(3, factor=2.0),
    "layout.layers[3].rope.scaling.original_context": scaled(3, original_context=4096),
    "layout.layers[3].rope.scaling.beta_fast": scaled(3, beta_fast=16.0),
    "layout.layers[3].rope.scaling.beta_slow": scaled(3, beta_slow=2.0),
    "layout.layers[3].rope.scaling.attention_factor": scaled(3, attention_factor=None),
    "layout.layers[3].rope.scaling.truncate": scaled(3, truncate=False),
    "layout.layers[4].rope.scaling.short_factor[1]": scaled(4, short_factor=(1.0, 1.6)),
    "layout.layers[4].rope.scaling.long_factor[0] and 1 more": scaled(4, long_factor=(2.5, 4.5)),
    "layout.layers[4].rope.scaling.original_context": scaled(4, original_context=8192),
    "layout.layers[4].rope.scaling.attention_factor": scaled(4, attention_factor=1.2),
    "layout.layers[4].rope.scaling.regime": scaled(4, regime="long"),
    "layout.layers[5].rope.scaling.factor": scaled(5, factor=4.0),
    "layout.layers[5].rope.scaling.original_context": scaled(5, original_context=8192),
    "layout.layers[6].rope.scaling.factors[0]": scaled(6, factors=(1.0000000000000002, 8.0)),
}
"""Each part, by the name that `diff` gives it, and a change of it alone."""

ALSO = {
    "layout.layers[0].head_dim": {"layout.layers[0].rope.head_dim"},
    "layout.layers[0].rope.head_dim": {"layout.layers[0].head_dim"},
    "layout.layers[0].attention": {"layout.layers[0].window"},
}
"""Parts that cannot change without another."""


@pytest.mark.parametrize("part", MUTATIONS)
def test_a_change_of_one_part_changes_the_digest_and_is_named(part: str) -> None:
    changed = replace(BASE, **MUTATIONS[part])
    assert changed.digest() != BASE.digest()
    for ours, theirs in ((BASE, changed), (changed, BASE)):
        assert {difference.part for difference in ours.diff(theirs)} == {part} | ALSO.get(part, set())
    assert changed.diff(changed) == []


def test_no_part_is_left_out_above() -> None:
    """A field added to an identity, a layout or a RoPE has to be tried above."""

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                yield f"{type(value).__name__}.{name}"
                yield from names(getattr(value, name))
        if isinstance(value, tuple):
            for one in value:
                yield from names(one)

    changed: set[str] = set()
    for change in MUTATIONS.values():
        changed.update(_changed_fields(BASE, replace(BASE, **change)))
    assert set(names(BASE)) - changed == {"Adapter.digest"}  # it is what an adapter is told by


def _changed_fields(ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, msgspec.Struct) and type(ours) is type(theirs):
        for name in ours.__struct_fields__:
            if getattr(ours, name) != getattr(theirs, name):
                yield f"{type(ours).__name__}.{name}"
                yield from _changed_fields(getattr(ours, name), getattr(theirs, name))
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        for one, other in zip(ours, theirs, strict=False):
            yield from _changed_fields(one, other)


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    """From few values, so that two are often equal in most parts."""
    scaling = st.sampled_from([None, Linear(8.0), Linear(4.0), LongRope((1.0, 1.5), (2.0, 4.0), 4096, 1.19)])
    ropes = st.none() | st.builds(rope, scaling, theta=st.sampled_from([10000, 10000.0, 5e5]))
    layers = draw(
        st.lists(st.builds(LayerLayout, st.just(2), st.just(4), rope=ropes), min_size=1, max_size=3)
    )
    positions = "rope" if any(layer.rope for layer in layers) else "none"
    adapters = st.builds(Adapter, st.sampled_from([LORA, LORA_2]), st.sampled_from([0, 0.0, -0.0, 1, 1.0]))
    return Identity(
        weights=draw(st.sampled_from([WEIGHTS, WEIGHTS.upper(), OTHER])),
        tokenizer=TOKENIZER,
        layout=Layout(tuple(layers), draw(st.sampled_from(["float16", "bfloat16"])), positions),
        quantisation=draw(st.sampled_from(["", "Q4_0"])),
        adapters=tuple(draw(st.lists(adapters, max_size=2, unique_by=lambda adapter: adapter.digest))),
        tenant_salt=draw(st.sampled_from([b"", b"x"])),
    )


@given(identities(), identities())
def test_digests_are_equal_if_and_only_if_all_parts_are(ours: Identity, theirs: Identity) -> None:
    assert (ours == theirs) == (ours.digest() == theirs.digest()) == (ours.diff(theirs) == [])


@given(identities())
def test_a_round_trip_keeps_the_identity(identity: Identity) -> None:
    again = Identity.from_bytes(identity.to_bytes())
    assert again == identity
    assert again.digest() == identity.digest()


def test_one_number_written_in_two_ways_is_one_identity() -> None:
    layouts = [
        Layout.uniform(layers=1, kv_heads=1, head_dim=4, rope=rope(theta=theta)) for theta in (10000, 1e4)
    ]
    assert len({replace(BASE, layout=layout).digest() for layout in layouts}) == 1


def test_the_order_of_adapters_means_nothing() -> None:
    assert replace(BASE, adapters=BASE.adapters[::-1]).digest() == BASE.digest()


def test_the_digest_of_this_format_version_stays_what_it_is() -> None:
    """Stored KV is found by it: when this fails, FORMAT_VERSION has to be raised."""
    assert FORMAT_VERSION == 2
    assert BASE.digest().hex() == "1fa3d6fa485739727a4926841da26c4c25849a8fd7f1a0bfea8d0968ca7e2a13"


def test_no_two_parts_run_into_one_another() -> None:
    digests = {
        replace(BASE, quantisation=quantisation, projector=projector).digest()
        for quantisation in ("", "Q4_0", "d4" * 32)
        for projector in ("", "d4" * 32)
    }
    assert len(digests) == 6


# Faults seen in the field


def test_kv_of_one_adapter_is_not_another_adapters() -> None:
    """KV was shared across requests with other adapters, and with none."""
    x, y, none = (replace(BASE, adapters=adapters) for adapters in ((Adapter(LORA),), (Adapter(LORA_2),), ()))
    half = replace(BASE, adapters=(Adapter(LORA, 0.5),))
    again = replace(BASE, adapters=(Adapter(LORA, 1.0),))
    assert len({one.digest() for one in (x, y, none, half)}) == 4
    assert again.digest() == x.digest()
    assert [str(part) for part in half.diff(again)] == [f"adapters[{LORA[:16]}…].scale: 0.5 ≠ 1.0"]
    assert [str(part) for part in none.diff(half)] == [f"adapters[{LORA[:16]}…]: absent ≠ scale 0.5"]


def test_a_name_is_not_an_identity(tmp_path: Path) -> None:
    """An adapter, or weights, loaded again under the same name were taken for the old ones."""
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"one")
    before = replace(BASE, adapters=(Adapter(digest_file(file)),), weights=digest_file(file))
    file.write_bytes(b"two")
    after = replace(BASE, adapters=(Adapter(digest_file(file)),), weights=digest_file(file))
    assert before.digest() != after.digest()
    assert {part.part.partition("[")[0] for part in before.diff(after)} == {"adapters", "weights"}
    for fields in (
        {"weights": "llama-3.2-1b"},
        {"tokenizer": "gpt2"},
        {"projector": "clip"},
        {"weights": "ab" * 8},
    ):
        with pytest.raises(
            IdentityError, match=r"is no hex digest of its content; digest_file\(path\) makes one"
        ):
            replace(BASE, **fields)
    with pytest.raises(IdentityError, match="adapter 'my-lora' is no hex digest"):
        Adapter("my-lora")


def test_another_kv_dtype_of_the_same_width_is_another_identity() -> None:
    """float16 pages were read as bfloat16, and caches of another bit width as garbage."""
    changed = {
        dtype: replace(BASE, layout=replace(BASE.layout, dtype=dtype)) for dtype in ("bfloat16", "float32")
    }
    assert BASE.diff(changed["bfloat16"]) == [Difference("layout.dtype", "'float16'", "'bfloat16'")]
    assert len({BASE.digest(), *(one.digest() for one in changed.values())}) == 3


def test_a_tenants_salt_is_kept_nowhere() -> None:
    secret, other = replace(BASE, tenant_salt=b"hunter2"), replace(BASE, tenant_salt=b"swordfish")
    none = replace(BASE, tenant_salt=b"")
    assert len({one.digest() for one in (secret, other, none)}) == 3
    assert [str(part) for part in secret.diff(other)] == ["tenant_salt: not shown ≠ not shown"]
    assert [str(part) for part in secret.diff(none)] == ["tenant_salt: not shown ≠ none"]
    for shown in (repr(secret), str(secret), secret.to_bytes().decode("latin-1"), str(secret.diff(other))):
        assert "hunter2" not in shown


def test_layers_that_differ_alike_are_named_together() -> None:
    layouts = [
        Layout.uniform(layers=28, kv_heads=2, head_dim=4, rope=geometry)
        for geometry in (rope(), rope(theta=1e6))
    ]
    ours, theirs = (replace(BASE, layout=layout) for layout in layouts)
    assert [str(part) for part in ours.diff(theirs)] == [
        "layout.layers[0–27].rope.theta: 10000.0 ≠ 1000000.0"
    ]


def test_what_cannot_be_an_identity_is_refused() -> None:
    with pytest.raises(IdentityError, match="3f2a3f2a3f2a3f2a… is named twice: name it once, with the sum"):
        replace(BASE, adapters=(Adapter(LORA, 0.5), Adapter(LORA, 0.25)))
    for scale in (float("nan"), float("inf")):
        with pytest.raises(IdentityError, match="a finite number is needed"):
            Adapter(LORA, scale)
    for wrong in ("8.0", None, [8.0]):
        layout = Layout.uniform(layers=1, kv_heads=1, head_dim=4, rope=rope(Linear(wrong)))  # type: ignore[arg-type]
        with pytest.raises(IdentityError, match=r"layout: .*rope\.scaling\.factor"):
            replace(BASE, layout=layout)


@given(st.data())
def test_bytes_that_hold_no_identity_are_refused(data: st.DataObject) -> None:
    whole = BASE.to_bytes()
    assert Identity.from_bytes(whole) == BASE
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(IdentityError):
        Identity.from_bytes(whole[:cut])
    with pytest.raises(IdentityError):
        Identity.from_bytes(whole + b"\x00")


def test_parts_of_a_later_version_are_not_dropped_in_silence() -> None:
    parts = msgspec.msgpack.decode(BASE.to_bytes())
    with pytest.raises(IdentityError, match="hold more than an identity of format 2"):
        Identity.from_bytes(msgspec.msgpack.encode({**parts, "rotation": "hadamard"}))


def test_the_text_says_what_it_is() -> None:
    text = str(BASE)
    for part in (
        "a1a1a1a1a1a1a1a1…",
        "Q4_0",
        "3f2a3f2a3f2a3f2a… × 0.5",
        "8 layers",
        "float16",
        "of a tenant",
    ):
        assert part in text


def test_files_are_digested_as_sha256sum_does_with_progress(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10000
    file = tmp_path / "weights"
    file.write_bytes(content)
    steps: list[tuple[int, int]] = []
    assert (
        digest_file(file, lambda done, total: steps.append((done, total)))
        == hashlib.sha256(content).hexdigest()
    )
    assert steps == [(1 << 20, 2560000), (2 << 20, 2560000), (2560000, 2560000)]
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "missing")
