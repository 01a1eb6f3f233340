"""The bugs a family promises to kill exist, and break something that the family has."""

import fnmatch

import pytest

from bestiary.bridges import get_bridge
from bestiary.verify.planted import CATALOGUE
from bestiary.verify.tiny import tiny_configs

from .checkpoints import FAMILIES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_promised_bug_concerns_the_family(model_type: str) -> None:
    bridge = get_bridge(model_type)
    configs = [bridge.parse(json).decoder for json in tiny_configs(bridge.reference).values()]
    concerned = {bug.id for bug in CATALOGUE if bug.concerns(bridge, configs)}
    promised = {glob: set(fnmatch.filter([bug.id for bug in CATALOGUE], glob)) for glob in bridge.kill_list}
    assert bridge.kill_list
    assert [glob for glob, found in promised.items() if not found] == []
    assert set().union(*promised.values()) <= concerned
