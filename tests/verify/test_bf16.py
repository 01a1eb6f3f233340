"""V7: what the budget counts, that routing is forced, and that bugs of narrow arithmetic alone die there."""

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.models import Decoder
from bestiary.verify.levels.v7_bf16 import Routing
from bestiary.verify.planted.narrow import BUGS
from bestiary.verify.run import run
from bestiary.verify.self_test import _first_case, plant
from bestiary.verify.tiny import tiny_configs
from bestiary.verify.verdict import Exit
from tests.verify.families import FAMILIES, POOL


def _concerned():
    for family in FAMILIES:
        bridge = get_bridge(family)
        configs = [bridge.parse(raw).decoder for raw in tiny_configs(bridge.reference).values()]
        yield from ((family, bug) for bug in BUGS if bug.concerns(bridge, configs))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_our_error_is_within_the_budget_for_another_seed(family):
    """The other two: among all levels, in `test_run`."""
    verdict = run(family, "V7", seed=77)
    assert verdict.exit_code == Exit.PASS, verdict.levels[0].findings
    assert verdict.levels[0].passed == verdict.levels[0].planned


@pytest.mark.parametrize(("family", "bug"), list(_concerned()), ids=lambda item: getattr(item, "id", item))
def test_a_bug_of_narrow_arithmetic_is_killed_and_named(family, bug):
    kill = plant(family, bug, pool=POOL)
    assert kill.killed
    assert kill.named


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_no_other_level_sees_it(bug):
    """Each is right in float32 and float64: that is why this level exists."""
    family = next(family for family, other in _concerned() if other is bug)
    cases = _first_case(family, bug)
    assert run(family, "V2,V6", cases=cases, mutate_ours=bug.ours, pool=POOL).exit_code == Exit.PASS


@pytest.mark.slow
def test_a_wrong_weight_breaks_the_budget():
    def worse(model: Decoder) -> None:
        model.model.layers[0].mlp.down_proj.weight.data.mul_(1.05)

    verdict = run("qwen3", "V7", mutate_ours=lambda side: side.model(worse), pool=POOL)
    assert verdict.exit_code == Exit.NUMERIC
    assert {finding.check.partition("/")[2] for finding in verdict.levels[0].findings} >= {"rms"}


def test_choices_are_seen_and_answered_in_order():
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]])
    given = torch.tensor([[1, 2], [0, 1]])
    with Routing(2) as seen:
        free = scores.topk(2, dim=-1)
        torch.topk(torch.arange(3.0), 1)  # of no token
    assert len(seen.chosen) == 1
    assert torch.equal(seen.chosen[0], free.indices)
    with Routing(2, [given, free.indices]):
        first, second = torch.topk(scores, 2, dim=-1, sorted=False), scores.topk(2, dim=-1)
    assert torch.equal(first.indices, given)
    assert torch.equal(first.values, torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert torch.equal(second.values, free.values)
