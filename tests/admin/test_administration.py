"""Administration of an open store, and of its directory once it is closed: the same questions, the same answers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kvstore.admin.administration import VERBS, Administration, returns
from kvstore.admin.bare_directory import BareDirectory
from kvstore.admin.held import Held
from kvstore.admin.tree import Node
from kvstore.block import block_key
from kvstore.errors import BudgetError, InvalidRequestError
from kvstore.identity import Adapter
from kvstore.pipeline.recompute import FirstTokens
from kvstore.pipeline.schedule import CallCosts, Windows
from kvstore.quality.reuse import Measurement, Verdict
from kvstore.sent_costs import SentCosts
from kvstore.store import KVStore, open_store
from tests.known_kv import LAYOUT, identity, known_kv, load, prompt, put, small_profile

SYSTEM = prompt(1, 40)
CHATS = [np.concatenate([SYSTEM, prompt(10 + which, 30)]) for which in range(3)]
OTHER = prompt(2, 50)
ADAPTER = "ad" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """Chats that share a system prompt, a text of its own, a tenant's, one under an adapter, and an inexact span."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        for tokens in (*CHATS, OTHER):
            put(opened, tokens, wait=10)
        opened.put_inexact(CHATS[0], known_kv(CHATS[0], opened.identity), [(20, 60)])
        put(opened.view(identity(salt=b"tenant")), OTHER, wait=10)
        put(opened.view(identity(adapters=(Adapter(ADAPTER),))), OTHER, wait=10)
        opened.flush(30)
        yield opened


@pytest.fixture(params=["open", "bare"])
def held(request: pytest.FixtureRequest, store: KVStore) -> Held:
    if request.param == "open":
        return administration(store)
    assert store.path is not None
    store.close()
    return BareDirectory(store.path)


def administration(store: KVStore) -> Administration:
    return Administration(store._shared)


def ours(_: Held) -> str:
    return identity().digest().hex()


# -- looking ---------------------------------------------------------------------------------------------------------


def test_status_adds_up(held: Held) -> None:
    status = held.status()
    blocks = held.ls(limit=1000).blocks
    assert status.blocks == len(blocks) == sum(each.blocks for each in status.identities)
    assert (
        status.tokens == sum(each.tokens for each in blocks) == sum(each.tokens for each in status.identities)
    )
    assert len(status.identities) == 3
    tenants = {each.tenant for each in status.identities}
    assert "" in tenants
    assert len(tenants) == 2
    assert [each.adapters for each in status.identities if each.adapters] == [(ADAPTER,)]
    assert all(each.kv_bytes == LAYOUT.block_bytes(each.tokens) for each in status.identities)


def test_status_tells_what_policies_do_with_moved_runs(store: KVStore) -> None:
    measured = Measurement(FirstTokens(4), 64, 0.01, 0.02, 0.98, 0.95, 0.5, 40, 0.1)
    store.keep_verdict(Verdict(FirstTokens(4), None, (measured,), ("careful: facts get lost",)))
    store.view(msgspec.structs.replace(identity(), codec="int8"))
    assert store.path is not None
    for held in (administration(store), BareDirectory(store.path)):
        found = {each.identity: each.policies for each in held.status().identities}
        for owner in (identity(), msgspec.structs.replace(identity(), codec="int8")):
            policies = found.pop(owner.digest().hex())
            assert (policies["fast"].repair, policies["fast"].measured) == (
                "first 4 tokens of each run",
                measured,
            )
            assert (policies["careful"].repair, policies["careful"].reason) == (
                None,
                "careful: facts get lost",
            )
        assert list(found.values()) == [{}, {}]


def test_explain_reckons_with_windows(held: Held) -> None:
    costs = CallCosts({16: 1.0}, Windows({32: 0.25, 64: 1.0}, least=16))
    asked = held.explain(prompt(99, 48).tolist(), identity=ours(held), costs=SentCosts.of(costs))
    assert asked.cost.compute_seconds == 1.5
    given = msgspec.to_builtins(SentCosts.of(costs))
    assert held.explain(prompt(99, 48).tolist(), identity=ours(held), costs=given).cost == asked.cost


@pytest.mark.parametrize("order", ["key", "recent", "hits", "size"])
def test_pages_give_each_block_once_and_in_order(held: Held, order: str) -> None:
    found = []
    after = None
    while True:
        page = held.ls(order=order, after=after, limit=4)  # type: ignore[arg-type]
        found += page.blocks
        if (after := page.after) is None:
            break
    assert len(found) == held.status().blocks == len({each.block for each in found})
    of = {
        "key": lambda row: row.block,
        "recent": lambda row: -row.last_use,
        "hits": lambda row: -row.hits,
        "size": lambda row: -row.tokens,
    }[order]
    assert [of(row) for row in found] == sorted(of(row) for row in found)


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        ({"identity": identity().digest().hex()[:10]}, lambda row: row.identity == identity().digest().hex()),
        ({"tenant": ""}, lambda row: row.tenant == ""),
        ({"min_tokens": 16}, lambda row: row.tokens == 16),
        ({"max_tokens": 15}, lambda row: row.tokens < 16),
        ({"min_hits": 1}, lambda row: row.hits > 0),
        ({"max_hits": 0}, lambda row: row.hits == 0),
        ({"max_age": 3600.0}, lambda _: True),
        ({"min_age": 3600.0}, lambda _: False),
        ({"tier": "hot"}, lambda row: row.tier == "hot"),
        ({"pinned": True}, lambda row: row.pinned),
    ],
)
def test_filters(held: Held, filters: dict[str, object], fits: Callable[..., bool]) -> None:
    every = held.ls(limit=1000).blocks
    assert held.ls(limit=1000, **filters).blocks == tuple(row for row in every if fits(row))


def test_show_tells_where_a_block_stands(held: Held) -> None:
    first = block_key(identity().digest(), b"", SYSTEM[:16]).hex()
    shown = held.show(first[:12])
    assert shown.serves == "prefix"
    assert shown.token_ids == tuple(SYSTEM[:16].tolist())
    child = held.show(shown.children[0])
    assert child.path == (first,)
    assert child.token_ids == tuple(SYSTEM[16:32].tolist())
    assert child.record is not None
    assert sum(frame.raw for frame in child.frames) == LAYOUT.block_bytes(16)
    inexact = next(row for row in held.ls(limit=1000).blocks if not row.exact)
    assert held.show(inexact.block).serves.startswith("moved")
    with pytest.raises(InvalidRequestError, match="no held block"):
        held.show("zz")
    with pytest.raises(InvalidRequestError, match="more digits"):
        held.show(_shared_digit(held))


def _shared_digit(held: Held) -> str:
    keys = [row.block for row in held.ls(limit=1000).blocks]
    return next(digit for digit in "0123456789abcdef" if sum(key[0] == digit for key in keys) > 1)


def test_the_tree_counts_shared_tokens_once(held: Held) -> None:
    (tree,) = held.tree(identity=ours(held))
    system, other = sorted(tree.nodes, key=lambda node: -node.blocks)
    assert (system.start, system.tokens, len(system.children)) == (0, 40, 3)
    assert all((node.start, node.tokens) == (40, 30) for node in system.children)
    assert (other.tokens, other.children) == (50, ())
    assert tree.inexact == 3
    assert _tokens(system) + _tokens(other) == 40 + 3 * 30 + 50
    assert system.blocks + other.blocks + tree.inexact == len(held.ls(identity=ours(held), limit=1000).blocks)
    (along,) = held.tree(identity=ours(held), prefix=CHATS[1][:45].tolist())
    assert [len(node.children) for node in along.nodes] == [1]
    assert held.tree(identity=ours(held), prefix=prompt(99, 5).tolist())[0].nodes == ()
    (flat,) = held.tree(identity=ours(held), depth=1)
    assert sorted(node.hidden for node in flat.nodes) == [0, 3]


def _tokens(node: Node) -> int:
    return node.tokens + sum(map(_tokens, node.children))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 70), chat=st.integers(0, 2), tail=st.integers(0, 40))
def test_explain_accounts_for_every_token(store: KVStore, cut: int, chat: int, tail: int) -> None:
    """And says of a directory what the open store says."""
    tokens = np.concatenate([CHATS[chat][:cut], prompt(77, tail)])
    admin = administration(store)
    assert store.path is not None
    told = [
        each.explain(tokens.tolist(), identity=identity().digest().hex()).explanation
        for each in (admin, BareDirectory(store.path))
    ]
    for each in told:
        spans = each.spans
        assert sum(span.length for span in spans) == len(tokens)
        assert [span.start for span in spans] == list(np.cumsum([0, *(span.length for span in spans[:-1])]))
        assert each.prefix + each.moved + each.recomputed + each.computed == len(tokens)
    assert told[0].prefix == told[1].prefix == min(store.lookup(tokens).length, len(tokens) - 1)


# -- changing --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_a_purge_then_does(store: KVStore) -> None:
    admin = administration(store)
    tenant = next(each.tenant for each in admin.status().identities if each.tenant)
    for arguments in (
        {"prefix": CHATS[0][:41].tolist(), "identity": identity().digest().hex()},
        {"tenant": tenant},
        {"adapter": ADAPTER[:10]},
        {"older_than": 3600.0},
        {"everything": True},
    ):
        before = admin.status().blocks
        said = admin.purge(**arguments)  # type: ignore[arg-type]
        assert admin.status().blocks == before
        done = admin.purge(**arguments, dry_run=False)  # type: ignore[arg-type]
        assert msgspec.structs.replace(done, dry_run=True) == said
        assert admin.status().blocks == before - done.blocks
        assert done.blocks > 0 or "older_than" in arguments
        store.check()
    assert admin.status().blocks == 0


def test_a_purged_document_leaves_nothing_that_saw_it(store: KVStore) -> None:
    """A withdrawn document whose KV lived on in what came after it, and in other prompts."""
    document = prompt(50, 60)
    before, behind = prompt(51, 20), prompt(52, 30)
    whole = np.concatenate([before, document, behind])
    elsewhere = np.concatenate([prompt(53, 27), document[10:50]])
    put(store, whole)
    put(store, elsewhere)
    admin = administration(store)
    untouched = [load(store, tokens) for tokens in (*CHATS, OTHER)]
    done = admin.purge(document=document.tolist(), dry_run=False)
    assert done.blocks > 0
    assert store.lookup(whole).length <= 16  # the first block ends before the document
    assert store.lookup(elsewhere).length <= 16
    assert [load(store, tokens) for tokens in (*CHATS, OTHER)] == untouched
    assert store.lookup(np.concatenate([prompt(54, 5), document]), moved=True).runs == ()


@pytest.mark.parametrize("tier", ["hot", "warm", "cold"])
def test_purging_a_tier_empties_it_and_keeps_what_lies_elsewhere(store: KVStore, tier: str) -> None:
    admin = administration(store)
    store.promote(store.lookup(CHATS[0]))
    before = admin.status()
    assert before.tiers[tier].blocks
    done = admin.purge(tier=tier, dry_run=False)
    after = admin.status()
    assert after.tiers[tier].blocks == 0
    assert done.blocks == before.tiers[tier].blocks
    assert after.blocks == before.blocks if tier != "cold" else after.blocks > 0
    assert load(store, CHATS[0]) == len(CHATS[0])
    store.check()


def test_contradicting_arguments_are_refused(store: KVStore) -> None:
    admin = administration(store)
    for wrong in ({}, {"everything": True, "tier": "hot"}, {"tier": "lukewarm"}, {"tenant": "nobody"}):
        with pytest.raises(InvalidRequestError):
            admin.purge(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="first digits"):
        admin.pin(SYSTEM.tolist())  # three identities are held


def test_pinned_prefixes_outlive_pressure_and_restarts(tmp_path: Path) -> None:
    """A system prompt that a burst of long documents pushed out."""
    profile = small_profile(hot_bytes=0, warm_bytes=24 * 4096, cold_bytes=700 * 1024, eviction="lru")
    ours = identity().digest().hex()
    longer = np.concatenate([SYSTEM, prompt(9, 20)])

    def press(store: KVStore, seed: int) -> None:
        for which in range(24):
            put(store, prompt(seed + which, 160), wait=10)
            store.flush(30)

    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        admin = administration(store)
        put(store, OTHER, wait=10)
        put(store, SYSTEM, wait=10)
        done = admin.pin(SYSTEM.tolist(), identity=ours)
        assert (done.held, done.changed, done.pinned_bytes) == (40, True, 3 * 16 * LAYOUT.token_bytes)
        put(store, longer, wait=10)  # its third block takes the place of the pinned tail
        press(store, 100)
        assert store.lookup(OTHER).length == 0
        assert store.lookup(longer).length >= 40
        assert {row.start for row in admin.ls(pinned=True).blocks} == {0, 16, 32}
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        admin = administration(store)
        press(store, 200)
        assert load(store, SYSTEM) == 40
        assert {row.start for row in admin.ls(pinned=True).blocks} == {0, 16, 32}
        assert admin.unpin(SYSTEM.tolist(), identity=ours).changed
        assert not admin.unpin(SYSTEM.tolist(), identity=ours).changed
        assert admin.ls(pinned=True).blocks == ()
        store.check()


def test_pins_are_bounded(store: KVStore) -> None:
    admin = administration(store)
    ours = identity().digest().hex()
    limit = admin.status().most_pinned_bytes
    fits = limit // (16 * LAYOUT.token_bytes) * 16
    admin.pin(prompt(5, fits).tolist(), identity=ours)
    with pytest.raises(BudgetError, match="unpin something"):
        admin.pin(prompt(6, 20).tolist(), identity=ours)
    admin.pin(prompt(5, 32).tolist(), identity=ours)  # counts once with the longer one
    assert admin.status().pinned_bytes <= limit


def test_warm_brings_a_prompt_to_memory(store: KVStore) -> None:
    store.demote(store.lookup(OTHER))
    admin = administration(store)
    done = admin.warm(OTHER.tolist(), identity=identity().digest().hex())
    assert (done.tokens, done.held, done.in_memory) == (50, 50, 50)


def test_gc_removes_what_nobody_can_use(store: KVStore) -> None:
    admin = administration(store)
    assert admin.gc().garbage == ()
    assert store.path is not None
    store.demote(store.lookup(OTHER))
    row = store.lookup(OTHER).blocks[0]
    (store.path / "blocks" / row.key[:16].hex()).write_bytes(b"rubbish")
    assert load(store, OTHER) == 0
    said = admin.gc()
    assert [each.why for each in said.garbage] == ["failed a check"]
    assert len(list((store.path / "quarantine").iterdir())) == 1
    admin.gc(dry_run=False)
    assert list((store.path / "quarantine").iterdir()) == []
    assert admin.gc().garbage == ()


def test_verify_of_an_open_store_sets_bad_blocks_aside(store: KVStore) -> None:
    admin = administration(store)
    assert admin.verify().faults == ()
    assert store.path is not None
    key = store.lookup(OTHER).blocks[1].key
    record = store.path / "blocks" / key[:16].hex()
    content = bytearray(record.read_bytes())
    content[-1] ^= 4
    record.write_bytes(content)
    memory = store.lookup(CHATS[0]).blocks[0]
    block = store._namespace.block(memory.number)
    assert block is not None
    store._tiers.raw(block)[5] ^= 1
    found = {fault.block: fault for fault in admin.verify().faults}
    assert {found[key.hex()].kind, found[memory.key.hex()].kind} == {"record", "memory"}
    repaired = admin.verify(repair=True)
    assert repaired.sound
    assert admin.verify().faults == ()
    assert load(store, CHATS[0]) == 70
    assert load(store, OTHER) == 16
    store.check()


# -- portable files --------------------------------------------------------------------------------------------------


def test_what_is_exported_is_imported_bit_for_bit(held: Held, tmp_path: Path) -> None:
    path = tmp_path / "blocks.safetensors"
    done = held.export(str(path))
    assert (done.blocks, done.left_out) == (held.status().blocks, {})
    assert path.stat().st_size == done.nbytes
    with pytest.raises(FileExistsError, match="not overwritten"):
        held.export(str(path))
    tensors = load_file(path)  # the format's own reader
    assert len(tensors) == done.blocks * 2 * len(LAYOUT.layers)
    with open_store(tmp_path / "new", identity=identity(), profile=small_profile()) as store:
        admin = administration(store)
        taken = admin.import_(str(path))
        assert (taken.added, taken.held, taken.refused) == (done.blocks, 0, {})
        assert [load(store, tokens) for tokens in (*CHATS, OTHER)] == [70, 70, 70, 50]
        assert load(store.view(identity(salt=b"tenant")), OTHER) == 50
        again = admin.import_(str(path))
        assert (again.added, again.held) == (0, done.blocks)
        store.flush(30)
        assert admin.verify().faults == ()
        store.check()


def test_export_of_a_prompt_takes_its_path(held: Held, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    done = held.export(str(path), identity=ours(held), prefix=CHATS[1].tolist())
    assert done.tokens == 32 + 16 + 16 + 6
    last = next(
        row for row in held.ls(identity=ours(held), limit=1000).blocks if row.start == 48 and row.tokens == 2
    )
    assert held.export(str(tmp_path / "two.safetensors"), block=last.block).tokens == 50


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_changed_file_is_refused_as_a_whole(
    exported: Path, tmp_path: Path, at: float, bit: int, cut: bool
) -> None:
    """Any bit: of KV, of token ids, of keys, of shapes. Nothing is imported, or only what it always said."""
    path = tmp_path / "changed.safetensors"
    content = bytearray(exported.read_bytes())
    where = int(at * len(content))
    if cut:
        del content[where:]
    else:
        content[where] ^= 1 << bit
    path.write_bytes(content)
    with open_store(None, identity=identity(), profile=small_profile(cold_bytes=0)) as store:
        try:
            administration(store).import_(str(path))
        except InvalidRequestError as error:
            assert str(path) in str(error)  # noqa: PT017
            assert store.lookup(OTHER).length == 0
        else:
            assert load(store, OTHER) == len(OTHER)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "blocks.safetensors"
    with open_store(None, identity=identity(), profile=small_profile(cold_bytes=0)) as store:
        put(store, OTHER)
        administration(store).export(str(path))
    return path


def test_a_file_of_someone_else_is_refused(store: KVStore, exported: Path, tmp_path: Path) -> None:
    admin = administration(store)
    path = tmp_path / "forged.safetensors"
    length = int.from_bytes(exported.read_bytes()[:8], "little")
    header = json.loads(exported.read_bytes()[8 : 8 + length])
    for change, says in (
        ({"format": 9}, "format 9"),
        ({"identities": {}}, "does not describe its identity"),
    ):
        contents = json.loads(header["__metadata__"]["kvstore"]) | change
        forged = header | {"__metadata__": {"kvstore": json.dumps(contents)}}
        packed = json.dumps(forged).encode()
        path.write_bytes(len(packed).to_bytes(8, "little") + packed + exported.read_bytes()[8 + length :])
        with pytest.raises(InvalidRequestError, match=says):
            admin.import_(str(path))
    with pytest.raises(OSError, match="nowhere"):
        admin.import_(str(tmp_path / "nowhere"))


# -- as a daemon has it ----------------------------------------------------------------------------------------------


def test_verbs_are_methods_whose_answers_can_be_sent(store: KVStore, tmp_path: Path) -> None:
    admin = administration(store)
    arguments: dict[str, dict[str, object]] = {
        "show": {"block": admin.ls(limit=1).blocks[0].block},
        "export": {"path": str(tmp_path / "x.safetensors")},
        "import_": {"path": str(tmp_path / "x.safetensors")},
        "purge": {"everything": True},
    }
    ours = {"tokens": OTHER.tolist(), "identity": identity().digest().hex()}
    for verb in VERBS:
        if verb == "rotate_key":  # there is none: see test_encryption
            continue
        given_ = arguments.get(verb) or (ours if verb in ("explain", "pin", "unpin", "warm") else {})
        answer = getattr(admin, verb)(**given_)
        sent = msgspec.msgpack.encode(answer)
        assert msgspec.msgpack.decode(sent, type=returns(verb)) == answer
    with pytest.raises(InvalidRequestError):
        returns("close")


def test_looking_changes_nothing_and_needs_no_right_to_write(store: KVStore, tmp_path: Path) -> None:
    """Tools that opened a directory for writing to look at it, and waited for its owner."""
    assert store.path is not None
    bare = BareDirectory(store.path)
    assert bare.status().owner == str(os.getpid())
    assert bare.verify().faults == ()
    store.close()
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy)
    before = {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))}
    bare = BareDirectory(copy)
    bare.status(), bare.ls(), bare.tree(), bare.verify()
    bare.explain(OTHER.tolist(), identity=identity().digest().hex())
    assert {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))} == before
