"""An alias may carry the settings that a model's makers recommend."""

from __future__ import annotations

import pytest

from llmd.registry.aliases import load_aliases, parse_aliases
from llmd.registry.errors import BadRequest
from llmd.registry.names import ModelName


def test_the_small_model_is_asked_at_the_temperature_of_its_card() -> None:
    alias = load_aliases()[ModelName.parse("smollm2")]
    assert alias.params == {"temperature": 0.2, "top_p": 0.9}


def test_settings_that_are_no_table_are_refused() -> None:
    table = '[[model]]\nnames = ["a"]\nsource = [{ hub = "o/r" }]\nparams = 7\n'
    with pytest.raises(BadRequest, match="alias table here is wrong"):
        parse_aliases(table, "here")
