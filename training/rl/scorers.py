"""Who judges a run's answers, made from its file: functions, endpoints and reward models."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

from bestiary.training.data.tokenizer import BaseHFModelTokenizer
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.config import GrpoConfig, RewardSection
from bestiary.training.rl.judges import EndpointJudge, FunctionJudge, Judge
from bestiary.training.rl.reward_model import RewardModel
from bestiary.training.rl.rewards import Chained, Rewards
from bestiary.training.rl.roles import Scorer


def scorer_of(config: GrpoConfig, tokenizer: BaseHFModelTokenizer, device: torch.device, stack: ExitStack) -> Scorer:
    """Whoever judges, in this process: functions and endpoints, then reward models.

    Args:
        stack: closes them.
    """
    section = config.rewards
    bound: dict[str, Any] = {"max_errors": section.max_errors, "window": section.window}
    judges = {
        one.name: judge_of(one) for one in section.functions if one.function is not None or one.endpoint is not None
    }
    rewards = Rewards(judges, tokenizer=tokenizer, **bound)
    stack.callback(rewards.close)
    dtype = config.precision.compute or config.precision.parameters
    models = [
        RewardModel.from_pretrained(one.model, tokenizer, dtype=dtype, device=device, name=one.name, **bound)
        for one in section.functions
        if one.model is not None
    ]
    return Chained([rewards, *models]) if models else rewards


def judge_of(section: RewardSection) -> Judge:
    """A function or an endpoint.

    Raises:
        InvalidRun: a function that cannot be loaded, or an environment variable that is missing.
    """
    common: dict[str, Any] = {"timeout_s": section.timeout_s, "rows": section.rows, "abstains": section.abstains}
    if section.function is not None:
        return FunctionJudge(section.function, processes=section.processes, **common)
    assert section.endpoint is not None
    headers = {}
    if section.token is not None:
        if section.token not in os.environ:
            raise InvalidRun(
                f"rewards: {section.name} has token = {section.token}, and no environment variable has that name.",
                remedy=f"export {section.token}=…, with the token as its value",
            )
        headers = {"Authorization": f"Bearer {os.environ[section.token]}"}
    return EndpointJudge(section.endpoint, requests=section.processes, headers=headers, **common)
