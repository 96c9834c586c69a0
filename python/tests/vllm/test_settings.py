"""Settings: strict, with a hint, and split between connector and library."""

import re
from pathlib import Path

import pytest

from kvtier.vllm.settings import LIBRARY_SETTINGS, Settings, SettingsError


def test_defaults_and_split():
    s = Settings.parse({"dram_gib": 4, "disk_path": "/x", "min_load_tokens": 64, "required": True})
    assert s.library == {"dram_gib": 4, "disk_path": "/x"}
    assert s.min_load_tokens == 64 and s.required
    d = Settings.parse({})
    assert (d.chunk_tokens, d.min_load_tokens, d.lookup_wait_s) == (256, 512, 2.0)
    assert (d.load_failure_policy, d.save_generated, d.on_reset, d.required) == (
        "recompute",
        True,
        "epoch",
        False,
    )
    assert not d.library and not d.test_flip_byte


@pytest.mark.parametrize(
    "wrong, nearest",
    [
        ("dram_gb", "dram_gib"),
        ("chunk_token", "chunk_tokens"),
        ("Disk_Path", "disk_path"),
        ("lookup_wait", "lookup_wait_s"),
    ],
)
def test_unknown_setting_names_the_nearest(wrong, nearest):
    with pytest.raises(
        SettingsError, match=re.escape(f"unknown setting '{wrong}'; the nearest one is '{nearest}'")
    ):
        Settings.parse({wrong: 1})


@pytest.mark.parametrize(
    "extra",
    [
        {"chunk_tokens": 0},
        {"chunk_tokens": True},
        {"chunk_tokens": "256"},
        {"chunk_tokens": 256.0},
        {"min_load_tokens": -1},
        {"lookup_wait_s": -0.1},
        {"lookup_wait_s": "2"},
        {"lookup_wait_s": False},
        {"required": 1},
        {"load_failure_policy": "retry"},
        {"on_reset": "keep"},
        {"tag": 3},
        {"save_generated": "no"},
    ],
)
def test_values_that_cannot_be_used(extra):
    (key,) = extra
    with pytest.raises(SettingsError, match=repr(key)):
        Settings.parse(extra)


def test_library_settings_are_those_of_the_library():
    """The list is a copy of the library's table; this keeps the two together."""
    source = Path(__file__).parents[3] / "defaults.go"
    if not source.exists():
        pytest.skip("no checkout")
    table = source.read_text().split("var settings = ", 1)[1].split("\nfunc ", 1)[0]
    names = re.findall(r'^\t(?:\w+\(|\{Name: )"(\w+)"', table, re.MULTILINE)
    assert set(names) == LIBRARY_SETTINGS
