"""Settings: which source wins, and what is said about those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import daemon
from kvstore.config import ConfigError, Settings, load
from kvstore.profile import ANE, PROFILES, Profile


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('profile = "ane"\nhot_bytes = "1 MiB"\nwarm_bytes = 1000\ncold_bytes = "3 GB"\n')
    config = load(
        file,
        {"hot_bytes": 7 << 20, "directory": None},
        {"KVSTORE_HOT_BYTES": "2MiB", "KVSTORE_WARM_BYTES": "2000"},
    )
    device = config.device()
    assert (device.hot_bytes, device.warm_bytes, device.cold_bytes) == (7 << 20, 2000, 3 * 10**9)
    assert (device.block_tokens, device.alignment) == (ANE.block_tokens, ANE.alignment)
    assert config.shown()["hot_bytes"].origin == "--hot-bytes"
    assert config.shown()["warm_bytes"].origin == "KVSTORE_WARM_BYTES"
    assert config.shown()["cold_bytes"].origin == f"{file}, line 4"


def test_without_a_file_all_is_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = load(environment={})
    assert config.device() == Profile()
    assert config.socket == daemon.default_socket()
    assert {setting.origin for setting in config.shown().values()} == {"default", "profile cpu"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("warm_bytes", "lots", "512 MiB"),
        ("warm_bytes", "-5", "number of bytes"),
        ("warm_bytes", "5 parsec", "number of bytes"),
        ("block_tokens", "0", "1 to 4096"),
        ("block_tokens", "100", "multiple of 16"),
        ("profile", "tpu", "openvino-npu"),
        ("codec", "jpeg", "lossless"),
        ("eviction", "random", "least worth"),
        ("log_level", "loud", "warning"),
        ("http", "0.0.0.0:80", "loopback"),
        ("http", "127.0.0.1", "127.0.0.1:9810"),
        ("http", "127.0.0.1:99999", "loopback"),
        ("directory", "", "path is needed"),
        ("hot_bytes", "900 GiB", "lower hot_bytes"),
    ],
)
def test_what_cannot_be_names_the_setting_the_value_and_the_variable(
    name: str, value: str, says: str
) -> None:
    variable = f"KVSTORE_{name.upper()}"
    with pytest.raises(ConfigError) as raised:
        load(environment={variable: value}).device()
    message = str(raised.value)
    assert name in message
    assert variable in message
    assert says in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hot_bytes = true", "line 1"),
        ("\n\nprofile = 3", "line 3"),
        ("[hot_bytes]\nx = 1", "line 1"),
        ("warm_byte = 1", "is warm_bytes meant?"),
        ("xyzzy = 1", "there are directory, socket"),
        ("this is no TOML", "not TOML"),
    ],
)
def test_a_file_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(file, environment={})
    assert str(file) in str(raised.value)
    assert says in str(raised.value)


def test_a_misspelt_variable_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    """It may be someone else's, so it is no error. Nothing is said of what the library reads itself."""
    others = {"KVSTORE_CACHE_DIR": "/x", "KVSTORE_DAEMON": "auto", "KVSTORE_KERNELS": "numpy"}
    load(environment={"KVSTORE_HOT_BYTE": "1", "HOME": "/", **others})
    assert [record.getMessage() for record in caplog.records] == [
        "KVSTORE_HOT_BYTE is no setting; is hot_bytes meant?"
    ]


@given(size=st.integers(0, 1 << 45), unit=st.sampled_from(["", "B", " KiB", "MiB", " gib", "kB", "M"]))
def test_sizes_are_read_as_written(size: int, unit: str) -> None:
    factor = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1000, "m": 10**6}
    config = load(environment={"KVSTORE_COLD_BYTES": f"{size}{unit}"})
    assert config.settings.cold_bytes == size * factor[unit.strip().lower()]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_can_be_chosen(name: str) -> None:
    assert load(environment={"KVSTORE_PROFILE": name}).device() == PROFILES[name]
    assert PROFILES[name].name == name


def test_every_field_of_a_profile_that_is_a_setting_exists() -> None:
    assert set(Settings.__struct_fields__) - {
        "directory",
        "socket",
        "profile",
        "key_file",
        "keyring",
        "embedder",
        "http",
        "log_level",
        "log_format",
    } <= set(Profile.__struct_fields__)
