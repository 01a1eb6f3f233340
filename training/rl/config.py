"""One file for a run of reinforcement learning: the sections of every run, and who answers, judges and decides.

    model: {src: Qwen/Qwen3-0.6B}
    data:
      tokenizer: {src: Qwen/Qwen3-0.6B}
      sources: [{name: sums, files: sums.jsonl, kind: prompt}]
    rewards:
      functions: [{name: right, function: my_rewards:right}]
    loop: {steps: 100}
    out: runs/sums

A step is a round: prompts, answers to each, rewards, and the optimiser steps on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bestiary.kernels.errors import BestiaryError
from bestiary.training.config import (
    ADAPTERS_OFF,
    CommonConfig,
    Count,
    Dtype,
    LoopSection,
    Positive,
    SampledSection,
    held_out_data,
    placed_common,
    placed_evaluation,
    read_config,
)
from bestiary.training.data.config import DataConfig
from bestiary.training.rl.algorithms import Algorithm, named
from bestiary.training.rl.assess import Overlong
from bestiary.training.rl.mismatch import Correction, CorrectionKind, CorrectionLevel
from bestiary.training.rl.placement import PlacementSection
from bestiary.training.rl.policy_gradient import PolicyGradient
from bestiary.training.sections import Section

Share = Annotated[float, Field(ge=0, le=1)]


class RolloutsSection(SampledSection):
    """Answers of the policy.

    Attributes:
        engine: embedded: the policy's own generator, with its weights as they are; vllm: in this process, with weights
            of its own that are synced after every round.
        n: answers to each prompt.
        stop_ids: tokens that end an answer, beside those of the tokenizer.
        dtype: that vLLM computes in; None: as the policy. Another one needs `algorithm.correction`.
        fp32_head: vLLM's logits in float32 where it computes in less, as the policy's log-probabilities always are.
        tolerance: of the mean difference of log-probabilities between engine and policy; None: 1e-4, in half precision
            5e-2.
        constraint: module:name of a function without arguments that makes a `rollout.Constraint`.
        keep: every round's trajectories, with rewards and advantages, in `out/rollouts`.
        options: of `vllm.LLM`.
    """

    engine: Literal["embedded", "vllm"] = "embedded"
    n: Annotated[int, Field(ge=1)] = 8
    stop_ids: tuple[int, ...] = ()
    dtype: Dtype | None = None
    fp32_head: bool = True
    tolerance: Positive | None = None
    constraint: str | None = None
    keep: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_vllm(self) -> RolloutsSection:
        for name in ("dtype", "options"):
            if getattr(self, name) and self.engine == "embedded":
                raise ValueError(f"{name} is of vllm, and engine = embedded has the policy's own weights; leave it out")
        return self

    @property
    def of_vllm(self) -> dict[str, Any]:
        """What `vllm.LLM` is given."""
        if not self.fp32_head:
            return self.options
        return {**self.options, "hf_overrides": {"head_dtype": "float32", **self.options.get("hf_overrides", {})}}


class CorrectionSection(Section):
    """What becomes of tokens that engine and policy find unequally likely; see `mismatch.Correction`."""

    kind: CorrectionKind = "tis"
    level: CorrectionLevel = "token"
    high: float = 2.0
    low: float = 0.0


class OverlongSection(Section):
    """What becomes of answers that were cut off or nearly so; see `assess.Overlong`, of `rollouts.max_tokens`."""

    masked: bool = False
    cache: Count | None = None
    factor: Positive = 1.0


class AlgorithmSection(Section):
    """How rewards become a step.

    Attributes:
        name: of `bestiary.training.rl.algorithms`: grpo, dapo, dr_grpo, gspo, cispo, rloo, reinforce_plus_plus, …
        options: what is changed of it, by the names of its objective and advantage: clip_high, kl_coef, scale, …
        correction, off_policy, anchor, entropy: as `PolicyGradient`.
        refill: times that a round samples further prompts in place of those whose answers have equal rewards (dapo).
        reference: whom `kl_coef` and `reward_kl_coef` measure the policy against: adapters_off or a checkpoint; None:
            the model before training, without its adapters or read a second time.
    """

    name: str = "grpo"
    options: dict[str, Any] = Field(default_factory=dict)
    correction: CorrectionSection | None = None
    off_policy: Positive | None = None
    anchor: Literal["old", "rollout"] = "old"
    entropy: bool = True
    overlong: OverlongSection = Field(default_factory=OverlongSection)
    refill: Annotated[int, Field(ge=0)] = 0
    reference: str | None = None


class RewardSection(Section):
    """One judge of answers: a function, an endpoint or a reward model; none of them: a reward of the environment.

    Attributes:
        name: of the reward in figures and records.   weight: in the sum.
        function: module:name, see `answer.RewardFunction`.   endpoint: http or https.   model: a checkpoint.
        timeout_s: of a call.   rows: answers in a call.   processes: calls at one time.
        abstains: None says that an answer is not this judge's; else it counts as an error.
        token: name of the environment variable with the bearer token of an endpoint; its value is in no file.
    """

    name: Annotated[str, Field(min_length=1)]
    function: str | None = None
    endpoint: str | None = None
    model: str | None = None
    weight: float = 1.0
    timeout_s: Positive = 30.0
    rows: Count = 64
    processes: Count = 1
    abstains: bool = False
    token: str | None = None

    @model_validator(mode="after")
    def _one(self) -> RewardSection:
        if self.token is not None and self.endpoint is None:
            raise ValueError(f"{self.name} has a token and no endpoint that it is for; leave it out")
        given = [name for name in ("function", "endpoint", "model") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{self.name} has {' and '.join(given)}: one judge, one name")
        return self

    @property
    def judged(self) -> bool:
        """Whether it is given here; else the environment gives it."""
        return any(one is not None for one in (self.function, self.endpoint, self.model))


class RewardsSection(Section):
    """Who judges.

    Attributes:
        functions: with names of their own. None at all: whatever the environment gives, each weighed by 1.
        max_errors: share of the last `window` judgements of one judge that may fail.
    """

    functions: tuple[RewardSection, ...] = ()
    max_errors: Share = 0.05
    window: Count = 256

    @model_validator(mode="after")
    def _named(self) -> RewardsSection:
        names = [one.name for one in self.functions]
        if len(set(names)) < len(names):
            raise ValueError(f"functions are named {', '.join(names)}: each needs a name of its own")
        return self


class ToolsSection(Section):
    """Tools that the policy calls in a conversation, see `tools.Tools`; its chat template says how.

    Attributes:
        functions: module:name each.   calls: in a conversation, at most.
        timeout_s: of a call.   processes: of each function.   fresh: a process for each call.
    """

    functions: Annotated[tuple[str, ...], Field(min_length=1)]
    calls: Count = 64
    timeout_s: Positive = 10.0
    processes: Count = 4
    fresh: bool = False


class EnvironmentSection(Section):
    """The world that answers the policy; without the section an episode is one answer.

    Attributes:
        name: module:name of what makes an `environments.Environment`.   options: given to it, by name.
        apart: each in a process of its own while it is played, which ends when it hangs.   tools: in place of a name.
        at_once: environments at one time; None: one for every episode in flight.
        threads, timeout_s, max_turns: as `episodes.Episodes`; timeout_s also ends processes.
        max_errors: share of the last `window` episodes that errors of their environment may end.
    """

    name: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    apart: bool = False
    tools: ToolsSection | None = None
    at_once: Count | None = None
    threads: Count = 8
    timeout_s: Positive = 60.0
    max_turns: Count = 64
    max_errors: Share = 0.05
    window: Count = 256

    @model_validator(mode="after")
    def _one(self) -> EnvironmentSection:
        if (self.name is None) == (self.tools is None):
            raise ValueError("name, of an environment, or tools, to be called: one of both")
        if self.name is None and (self.options or self.apart):
            raise ValueError("options and apart are of name; leave them out")
        return self


class HeldOutSection(Section):
    """Passes over prompts that are never trained on, answered with the same seeds every time.

    Attributes:
        sources: as those of `data`, whose tokenizer is theirs too.   prompts: the first so many, at most.
        every: rounds; the last one has a pass in any case.   n: answers to each prompt.
        at_start: a pass before the first round too.
        patience: passes without a better reward after which the run ends; None: never.
    """

    sources: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    prompts: Count = 64
    every: Count = 10
    n: Count = 1
    at_start: bool = True
    patience: Count | None = None


class RoundsSection(Section):
    """Rounds, and what happens when something goes wrong.

    Attributes:
        steps: rounds; None: as many as data.epochs gives, counted before the run.
        prompts: of a round.   updates: optimiser steps that they are divided over.   passes: over all of them.
        share_prompts: the policy computes a prompt once for all its answers, where that is less work; not of a model in
            several processes, compiled or with activation checkpointing.
        staleness: rounds that sampling may be ahead of training; 0: it waits for every update.
        restarts: of one role in one round.
        seed: of fresh adapters and dropout.   deterministic: refuse operations that are not.
        on_nan: `skip` leaves the weights where loss or gradient are not finite.
        max_skips: optimiser steps in a row that may be left out, those without anything to train on included.
        evaluation: None: no held-out prompts.
        callbacks: `module:factory` of objects with any of the methods of `controller.Callback`.
        timeout_s: after which a rank gives up waiting for another.
    """

    steps: Count | None = None
    prompts: Count = 8
    updates: Count = 1
    passes: Count = 1
    share_prompts: bool = True
    staleness: Annotated[int, Field(ge=0)] = 0
    restarts: Count = 3
    seed: int = 0
    deterministic: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    max_skips: Count = 10
    evaluation: HeldOutSection | None = None
    callbacks: tuple[str, ...] = ()
    timeout_s: Positive = 600.0

    @model_validator(mode="after")
    def _shared(self) -> RoundsSection:
        if self.updates > self.prompts:
            raise ValueError(f"updates = {self.updates} of {self.prompts} prompts: some would have none")
        return self

    @property
    def loop(self) -> LoopSection:
        """What the policy's trainer reads of it."""
        return LoopSection(
            seed=self.seed, deterministic=self.deterministic, on_nan=self.on_nan, max_skips=self.max_skips
        )


class GrpoConfig(CommonConfig):
    """Everything about a run of reinforcement learning, GRPO unless `algorithm.name` says otherwise."""

    recipe: Literal["grpo"] = "grpo"
    rollouts: RolloutsSection = Field(default_factory=RolloutsSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    rewards: RewardsSection = Field(default_factory=RewardsSection)
    environment: EnvironmentSection | None = None
    loop: RoundsSection = Field(default_factory=RoundsSection)
    placement: PlacementSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GrpoConfig:
        if self.loop.steps is None and self.data.epochs is None:
            raise ValueError("neither loop.steps nor data.epochs is given: the run would have no end")
        if self.parallel.context > 1:
            raise ValueError(
                f"parallel.context = {self.parallel.context} with the recipe grpo: answers are sampled, and judged, as "
                "whole rows; parallel.context = 1, and the processes to parallel.shard"
            )
        self._check_data()
        self._check_rewards()
        self._check_precision()
        try:
            self.objective()
            _ = self.gradient
        except BestiaryError as error:
            raise ValueError(f"algorithm: {error.what} {error.remedy or ''}".strip()) from error
        if self.algorithm.refill and not self.objective().drop_equal_groups:
            raise ValueError(
                f"algorithm.refill = {self.algorithm.refill} and {self.algorithm.name} trains on equal groups too; "
                "algorithm.options.drop_equal_groups=true, or leave it out"
            )
        if self.algorithm.reference is not None and not self.asks_reference:
            raise ValueError(
                f"algorithm.reference = {self.algorithm.reference} and nothing asks for one: algorithm.options.kl_coef "
                "or reward_kl_coef above 0, or leave it out"
            )
        if self.algorithm.reference == ADAPTERS_OFF and self.lora is None:
            raise ValueError("algorithm.reference = adapters_off and the run has no section lora; a checkpoint")
        return self

    def evaluation_data(self) -> DataConfig | None:
        """The data of the passes over held-out prompts: the sources of loop.evaluation, once, read as `data` is."""
        return None if self.loop.evaluation is None else held_out_data(self.data, self.loop.evaluation.sources)

    def _check_data(self) -> None:
        data = self.data
        if data.overflow not in ("error", "drop"):
            raise ValueError(f"data.overflow = {data.overflow}: a part of a prompt is no prompt; error or drop")
        if data.streams != 1:
            raise ValueError(f"data.streams = {data.streams}: prompts have one; loop.prompts says how many a round has")
        if self.rollouts.max_tokens >= data.pack_length:
            raise ValueError(
                f"rollouts.max_tokens = {self.rollouts.max_tokens} leaves no room for a prompt in "
                f"data.pack_length = {data.pack_length}"
            )
        kinds = {"prompt", "chat", "completion", "distillation"}
        for place, held in (("data", data), ("loop.evaluation", self.evaluation_data())):
            for source in () if held is None else held.sources:
                if source.kind not in kinds:
                    raise ValueError(
                        f"{place}.sources: {source.name} is of kind {source.kind}, which has no prompt; one of "
                        f"{', '.join(sorted(kinds))}"
                    )

    def _check_rewards(self) -> None:
        functions = self.rewards.functions
        if self.environment is None and not any(one.judged for one in functions):
            raise ValueError(
                "rewards.functions is empty and there is no environment: nobody judges answers; "
                "rewards: {functions: [{name: right, function: module:name}]}"
            )
        bare = [one.name for one in functions if not one.judged]
        if bare and self.environment is None:
            raise ValueError(f"rewards: {bare[0]} has no function, endpoint or model, and there is no environment")

    def _check_precision(self) -> None:
        policy, engine = self.precision.compute or self.precision.parameters, self.rollouts.dtype
        if engine is not None and engine != policy and self.algorithm.correction is None:
            raise ValueError(
                f"rollouts.dtype = {engine} and the policy computes in {policy or 'that of its checkpoint'}: answers "
                "would be of another distribution; leave it out, or algorithm.correction={kind: tis}"
            )

    def objective(self) -> Algorithm:
        """The algorithm; the constant that `sequence_sum` divides by is the longest answer, unless it is given.

        Raises:
            InvalidRun: an unknown name or option, or a value that it does not take.
        """
        section, options = self.algorithm, dict(self.algorithm.options)
        if "max_tokens" not in options and self.environment is None:
            options["max_tokens"] = self.rollouts.max_tokens
        return named(section.name, **options)

    @property
    def gradient(self) -> PolicyGradient:
        """The recipe of the policy's steps."""
        section = self.algorithm
        correction = None if section.correction is None else Correction(**section.correction.model_dump())
        return PolicyGradient(
            self.objective(),
            correction=correction,
            off_policy=section.off_policy,
            anchor=section.anchor,
            entropy=section.entropy,
        )

    @property
    def overlong(self) -> Overlong:
        """As `assess` takes it."""
        return Overlong(max_tokens=self.rollouts.max_tokens, **self.algorithm.overlong.model_dump())

    @property
    def weights(self) -> dict[str, float] | None:
        """Of the rewards by name; None: 1 each, whatever the environment gives."""
        return {one.name: one.weight for one in self.rewards.functions} or None

    @property
    def asks_reference(self) -> bool:
        """Whether the algorithm measures the policy against a reference."""
        algorithm = self.objective()
        return bool(algorithm.objective.kl_coef or algorithm.advantage.kl_coef)

    @property
    def reference(self) -> str | None:
        """adapters_off or a checkpoint; None: nothing asks for one."""
        if not self.asks_reference:
            return None
        return self.algorithm.reference or (self.model.named if self.lora is None else ADAPTERS_OFF)

    @property
    def beside(self) -> tuple[str, ...]:
        """Checkpoints that are loaded beside the policy."""
        reference = self.reference
        models = [one.model for one in self.rewards.functions if one.model is not None]
        return (*(() if reference in (None, ADAPTERS_OFF) else (str(reference),)), *models)


def load_grpo_config(file: Path, overrides: Sequence[str] = ()) -> GrpoConfig:
    """A run's file with changes from the command line; see `load_run_config`.

    Raises:
        InvalidRun: names the first wrong key or value, an unknown key with the nearest known one.
    """
    config, folder = read_config(GrpoConfig, file, overrides, recipe="grpo"), file.parent
    update = placed_common(config, folder)

    def placed(src: str) -> str:
        return str(folder / src) if (folder / src).is_dir() else src

    if config.algorithm.reference is not None:
        section = config.algorithm.model_copy(update={"reference": placed(config.algorithm.reference)})
        update["algorithm"] = section
    functions = tuple(
        one if one.model is None else one.model_copy(update={"model": placed(one.model)})
        for one in config.rewards.functions
    )
    held_out = placed_evaluation(config.evaluation_data(), config.loop.evaluation, folder)
    if held_out is not None:
        update["loop"] = config.loop.model_copy(update={"evaluation": held_out})
    update["rewards"] = config.rewards.model_copy(update={"functions": functions})
    return config.model_copy(update=update)
