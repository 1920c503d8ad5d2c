"""Whatever stands in a config.json, a reader of any dialect gives a config or one sentence, never a traceback."""

import copy
import json

import pytest
from factories import drafter_config
from factories_dialects import muse_config, nemo_config, speculators_config

from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.overrides import NO_OVERRIDES
from dflash2.converter.dialects.table import read_config
from dflash2.errors import CheckpointError

JUNK = [None, True, False, -1, 0, 1, 2, 7.5, 1e400, float("nan"), 2**40, "", "x", [], {}, [None], [-1], {"a": 1}, [[0]]]
CONFIGS = {
    "z-lab v1": drafter_config(1),
    "z-lab v2": drafter_config(2),
    "muse": muse_config(),
    "nemo": nemo_config(2),
    "speculators v1": speculators_config(1),
    "speculators v2": speculators_config(2),
}


def places(value, path=()):
    """Every key below `value`, as a path."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("dialect", CONFIGS)
def test_junk_in_any_key_is_read_or_refused_in_one_sentence(tmp_path, dialect):
    path = tmp_path / "config.json"
    refused = 0
    for place in places(CONFIGS[dialect]):
        for junk in JUNK:
            config = copy.deepcopy(CONFIGS[dialect])
            inner = config
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = junk
            path.write_text(json.dumps(config))
            try:
                assert isinstance(read_config(tmp_path, NO_OVERRIDES)[1], DrafterConfig)
            except CheckpointError as error:
                assert str(error).startswith(f"{path}: ")
                assert str(error).endswith(".")
                refused += 1
    assert refused > 100
