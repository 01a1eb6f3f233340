"""Losses, advantages and corrections against verl's `core_algos` and TRL's trainers, where definitions agree."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

from bestiary.training.rl import advantages as ours
from bestiary.training.rl.algorithms import named
from bestiary.training.rl.divergence import divergence
from bestiary.training.rl.losses import Objective, policy_loss
from bestiary.training.rl.mismatch import Correction, on_policy, parity

from .answers import LENGTHS, Answers, answers

MAX_TOKENS = 11
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum-norm",
}


def units(given: Answers, objective: Objective) -> float:
    return float(given.mask.sum()) if objective.unit == "tokens" else float(len(given.mask))


def assert_agree(given: Answers, objective: Objective, expected: Tensor, rtol: float = 1e-7, **more) -> None:
    """Value and gradient of our sum divided by the units, and of theirs. verl divides by counts + 1e-8."""
    found = policy_loss(given.stream(), objective, **more).total / units(given, objective)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)
    (gradient,) = torch.autograd.grad(found, given.log_probs, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected, given.log_probs)
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(gradient, theirs, rtol=rtol, atol=1e-12)


def actor(low: float, high: float, dual: float = 3.0, scale: int = MAX_TOKENS) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )
    config.global_batch_info["loss_scale_factor"] = scale
    return config


# ------------------------------------------------------------------ losses of verl


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_are_those_of_verl(name: str, aggregation: str, weighted: bool) -> None:
    """PPO-clip with asymmetric bounds and dual clip, GSPO-token, CISPO, in each aggregation, with and without TIS."""
    given = answers(spread=0.7).leaf()
    low, high, dual = (0.02, 0.03, 3.0) if name == "gspo" else (0.2, 0.28, 1.6)
    config = actor(low, high, dual)
    if aggregation != "sequence_sum":
        config.global_batch_info.pop("loss_scale_factor")
    weights = torch.rand_like(given.mask) if weighted else None
    expected, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=given.old,
        log_prob=given.log_probs,
        advantages=given.advantages,
        response_mask=given.mask,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config,
        rollout_is_weights=weights,
    )
    objective = Objective(
        kind="cispo" if name == "cispo" else "clip",
        level="sequence_token" if name == "gspo" else "token",
        clip_low=low,
        clip_high=high,
        dual_clip=dual if name == "vanilla" else None,
        aggregation=aggregation,
        max_tokens=MAX_TOKENS,
    )
    packed = None if weights is None else given.packed(weights)
    assert_agree(given, objective, expected, weights=packed)
    if aggregation == "token_mean":
        found = policy_loss(given.stream(), objective).metrics
        tokens = float(given.mask.sum())
        clipped = float(found["clip_low"] + found["clip_high"]) / tokens
        assert clipped == pytest.approx(metrics["actor/pg_clipfrac"], rel=1e-5)
        assert float(found["approx_kl"]) / tokens == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6)
        assert float(found["clip_dual"]) / tokens == pytest.approx(metrics["actor/pg_clipfrac_lower"], rel=1e-5)
        assert clipped > 0
        assert (float(found["clip_dual"]) > 0) == (name == "vanilla")


def test_reinforce_is_that_of_verl() -> None:
    given = answers().leaf()
    config = actor(0.2, 0.2)
    weights = torch.rand_like(given.mask)
    expected, _ = core_algos.compute_policy_loss_reinforce(
        given.rollout,
        given.log_probs,
        given.advantages,
        given.mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=weights,
    )
    assert_agree(given, Objective(kind="log_prob"), expected, weights=given.packed(weights))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+"])
def test_estimates_of_the_divergence_are_those_of_verl(kind: str) -> None:
    given = answers().leaf()
    expected = core_algos.kl_penalty(given.log_probs, given.reference, kind)
    found = divergence(given.log_probs, given.reference, kind)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), given.log_probs)
    (theirs,) = torch.autograd.grad(expected.sum(), given.log_probs)
    torch.testing.assert_close(gradient, theirs, rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------ losses of TRL


def trainer(**more) -> SimpleNamespace:
    """What TRL's loss code asks of the trainer it belongs to."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        sync_gradients=True,
    )
    return SimpleNamespace(
        **{
            "model": SimpleNamespace(training=True),
            "accelerator": accelerator,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": MAX_TOKENS,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
            "entropy_coef": 0.0,
            **more,
        }
    )


def trl_loss(given: Answers, *, delta: float | None = None, weighted: bool = True, **more) -> Tensor:
    made = trainer(args=SimpleNamespace(delta=delta, use_bias_correction_kl=weighted, steps_per_generation=1), **more)
    made._get_per_token_logps_and_entropies = lambda *args, **options: (given.log_probs, given.entropy, None)
    made.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    made.get_high_entropy_mask = None
    ids = torch.zeros_like(given.mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": given.mask.long(),
        "advantages": given.advantages[:, 0],
        "old_per_token_logps": given.old,
        "ref_per_token_logps": given.reference,
        "sampling_per_token_logps": given.rollout,
        "num_items_in_batch": given.mask.sum(),
    }
    return GRPOTrainer._compute_loss(made, None, inputs)


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("grpo", {"clip_high": 0.28}, {"loss_type": "grpo"}),
        ("grpo", {"clip_high": 0.28, "dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
        ("dapo", {}, {"loss_type": "dapo"}),
        ("dr_grpo", {"clip_high": 0.28, "max_tokens": MAX_TOKENS}, {"loss_type": "dr_grpo"}),
        ("cispo", {"clip_high": 0.4}, {"loss_type": "cispo", "epsilon_high": 1.4}),
        (
            "gspo",
            {"clip_low": 0.02, "clip_high": 0.03},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 0.02,
                "epsilon_high": 0.03,
            },
        ),
    ],
)
@pytest.mark.parametrize("kl", ["none", "k3", "weighted"])
def test_losses_are_those_of_trl(name: str, changes: dict, options: dict, kl: str) -> None:
    given = answers(spread=0.5).leaf()
    changes = changes | ({} if kl == "none" else {"kl_coef": 0.05, "kl_weighted": kl == "weighted"})
    expected = trl_loss(given, beta=0.0 if kl == "none" else 0.05, weighted=kl == "weighted", **options)
    objective = named(name, **changes).objective
    assert_agree(given, objective, expected, rtol=1e-9, reference=given.packed(given.reference))


def test_off_policy_sequences_are_left_out_as_in_trl() -> None:
    given = answers(spread=0.5)
    signs = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, 1.0])[:, None]
    given = replace(given, advantages=given.advantages.abs() * signs).leaf()
    expected = trl_loss(given, loss_type="dapo", off_policy_mask_threshold=0.05)
    stream = given.stream()
    kept = on_policy(stream.log_probs, given.packed(given.rollout), stream, 0.05)
    dropped = 1 - stream.means(kept.double())
    assert 0 < int(dropped.sum()) < len(LENGTHS)
    assert_agree(given, named("dapo").objective, expected, rtol=1e-9, weights=kept.double())


def test_the_loss_of_rloo_is_that_of_trl() -> None:
    given = answers(spread=0.2).leaf()
    made = trainer(args=SimpleNamespace())
    made._get_per_token_logps_and_entropies = lambda *args, **options: (given.log_probs, given.entropy, None)
    ids = torch.zeros_like(given.mask, dtype=torch.int64)
    expected = RLOOTrainer._compute_loss(
        made,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": given.mask.long(),
            "advantages": given.advantages[:, 0],
            "old_logps": (given.old * given.mask).sum(1),
        },
    )
    assert_agree(given, named("rloo", clip_high=0.28).objective, expected, rtol=1e-9)


# ------------------------------------------------------------------ advantages

GROUPS = np.array(["a", "b", "a", "b", "b", "a"])


def drawn_rewards(columns: int | None = None) -> Tensor:
    shape = (len(LENGTHS),) if columns is None else (len(LENGTHS), columns)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def at_the_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """verl's token-level rewards."""
    found = torch.zeros_like(mask)
    found[torch.arange(len(mask)), mask.sum(1).long() - 1] = rewards
    return found


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_answers_are_those_of_verl(name: str) -> None:
    given, rewards, groups = answers(), drawn_rewards(), ours.group_index(GROUPS.tolist())
    ends = at_the_end(rewards, given.mask)
    if name == "rloo":
        expected, _ = core_algos.compute_rloo_outcome_advantage(ends, given.mask, GROUPS)
        found = ours.leave_one_out(rewards, groups)
    else:
        expected, _ = core_algos.compute_grpo_outcome_advantage(
            ends, given.mask, GROUPS, norm_adv_by_std_in_grpo=name == "grpo"
        )
        found = ours.group_normalised(rewards, groups, scale="group" if name == "grpo" else "none")
    torch.testing.assert_close(found[:, None] * given.mask, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_advantages_of_tokens_are_those_of_verl(gamma: float, kl_coef: float) -> None:
    """REINFORCE++ with the divergence inside the reward."""
    given, rewards = answers(), drawn_rewards()
    scores = at_the_end(rewards, given.mask)
    ends = core_algos.compute_rewards(scores, given.old * given.mask, given.reference * given.mask, kl_coef)
    expected, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        ends, given.mask, config=SimpleNamespace(gamma=gamma)
    )
    penalties = [kl_coef * (given.old - given.reference)[row, :length] for row, length in enumerate(LENGTHS)]
    found = ours.reinforce_plus_plus(rewards, LENGTHS, penalties=penalties, gamma=gamma)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row], expected[row, :length], rtol=1e-7, atol=1e-9)


def test_advantages_less_the_group_then_whitened_are_those_of_verl() -> None:
    given, rewards, groups = answers(), drawn_rewards(), ours.group_index(GROUPS.tolist())
    expected, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        at_the_end(rewards, given.mask), given.mask, GROUPS
    )
    found = ours.reinforce_plus_plus_baseline(rewards, groups, LENGTHS)
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(found[row], expected[row, :length], rtol=1e-7, atol=1e-9)


# ------------------------------------------------------------------ mismatch


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "low"), [("tis", 0.0), ("mis", 0.8)])
def test_weights_are_those_of_verl(kind: str, level: str, low: float) -> None:
    """Truncated, and verl's IcePop, which is masked importance sampling at either level."""
    given = answers()
    threshold = "1.4" if kind == "tis" else "0.8_1.4"
    expected, metrics = compute_rollout_correction_weights(
        given.old - given.rollout, given.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    stream = given.stream()
    found = Correction(kind=kind, level=level, high=1.4, low=low).weights(
        given.packed(given.old), given.packed(given.rollout), stream
    )
    torch.testing.assert_close(found[stream.trained], given.packed(expected)[stream.trained], rtol=1e-6, atol=0)
    assert bool((found[stream.trained] == (1.4 if kind == "tis" else 0.0)).any())
    if kind == "tis" and level == "token":
        weights = found[stream.trained]
        share = float(weights.mean() ** 2 / (weights**2).mean())
        assert share == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-6)


def test_the_geometric_mask_is_that_of_verl() -> None:
    """verl bounds π_rollout / π, the inverse of our u."""
    given = answers()
    mask, _ = compute_rollout_rejection_mask(
        given.old - given.rollout, given.mask, rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.1}_{1 / 0.9}"
    )
    stream = given.stream()
    found = Correction(kind="mis", level="geometric", low=0.9, high=1.1).weights(
        given.packed(given.old), given.packed(given.rollout), stream
    )
    kept = stream.trained & (found > 0)
    assert torch.equal(kept, (given.packed(mask) == 1) & stream.trained)
    assert 0 < int(kept.sum()) < int(stream.trained.sum())
    own = (given.packed(given.old) - given.packed(given.rollout)).exp()
    torch.testing.assert_close(found[kept], own[kept])


def test_parity_figures_are_those_of_verl() -> None:
    given = answers()
    expected = compute_offpolicy_metrics(given.old, given.rollout, given.mask)
    found = parity(given.old, given.rollout, given.mask == 1).figures()
    assert found["mismatch/kl"] == pytest.approx(expected["kl"], rel=1e-6)
    assert found["mismatch/kl3"] == pytest.approx(expected["k3_kl"], rel=1e-6)
    delta = (given.old - given.rollout)[given.mask == 1]
    assert found["mismatch/max"] == pytest.approx(float(delta.abs().max()))
    assert found["mismatch/mult_error"] == pytest.approx(float(delta.abs().exp().mean()))
    assert math.isclose(found["mismatch/mean"], float(delta.abs().mean()))
