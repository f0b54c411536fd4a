"""A store in a daemon does what one of this process does: the tests of `KVStore` and its leases, run over both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon.remote_store import RemoteStore, connect
from tests.known_kv import identity, quiet, small_profile
from tests.kvstore import test_lease, test_store

from .running import daemon

_NOT_HERE = {
    "test_a_lease_that_nobody_released_gives_back_what_it_held": "the daemon sees it with the next request",
}


@pytest.fixture(params=[True, False], ids=["hot in the daemon", "hot in the client"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RemoteStore]:
    with (
        daemon(tmp_path / "kv", small_profile(shares_hot=request.param)) as running,
        connect(running.socket, identity=identity(), fallback="none") as made,
    ):
        assert made.is_connected
        yield made
        quiet(made)  # type: ignore[arg-type]
        stats = made.stats()
        assert (stats.hot.leased, stats.warm.leased, stats.cold.leased) == (0, 0, 0), "a lease was leaked"
        made.check()


for _module in (test_store, test_lease):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name not in _NOT_HERE:
            _needs = inspect.signature(_test).parameters
            if "store" in _needs and "tmp_path" not in _needs:
                globals()[_name] = _test
