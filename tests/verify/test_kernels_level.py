"""Level K: optimised implementations against our reference; what it must find, and what it must not forget."""

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.kernels.dispatch import OPERATIONS, Operation
from bestiary.verify.aligned import HEAD_DIM, VARIANTS, aligned_configs
from bestiary.verify.kernel_runs import REFERENCES, Bench
from bestiary.verify.levels.k_kernels import PATHS, multiple
from bestiary.verify.planted.kernels import BUGS
from bestiary.verify.run import run
from bestiary.verify.self_test import plant
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_configs
from bestiary.verify.verdict import Exit
from tests.verify.families import FAMILIES, POOL


def _bench(family, variant="vocab+0"):
    bridge = get_bridge(family)
    side = OurSide(bridge)
    config = side.decoder_config(aligned_configs(bridge.reference)[variant])
    return Bench(lambda c: bridge.decoder(c, dtype=torch.float64), config, 0)


# ------------------------------------------------------------------ what runs


@pytest.mark.slow
@pytest.mark.parametrize(("family", "seed"), [(family, 123 if family == "qwen3" else 0) for family in FAMILIES])
def test_a_family_passes_and_the_verdict_counts_every_path(family, seed):
    """For one family under another seed than the one with which `make verify` accepts it."""
    verdict = run(family, "K", seed, pool=POOL)
    assert verdict.exit_code == Exit.PASS, [item for level in verdict.levels for item in level.findings]
    ran = {(path.operation, path.implementation) for path in verdict.kernels if path.status == "ran" and path.calls}
    named = {(path.operation, path.implementation): path.status for path in verdict.kernels}
    assert set(named) == {(name, other) for name, listed in OPERATIONS.items() for other in listed.optimised}
    assert named["norm", "triton"] == "another device"
    assert {("attention", "documents"), ("attention", "flex"), ("norm", "lean"), ("log_prob", "chunked")} <= ran
    assert (("experts", "grouped") in ran) == ("moe" in family or family == "gpt_oss")
    assert (named["attention", "sdpa"] == "another architecture") == (family == "gpt_oss"), "sdpa has no sinks"


def test_every_implementation_for_this_device_has_a_probe():
    reached = {(path.operation, path.implementation) for path in PATHS}
    assert reached == {(name, other) for name, listed in OPERATIONS.items() for other in listed.on("cpu")}


def test_an_implementation_without_a_probe_fails_the_level(monkeypatch):
    norm = OPERATIONS["norm"]
    more = Operation(norm.reference, {**norm.optimised, "vectorised": ("cpu",)})
    monkeypatch.setitem(OPERATIONS, "norm", more)
    verdict = run("qwen3", "K", only=["dispatch/norm=vectorised"], pool=POOL)
    assert verdict.exit_code == Exit.NUMERIC
    assert "no probe of level K reaches it" in verdict.levels[0].findings[0].detail


# ------------------------------------------------------------------ aligned configs


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_aligned(family):
    bridge = get_bridge(family)
    configs = {name: bridge.parse(raw).decoder for name, raw in aligned_configs(bridge.reference).items()}
    assert {config.vocab_size % 64 for config in configs.values()} == {0, 1, 63}
    assert set(configs) == set(VARIANTS)
    for config in configs.values():
        sizes = [config.hidden_size, config.intermediate_size]
        sizes += [config.moe.intermediate_size] if config.moe is not None else []
        assert all(size * 2 % 16 == 0 for size in sizes), "rows of 16 bytes in bfloat16"
        assert config.attention.head_dim == HEAD_DIM == 64
    assert {config.attention.num_heads // config.attention.num_kv_heads for config in configs.values()} == {1, 2, 4}


def test_weights_are_the_same_numbers_in_every_dtype():
    bench = _bench("qwen3")
    exact = dict(bench.model(torch.float64).named_parameters())
    for dtype in (torch.float32, torch.bfloat16):
        for name, parameter in bench.model(dtype).named_parameters():
            assert torch.equal(parameter.double(), exact[name]), name


def test_routers_follow_the_experts_of_the_truth():
    bench = _bench("qwen3_moe")
    bench.truth("loss")
    routes = bench._routes["loss"]
    assert len(routes.chosen) == 2
    name, kept = next(iter(routes.chosen.items()))
    routes.chosen[name] = (kept + 1) % 8
    moved = bench.run("loss", torch.float64, REFERENCES)
    assert not torch.allclose(moved.values["loss"], bench.truth("loss").values["loss"])


# ------------------------------------------------------------------ the rule


def test_an_error_is_measured_in_errors_of_the_reference():
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    theirs = (exact + 1e-5).float()
    twice = multiple((exact + 4e-5).float(), theirs, exact, torch.float32)
    assert 3.9 < twice < 4.1
    assert multiple(exact + 1e-9, theirs, exact, torch.float64) == pytest.approx(1e-9 / 1.5, rel=0.1)


def test_a_reference_that_is_exact_by_luck_leaves_room_for_one_rounding():
    exact = torch.linspace(1, 2, 100, dtype=torch.float64).float().double()
    rounded = exact * (1 + torch.finfo(torch.float32).eps / 12**0.5)
    assert multiple(rounded, exact, exact, torch.float32) < 2
    assert multiple(exact * (1 + 1e-6), exact, exact, torch.float32) > 3


def test_what_is_missing_is_infinitely_far():
    exact = torch.ones(4, dtype=torch.float64)
    assert multiple(torch.ones(3), torch.ones(4), exact, torch.float32) == float("inf")
    assert multiple(exact * float("nan"), exact, exact, torch.float32) == float("inf")


# ------------------------------------------------------------------ planted bugs


def _concerned():
    for family in FAMILIES:
        bridge = get_bridge(family)
        configs = [bridge.parse(raw).decoder for raw in tiny_configs(bridge.reference).values()]
        yield from ((family, bug) for bug in BUGS if bug.concerns(bridge, configs))


@pytest.mark.parametrize(("family", "bug"), [pytest.param(f, b, id=f"{f}-{b.id}") for f, b in _concerned()])
def test_a_bug_of_one_implementation_is_killed_and_named(family, bug):
    kill = plant(family, bug, pool=POOL)
    assert kill.killed, kill
    assert kill.named, kill
