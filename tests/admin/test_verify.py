"""Verify finds every fault that was put in, names it, and repair loses nothing else."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.admin.verify import verify_directory
from kvstore.store import open_store
from tests.known_kv import identity, load

from .injecting import INJECTIONS, OWNERS, PROFILE, PROMPTS, Directory, build


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "kv"
    build(path)
    return path


def damaged(
    pristine: Path, path: Path, kinds: list[str], order: random.Random
) -> tuple[Directory, Counter[str]]:
    """A copy of `pristine` with a fault of each of `kinds`, as far as it has room for them."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(pristine, path)
    directory = Directory(path, order)
    put_in = Counter[str]()
    late = [kind for kind in kinds if kind in ("index damaged", "FORMAT damaged")]  # what others would undo
    for kind in [each for each in kinds if each not in late]:
        put_in.update(kind for _ in [0] if INJECTIONS[kind](directory))
    directory.finish()
    for kind in late:
        if kind == "FORMAT damaged" or not directory.rows_changed:
            put_in.update(kind for _ in [0] if INJECTIONS[kind](directory))
    return directory, put_in


def check(pristine: Path, directory: Directory) -> None:
    """Every fault is found and named; repair leaves a directory that is sound and lacks only what was damaged."""
    before = verify_directory(directory.path)
    named = {fault.entry for fault in before.faults} | {fault.block for fault in before.faults}
    missed = {entry: kind for entry, kind in directory.hit.items() if entry not in named}
    assert not missed, (missed, before.faults)
    assert not before.sound
    assert all(fault.found and fault.cure for fault in before.faults)

    repaired = verify_directory(directory.path, repair=True, block_tokens=PROFILE.block_tokens)
    assert repaired.sound
    assert len(repaired.faults) == len(before.faults)
    after = verify_directory(directory.path)
    assert after.faults == ()
    held = set(os.listdir(directory.path / "blocks"))
    assert set(os.listdir(pristine / "blocks")) - held == directory.lost


def test_what_is_whole_is_found_whole(pristine: Path) -> None:
    found = verify_directory(pristine)
    assert found.faults == ()
    assert found.notes == ()
    assert found.blocks == len(os.listdir(pristine / "blocks")) > 20
    assert found.bytes_read >= found.blocks * 4096


def test_each_of_more_than_500_faults_is_found_and_repaired(pristine: Path, tmp_path: Path) -> None:
    put_in = Counter[str]()
    for trial in range(84):
        order = random.Random(trial)
        kinds = [name for name in INJECTIONS if name not in ("index damaged", "FORMAT damaged")]
        chosen = order.sample(kinds, 8)
        if trial % 4 == 0:
            chosen = [*chosen[:5], "FORMAT damaged"]
        if trial % 4 == 1:
            rowless = [kind for kind in chosen if "row" not in kind]
            chosen = [*rowless, "index damaged"]
        directory, counted = damaged(pristine, tmp_path / "kv", chosen, order)
        put_in += counted
        check(pristine, directory)
    assert put_in.total() >= 500, put_in
    assert min(put_in[kind] for kind in INJECTIONS) >= 10, put_in


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(INJECTIONS)), seed=st.integers(0, 1 << 30))
def test_one_fault_costs_one_entry(pristine: Path, tmp_path: Path, kind: str, seed: int) -> None:
    """And the store that opens afterwards gives right KV for all the rest."""
    directory, put_in = damaged(pristine, tmp_path / "kv", [kind], random.Random(seed))
    assert put_in.total() == 1
    check(pristine, directory)
    with open_store(directory.path, identity=identity(OWNERS[0]), profile=PROFILE) as store:
        held = sum(
            load(store.view(identity(name)), tokens) == len(tokens) for name in OWNERS for tokens in PROMPTS
        )
        assert held >= len(OWNERS) * len(PROMPTS) - 2 * len(
            directory.lost
        )  # a shared block serves two prompts
        store.check()
