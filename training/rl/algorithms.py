"""Algorithms by name: what each one chooses, where it is from, and where implementations of the name differ.

A name stands for an advantage and an `Objective`. Both are data: `named("grpo", clip_high=0.28)` is GRPO with another
bound, and whatever is changed is checked as the whole is. Defaults are those of the paper where it gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.names import known
from bestiary.training.rl.advantages import Aggregate, Scale
from bestiary.training.rl.losses import Objective

AdvantageKind = Literal["group", "leave_one_out", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How rewards become advantages; see `advantages`.

    Attributes:
        kind: group: less the group's mean, divided as `scale` says.   Others: the functions of their names.
        scale, eps: of group.   aggregate: of several reward functions, of group.   gamma: of reinforce_plus_plus.
        kl_coef: weight of KL(π ‖ π_ref) subtracted from rewards, by k1 of the policy that sampled: of the whole answer,
            or at every token under reinforce_plus_plus; 0: no reference.

    Raises:
        InvalidRun: an unknown name, or a number outside its range.
    """

    kind: AdvantageKind = "group"
    scale: Scale = "group"
    eps: float = 1e-6
    aggregate: Aggregate = "sum_then_normalize"
    gamma: float = 1.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in (("kind", AdvantageKind), ("scale", Scale), ("aggregate", Aggregate)):
            known(vars(self)[name], get_args(choices), f"advantage.{name}")
        for name in ("eps", "gamma", "kl_coef"):
            if not 0.0 <= vars(self)[name] <= 1.0:
                raise InvalidRun(f"advantage.{name} = {vars(self)[name]:g}.", remedy="in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """An algorithm as data.

    Attributes:
        name: of the table.   objective, advantage: what it chooses.
        drop_equal_groups: leave out groups whose rewards are equal, for the caller to sample others in their place.
        source: the paper.   differs: what verl 0.9, TRL 1.16 and others do otherwise under this name.
    """

    name: str
    objective: Objective
    advantage: Advantage = field(default_factory=Advantage)
    drop_equal_groups: bool = False
    source: str = ""
    differs: str = ""


ALGORITHMS: Mapping[str, Algorithm] = {
    made.name: made
    for made in (
        Algorithm(
            name="grpo",
            objective=Objective(aggregation="sequence_mean"),
            source="arXiv:2402.03300, equation 3, which also has kl_coef = 0.04 and k3",
            differs="verl's default aggregation is token_mean and it has dual_clip = 3; TRL's loss_type = grpo is "
            "this, its default is dapo, with eps = 1e-4. Both have no reference by default, as here. Under "
            "accumulation TRL averages the means of micro-batches, which weighs their sequences unequally where they "
            "hold unequal numbers; here the divisor is the step's. A group of one: see advantages.group_normalised.",
        ),
        Algorithm(
            name="dapo",
            objective=Objective(aggregation="token_mean", clip_high=0.28),
            drop_equal_groups=True,
            source="arXiv:2503.14476, equations 8 to 13; overlong_penalty is its soft punishment",
            differs="TRL's loss_type = dapo is the aggregation alone: its epsilon_high is epsilon unless given, and it "
            "drops no group. In verl the three parts are options of recipes; its dual_clip = 3 stays.",
        ),
        Algorithm(
            name="dr_grpo",
            objective=Objective(aggregation="sequence_sum"),
            advantage=Advantage(scale="none"),
            source="arXiv:2503.20783; it has no default for max_tokens, the longest answer that is sampled",
            differs="The constant: TRL max_completion_length, SkyRL max_seq_len (both explicit, as here); verl "
            "(seq-mean-token-sum-norm) the width of the mask unless loss_scale_factor is given. TRL's scale_rewards "
            "is to be set to none by hand.",
        ),
        Algorithm(
            name="gspo",
            objective=Objective(level="sequence", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
            source="arXiv:2507.18071, equation 5; the bounds are those of section 5.1",
            differs="verl computes GSPO-token (level = sequence_token): the same value, and the same gradient where an "
            "answer has one advantage. It holds log s at 10 from above, here within ±20; TRL does not hold it. TRL "
            "takes importance_sampling_level = sequence with its own aggregation, dapo by default, under which long "
            "answers count more.",
        ),
        Algorithm(
            name="cispo",
            objective=Objective(kind="cispo", aggregation="token_mean", clip_low=1.0, clip_high=4.0),
            source="arXiv:2506.13585, equation 4: no lower bound; the paper gives no number, 1 + clip_high = 5 is "
            "TRL's advice, after arXiv:2510.13786",
            differs="Bounds of the ratio: TRL [0, epsilon_high], the bound itself; verl [1 − clip_low, 1 + clip_high] "
            "with 0.2 by default; SkyRL [0, 5]; NeMo-RL's guide [0, 6]; tinker absolute thresholds.",
        ),
        Algorithm(
            name="rloo",
            objective=Objective(level="product", aggregation="sequence_mean"),
            advantage=Advantage(kind="leave_one_out"),
            source="arXiv:2402.14740: the answer as one action",
            differs="The paper has no ratio and no bound: log_prob with sequence_sum, which has the same gradient on "
            "policy, up to the constant. TRL's RLOOTrainer is this, with kl_coef = 0.05 in the reward. verl takes its "
            "advantages with its token-level clip; a group of one: see advantages.leave_one_out.",
        ),
        Algorithm(
            name="reinforce_plus_plus",
            objective=Objective(aggregation="token_mean"),
            advantage=Advantage(kind="reinforce_plus_plus", kl_coef=0.01),
            source="arXiv:2501.03262: k1 at every token of the reward, advantages whitened over the batch; "
            "OpenRLHF's init_kl_coef",
            differs="verl has no KL in the reward unless use_kl_in_reward, and averages over tokens of the mini-batch; "
            "TRL has no such trainer. reinforce_plus_plus_baseline takes the group's mean first.",
        ),
        Algorithm(
            name="reinforce_plus_plus_baseline",
            objective=Objective(aggregation="token_mean", kl="k2", kl_coef=0.01),
            advantage=Advantage(kind="reinforce_plus_plus_baseline"),
            source="arXiv:2501.03262: k2 in the loss",
            differs="verl has no reference by default.",
        ),
        Algorithm(
            name="ppo_clip",
            objective=Objective(aggregation="token_mean", dual_clip=3.0),
            advantage=Advantage(kind="reinforce_plus_plus"),
            source="arXiv:1707.06347, equation 7, dual_clip arXiv:1912.09729; without a critic: returns with "
            "γ = λ = 1 and a value of 0, whitened over the batch's tokens",
            differs="verl's vanilla loss, whose advantages come from a critic (gae) by default; TRL's PPO is "
            "experimental and has a critic.",
        ),
    )
}


def named(name: str, **changes: Any) -> Algorithm:
    """An algorithm of the table, with fields of its objective, its advantage or its own changed.

    `kl_coef` is a field of both: `reward_kl_coef` is that of the advantage.

    Raises:
        InvalidRun: an unknown name or field, or a value that the field does not take.
    """
    found = ALGORITHMS[known(name, ALGORITHMS, "algorithm.name")]
    of_objective = {one.name for one in fields(Objective)}
    of_advantage = {one.name for one in fields(Advantage)} - {"kind", "kl_coef"}
    renamed = {"reward_kl_coef": "kl_coef", "advantage": "kind"}
    every = [*of_objective, *of_advantage, *renamed, "drop_equal_groups"]
    objective: dict[str, Any] = {}
    advantage: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key, value in changes.items():
        known(key, every, "algorithm")
        if key in of_objective:
            objective[key] = value
        elif key in of_advantage or key in renamed:
            advantage[renamed.get(key, key)] = value
        else:
            own[key] = value
    return replace(
        found,
        objective=replace(found.objective, **objective),
        advantage=replace(found.advantage, **advantage),
        **own,
    )
