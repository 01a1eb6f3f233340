"""One file for every recipe: what is trained, on what, how, where; checked before anything is loaded.

    model: {src: Qwen/Qwen3-0.6B}
    data:
      tokenizer: {src: Qwen/Qwen3-0.6B}
      sources: [{name: talks, files: talks.jsonl, kind: chat}]
    out: runs/first

is a whole run: every other key has a default. The same keys stand on the command line, dotted: `optim.lr=1e-5`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, model_validator

from bestiary.bridges.hub import at_revision
from bestiary.models.config import LoRAConfig
from bestiary.models.recomputation import Checkpointing, Part
from bestiary.training.data.config import DataConfig, placed_in
from bestiary.training.errors import InvalidRun
from bestiary.training.rl.placement import BesideSection
from bestiary.training.sections import Section, override, read_mapping, validated

RecipeName = Literal["sft", "dpo", "kto", "reward", "distill"]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ADAPTERS_OFF = "adapters_off"
Count = Annotated[int, Field(ge=1)]
C = TypeVar("C", bound="CommonConfig")
S = TypeVar("S", bound=Section)
FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty")


class ModelSection(Section):
    """Which weights.

    Attributes:
        src: checkpoint folder or hub id.   revision: of the hub; None: the newest, or in a run that goes on its own.
        checkpointing: what of a block is computed again in the backward pass, in place of being kept: `full` all of it,
            `selective` all but attention's scores, `attention` or `mlp` the one half of it.
        checkpoint_every: of the blocks, the first and each so many'th.   checkpoint_first: of so many; None: of all.
        compile: each block by torch.compile.
    """

    src: str
    revision: str | None = None
    checkpointing: Literal["none", "full", "selective", "attention", "mlp"] = "none"
    checkpoint_every: Count = 1
    checkpoint_first: Count | None = None
    compile: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ModelSection:
        if self.checkpointing == "none" and (self.checkpoint_every, self.checkpoint_first) != (1, None):
            raise ValueError("checkpoint_every and checkpoint_first say of which blocks, and checkpointing = none")
        return self

    @property
    def named(self) -> str:
        """Source and revision in one word."""
        return at_revision(self.src, self.revision)

    @property
    def recomputes(self) -> Checkpointing | None:
        """The same as the model takes it."""
        if self.checkpointing == "none":
            return None
        return Checkpointing(part=Part(self.checkpointing), every=self.checkpoint_every, first=self.checkpoint_first)


class LoRASection(Section):
    """Adapters; without the section all weights train. Names as in `bestiary.models.LoRAConfig`."""

    r: Count = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ("*_proj",)


class LossSection(Section):
    """Which loss of the recipe, and its numbers; a recipe refuses those that are not its own.

    Attributes:
        name: sft: nll, dft; dpo: sigmoid, ipo, …; distill: forward_kl, reverse_kl, jsd; None: the recipe's first, and
            reverse_kl on the student's own answers. Or module:name of a `Recipe` of yours.
        beta: of preference losses, and of the Jensen–Shannon divergence.
        options: further numbers, by the names that the recipe's class documents.
        reference: whom preference losses compare with: adapters_off, a checkpoint (also owner/name@revision), or
            sums stored as .npz; None: the model before training, without its adapters or read a second time.
        teacher: of distillation, a checkpoint likewise; None: the data brings its likeliest words (teacher_ids and
            teacher_log_probs of sources of kind distillation), and no teacher is loaded.
    """

    name: str | None = None
    beta: Positive | None = None
    options: dict[str, float] = Field(default_factory=dict)
    reference: str | None = None
    teacher: str | None = None


class SampledSection(Section):
    """How answers are sampled.

    Attributes:
        max_tokens: of an answer.   temperature: of sampling.
        seed: an answer depends on it, its prompt and its place in the run, and on nothing else.
        rows: answers sampled together, at most.
    """

    max_tokens: Count = 256
    temperature: Positive = 1.0
    seed: int = 0
    rows: Count = 64

    @model_validator(mode="before")
    @classmethod
    def _unfiltered(cls, given: Any) -> Any:
        for name in FILTERS:
            if isinstance(given, dict) and name in given:
                raise ValueError(
                    f"{name} is refused: under a filter the tokens come from another distribution than the one that is "
                    "trained; temperature alone shapes it"
                )
        return given


class RolloutSection(SampledSection):
    """`distill` on answers that the student samples itself; without the section it trains on those of the data.

    Sources of kind prompt, chat, completion or distillation give the prompts, each document what stands before its last
    trained tokens. A pack leaves room for `max_tokens` behind each of them. `loss.options.temperature` is that of the
    loss.

    Attributes:
        share: of documents with an answer, those that the student answers all the same (λ of GKD); prompts without
            an answer always are.
        engines: processes on Ray that sample, each with a copy of the student that is synced in every step; 0: the
            student's own generator.
    """

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    engines: Annotated[int, Field(ge=0)] = 0


class OptimSection(Section):
    """The optimiser and its schedule.

    Attributes:
        name: adamw; adamw8bit, whose states take a byte each (the extra torchao); muon for matrices of the blocks with
            adamw for all else; sgd.
        lr: at the top of the schedule; None: 1e-5, with adapters 2e-4.
        weight_decay: of matrices; norms, biases, sinks and embeddings have none.
        schedule: after the warm-up; cosine and linear end at `final` × lr, wsd stays and falls over the last fifth.
        warmup: steps, or below 1 a share of all steps.
        max_grad_norm: of all gradients together; None: unclipped.
    """

    name: Literal["adamw", "adamw8bit", "muon", "sgd"] = "adamw"
    lr: Positive | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    momentum: Decay = 0.95
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: NotNegative = 0.03
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    max_grad_norm: Positive | None = 1.0


class PrecisionSection(Section):
    """Dtypes.

    Attributes:
        parameters: as kept and updated; None: the checkpoint's. float32 with compute: bfloat16 are master weights.
        compute: of the blocks' products; None: that of the parameters.   reduce: of gradients between
            processes, never narrower than what is computed.
    """

    parameters: Dtype | None = None
    compute: Dtype | None = None
    reduce: Dtype = "float32"


class ParallelSection(Section):
    """How processes share the work; `shard: -1` takes all that the others leave. One process needs none of it.

    Attributes:
        replicate: copies of the model.   shard: of parameters, gradients and states.
        context: of the tokens of each row, for long `data.pack_length`; its processes are shards too.
        tensor: of every product.   expert: of the experts.
    """

    replicate: Count = 1
    shard: Annotated[int, Field(ge=-1)] = -1
    context: Count = 1
    tensor: Count = 1
    expert: Count = 1


class EvaluationSection(Section):
    """Held-out data.

    Attributes:
        sources: as those of `data`; tokenizer and packing are its.   every: steps.   packs: of each pass, at most.
        patience: passes without a better loss after which the run stops; None: never.
        at_start: a pass before the first step too, logged as step 0.
    """

    sources: tuple[dict[str, Any], ...]
    every: Count = 50
    packs: Count = 16
    patience: Count | None = None
    at_start: bool = False


class LoopSection(Section):
    """Steps, and what happens when one goes wrong.

    Attributes:
        steps: of the optimiser; None: as many as data.epochs gives, counted before the run.
        seed: of fresh adapters, heads and dropout.   deterministic: refuse operations that are not.
        on_nan: `skip` leaves the weights where loss or gradient are not finite, at most `max_skips` times in a row.
        spike: a loss above this many times the median of the last 50 counts as not finite; None: no such rule.
        workers: processes that prepare data; 0: in the training process.
        evaluation: None: no held-out data.
        log_every: steps.
        callbacks: `module:factory` of objects with any of the methods of `bestiary.training.loop.Callback`.
        timeout_s: after which a rank gives up waiting for another.
    """

    steps: Count | None = None
    seed: int = 0
    deterministic: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    max_skips: Count = 10
    spike: Annotated[float, Field(gt=1)] | None = None
    workers: Annotated[int, Field(ge=0)] = 1
    evaluation: EvaluationSection | None = None
    log_every: Count = 1
    callbacks: tuple[str, ...] = ()
    timeout_s: Positive = 600.0


class CheckpointSection(Section):
    """Resume points in `out/checkpoints`.

    Attributes:
        every: steps; None: at the end only.   keep: the newest that stay.   keep_every: multiples that always stay.
        background: write while the next steps run.
        export: at the end, to `out/export`, in Hugging Face's layout.
        resume: `auto` goes on from the newest one in `out`; `never` refuses a folder that has one.
    """

    every: Count | None = 100
    keep: Count = 2
    keep_every: Count | None = None
    background: bool = True
    export: bool = True
    resume: Literal["auto", "never"] = "auto"


class TrackingSection(Section):
    """Trackers beside metrics.jsonl, and the name of the run in them."""

    to: tuple[str, ...] = ()
    project: str = "bestiary"
    name: str | None = None


class CommonConfig(Section):
    """What every run has, whatever it trains by; see the sections."""

    recipe: str
    model: ModelSection
    data: DataConfig
    out: Path
    lora: LoRASection | None = None
    optim: OptimSection = Field(default_factory=OptimSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _updates(self) -> CommonConfig:
        if self.precision.parameters == "float16":
            raise ValueError("precision.parameters = float16: updates vanish in it; bfloat16 or float32")
        return self

    @property
    def lr(self) -> float:
        """The learning rate at the top of the schedule."""
        return self.optim.lr or (1e-5 if self.lora is None else 2e-4)

    @property
    def adapters(self) -> LoRAConfig | None:
        """The adapters to build in."""
        section = self.lora
        return None if section is None else LoRAConfig(r=section.r, alpha=section.alpha, targets=section.targets)

    @property
    def beside(self) -> tuple[str, ...]:
        """Checkpoints that are loaded beside the one that trains, and only compute."""
        return ()

    def yaml(self) -> str:
        """The whole of it, defaults included, as a file that can be read again."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


class RunConfig(CommonConfig):
    """Everything about a run of a recipe; see the sections."""

    recipe: RecipeName
    loss: LossSection = Field(default_factory=LossSection)
    rollouts: RolloutSection | None = None
    loop: LoopSection = Field(default_factory=LoopSection)
    placement: BesideSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.loop.steps is None and self.data.epochs is None:
            raise ValueError("neither loop.steps nor data.epochs is given: the run would have no end")
        if self.rollouts is not None:
            self._check_rollouts(self.rollouts)
        if self.placement is not None:
            engines = 0 if self.rollouts is None else self.rollouts.engines
            self.placement.check(self.recipe, self.loss.teacher, self.loss.name, engines)
        self._check_context(self.parallel.context)
        return self

    def _check_context(self, ranks: int) -> None:
        if ranks == 1:
            return
        if self.recipe == "reward":
            raise ValueError(
                f"parallel.context = {ranks} with the recipe reward: a score is read off the last token of a whole "
                "document; parallel.context = 1, and the processes to parallel.shard"
            )
        if self.rollouts is not None:
            raise ValueError(
                f"parallel.context = {ranks} with rollouts: answers are sampled from whole prompts; "
                "parallel.context = 1, and the processes to parallel.shard"
            )
        if self.data.pack_length < 2 * ranks:
            raise ValueError(
                f"parallel.context = {ranks} with data.pack_length = {self.data.pack_length}: each process takes two "
                "pieces of a row; longer rows, or fewer processes"
            )

    def _check_rollouts(self, rollouts: RolloutSection) -> None:
        if self.recipe != "distill":
            raise ValueError(f"rollouts are of distill, the recipe is {self.recipe}")
        if self.loss.teacher is None:
            raise ValueError(
                "rollouts without loss.teacher: nobody has stored what it says about answers yet unwritten"
            )
        if self.data.overflow == "split":
            raise ValueError(
                "rollouts with data.overflow = split: a piece of a document is no prompt; truncate or drop"
            )
        if rollouts.max_tokens >= self.data.pack_length:
            raise ValueError(
                f"rollouts.max_tokens = {rollouts.max_tokens} leaves no room for a prompt in "
                f"data.pack_length = {self.data.pack_length}"
            )

    @property
    def reference(self) -> str | None:
        """Whom preference losses compare with: `adapters_off`, a checkpoint, a file of sums; None: they are not asked.

        By default the model before training: without its adapters, or its checkpoint read a second time.
        """
        if self.recipe not in ("dpo", "kto"):
            return None
        return self.loss.reference or (self.model.named if self.lora is None else ADAPTERS_OFF)

    @property
    def beside(self) -> tuple[str, ...]:
        """Checkpoints that are loaded beside the one that trains, and only compute."""
        reference, teacher = self.reference, None if self.teachers else self.loss.teacher
        loaded = reference is not None and reference != ADAPTERS_OFF and not reference.endswith(".npz")
        return tuple(src for src in (reference if loaded else None, teacher) if src is not None)

    @property
    def teachers(self) -> int:
        """Processes of the teacher; 0: it computes where the student does, if there is one."""
        return 0 if self.placement is None else self.placement.teacher

    def evaluation_data(self) -> DataConfig | None:
        """The data of the held-out passes: the sources of loop.evaluation, once, packed as `data` is."""
        return None if self.loop.evaluation is None else held_out_data(self.data, self.loop.evaluation.sources)


def load_run_config(file: Path, overrides: Sequence[str] = (), *, recipe: RecipeName | None = None) -> RunConfig:
    """A run's file with changes from the command line.

    Args:
        file: YAML or JSON; local paths of data in it count from its folder.
        overrides: `section.key=value`, the value as YAML.
        recipe: of the command; a file that names another one is refused.
    Raises:
        InvalidRun: names the first wrong key or value, an unknown key with the nearest known one.
    """
    config = read_config(RunConfig, file, overrides, recipe=recipe)
    return _placed(config, file.parent)


def read_config(section: type[C], file: Path, overrides: Sequence[str] = (), *, recipe: str | None = None) -> C:
    """A run's file as the configuration that a command takes, paths as they stand there; else as `load_run_config`."""
    whole = read_mapping(file, InvalidRun)
    for text in overrides:
        override(section, whole, text, InvalidRun)
    if recipe is not None:
        if whole.setdefault("recipe", recipe) != recipe:
            raise InvalidRun(
                f"recipe = {whole['recipe']!r} and the command is {recipe}.",
                read_from=str(file),
                remedy=f"bestiary {whole['recipe']} {file}, or leave the key out",
            )
    return validated(section, whole, place="", read_from=str(file), error=InvalidRun)


def placed_common(config: CommonConfig, folder: Path) -> dict[str, Any]:
    """Of the parts that every run has, those whose local paths come to count from a folder."""
    update: dict[str, Any] = {"data": placed_in(config.data, folder)}
    if (folder / config.model.src).is_dir():
        update["model"] = config.model.model_copy(update={"src": str(folder / config.model.src)})
    return update


def held_out_data(data: DataConfig, sources: Sequence[Mapping[str, Any]]) -> DataConfig:
    """The data of a run with other sources, read once.

    Raises:
        InvalidRun: a wrong key or value of theirs.
    """
    plain = data.model_dump(mode="json") | {"sources": list(sources), "epochs": 1, "streams": 1}
    return validated(DataConfig, plain, place="loop.evaluation", read_from="the run's file", error=InvalidRun)


def placed_evaluation(data: DataConfig | None, evaluation: S | None, folder: Path) -> S | None:
    """A section of held-out data whose local paths come to count from a folder; None where there is none."""
    if data is None or evaluation is None:
        return None
    sources = placed_in(data, folder).model_dump(mode="json")["sources"]
    return evaluation.model_copy(update={"sources": tuple(sources)})


def _placed(config: RunConfig, folder: Path) -> RunConfig:
    """Local paths, made to count from the folder of the file. `out` counts from where the command runs."""
    update = placed_common(config, folder)
    others = {name: getattr(config.loss, name) for name in ("reference", "teacher")}
    local = {name: str(folder / src) for name, src in others.items() if src is not None and (folder / src).exists()}
    if local:
        update["loss"] = config.loss.model_copy(update=local)
    evaluation = placed_evaluation(config.evaluation_data(), config.loop.evaluation, folder)
    if evaluation is not None:
        update["loop"] = config.loop.model_copy(update={"evaluation": evaluation})
    return config.model_copy(update=update)
