"""The surface that external trainers expect of a model, and the way to the bridges, in one place.

Everything that touches Hugging Face goes through the entry-point group `bestiary.bridges`, so this package imports no
transformers, and a family that lives in another repository plugs in unchanged.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor, nn

from bestiary.models.config import DecoderConfig, HeadKind, LoRAConfig
from bestiary.models.errors import InvalidConfig, MissingBridge
from bestiary.models.recomputation import Checkpointing, Part

if TYPE_CHECKING:
    from bestiary.models.decoder import Backbone


@cache
def bridge_of(model_type: str) -> Any:
    """The `bestiary.bridges` entry point of a model type (`"auto"` finds it from a checkpoint's config).

    Raises:
        MissingBridge: lists what is registered.
    """
    found = {point.name: point for point in entry_points(group="bestiary.bridges")}
    if model_type not in found:
        raise MissingBridge(
            f"no bridge is registered for model_type = {model_type!r}.",
            remedy=f"registered: {', '.join(sorted(found))}; "
            "a package adds one by the entry-point group bestiary.bridges",
        )
    return found[model_type].load()


def check_checkpointing(options: dict[str, Any] | None, every_n_layers: int, offload: bool) -> None:
    """Refuse requests of `activation_checkpointing_enable` that our models do not follow.

    Raises:
        InvalidConfig: the reentrant kind, `offload`, or less than 1 layer.
    """
    if (options or {}).get("use_reentrant"):
        raise InvalidConfig(
            "gradient_checkpointing_kwargs asks for use_reentrant = True.",
            remedy="use_reentrant=False: the reentrant kind loses gradients of frozen inputs",
        )
    if offload:
        raise InvalidConfig(
            "gradient_checkpointing_kwargs asks for offload = True.", remedy="offload=False; activations stay put"
        )
    if every_n_layers < 1:
        raise InvalidConfig(f"every_n_layers = {every_n_layers}.", remedy="1: every block; 2: every other one; …")


class TrainerProtocol:
    """Mixin of `Decoder`; see each member. Names and meanings are those of transformers' PreTrainedModel."""

    decoder_config: DecoderConfig
    model: "Backbone"
    lm_head: nn.Module  # absent with a score head, as `score` is without one
    score: nn.Module

    base_model_prefix: ClassVar[str] = "model"
    main_input_name: ClassVar[str] = "input_ids"
    loss_type: ClassVar[str] = "ForCausalLM"
    accepts_loss_kwargs: ClassVar[bool] = True
    supports_gradient_checkpointing: ClassVar[bool] = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _keys_to_ignore_on_save: ClassVar[None] = None
    _is_stateful: ClassVar[bool] = False
    ignored_arguments: ClassVar[frozenset[str]] = frozenset(
        {"return_dict", "output_attentions", "output_hidden_states", "cache_position", "token_type_ids"}
    )

    name_or_path: str = ""
    revision: str | None = None  # commit of the hub that `name_or_path` was read at
    hf_config_json: dict[str, Any] | None = None  # config.json of the checkpoint this model was read from
    hf_generation_config_json: dict[str, Any] | None = None
    model_tags: list[str] | None = None
    _config: Any = None
    _generation_config: Any = None

    # ------------------------------------------------------------------ Hugging Face

    @classmethod
    def from_pretrained(
        cls,
        src: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        lora: LoRAConfig | str | Path | None = None,
        mesh: Any = None,
        backend: str = "native",
        revision: str | None = None,
        head: Literal["lm", "score"] | None = None,
    ) -> Self:
        """A model from a checkpoint folder or hub id.

        Args:
            src: folder with config.json and safetensors, or a hub id such as "Qwen/Qwen3-0.6B"; or a PEFT adapter that
                names its base.
            dtype: of the parameters, also by name ("bfloat16"); None: the checkpoint's.
            lora: adapters to build in, the base frozen: a LoRAConfig for fresh ones, or a PEFT folder or hub id.
            mesh: processes to spread the model over, from `bestiary.training.parallel.build_mesh`: each reads only its
                part, onto the mesh's device. Or a function that spreads a model on meta, for a plan or a precision:
                `partial(parallelize, mesh=mesh, plan=plan)`.
            backend: "native".   revision: branch, tag or commit on the hub.
            head: "score": a reward model. **Of a causal checkpoint it takes the backbone alone: `score.weight`, of one
                label, is drawn at random by torch's seed, and a FreshHeadWarning says so; train it before use.**
                "lm": a language model, refused of a reward model. None: what `architectures` in config.json says.
        Raises:
            bestiary.bridges.errors: unknown model type, unsupported config, missing keys, corrupt files, offline.
        """
        model = bridge_of("auto").load(
            src,
            dtype=dtype,
            device=device,
            lora=lora,
            mesh=mesh,
            backend=backend,
            revision=revision,
            cls=cls,
            head=head,
        )
        return cast(Self, model)

    def save_pretrained(self, path: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
        """Write a checkpoint that transformers loads; with LoRA on a PEFT folder, with `merge=True` the full model.

        Args:
            options: `merge`, `max_shard_size`, `into` of `bestiary.bridges.save_decoder`.
        Raises:
            FolderNotEmpty: the folder has content and `overwrite` is False.
        """
        return cast(Path, self._bridge.save(self, path, overwrite=overwrite, **options))

    def load_adapter(self, src: str | Path, *, revision: str | None = None) -> None:
        """Put the values of a PEFT adapter into the adapters this model was built with.

        Args:
            src: PEFT folder or hub id.   revision: branch, tag or commit on the hub.
        Raises:
            UnsupportedAdapter: adapters elsewhere, or of another rank or scaling; nothing is changed.
            bestiary.bridges.errors: see `bestiary.bridges.peft_import.read_adapter`.
        """
        self._bridge.load_adapter(self, src, revision=revision)

    def named_hf_tensors(self, *, merge_lora: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Hub names and shapes, one tensor at a time: what is exported, synced to a rollout engine, or compared."""
        return cast(Iterator[tuple[str, Tensor]], self._bridge.named_hf_tensors(self, merge_lora=merge_lora))

    def load_hf_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """What `named_hf_tensors` of such a model gives, into this one, which lies whole in this process.

        Returns:
            Parameters that were not written wholly.
        Raises:
            bestiary.bridges.errors.KeyMismatch: a name or shape that this model does not have.
        """
        return cast(list[str], self._bridge.fill_named(self, tensors))

    @property
    def _bridge(self) -> Any:
        return bridge_of(self.decoder_config.model_type)

    @property
    def config(self) -> Any:
        """A real transformers config, made on first access; what is written on it is kept and exported."""
        if self._config is None:
            self._config = self._bridge.hf_config(self)
        return self._config

    @config.setter
    def config(self, value: Any) -> None:
        self._config = value

    @property
    def generation_config(self) -> Any:
        """A real transformers GenerationConfig, made on first access."""
        if self._generation_config is None:
            self._generation_config = self._bridge.hf_generation_config(self)
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._generation_config = value

    # ------------------------------------------------------------------ what trainers ask

    @property
    def base_model(self) -> "Backbone":
        """The decoder without its head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        """The language-model head; None where a score head stands in its place."""
        return self.lm_head if self.decoder_config.head is HeadKind.LM else None

    @property
    def head(self) -> nn.Module:
        """What stands on the final norm: `lm_head`, or `score`."""
        return self.lm_head if self.decoder_config.head is HeadKind.LM else self.score

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.decoder_config.ties_head else {}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base weights."""
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the base weights."""
        return self.model.embed_tokens.weight.device

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Elements of the distinct parameters; a tied head counts once, padding to 64 never."""
        module = cast(nn.Module, self)
        embedding = self.model.embed_tokens.weight
        return sum(
            parameter.numel()
            for parameter in module.parameters()
            if (parameter.requires_grad or not only_trainable) and not (exclude_embeddings and parameter is embedding)
        )

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Tags for a model card, written by trainers."""
        known = self.model_tags or []
        self.model_tags = known + [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag not in known]

    # ------------------------------------------------------------------ memory

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks, or parts of them, are recomputed in the backward pass."""
        return self.model.checkpointing is not None

    def activation_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        part: Part | str = Part.FULL,
        first_layers: int | None = None,
    ) -> None:
        """Recompute blocks in the backward pass, one in `every_n_layers`, the first one first.

        Args:
            gradient_checkpointing_kwargs: `use_reentrant`, False or absent; its newer name is the third last argument.
            part: of a block; see `bestiary.models.recomputation`.   first_layers: of so many; None: of all.
        Raises:
            InvalidConfig: the reentrant kind, `offload`, an unknown part, or less than 1 layer.
        """
        check_checkpointing(gradient_checkpointing_kwargs or activation_checkpointing_kwargs, every_n_layers, offload)
        self.model.checkpointing = Checkpointing(part=cast(Part, part), every=every_n_layers, first=first_layers)

    gradient_checkpointing_enable = activation_checkpointing_enable

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.model.checkpointing = None

    def enable_input_require_grads(self) -> None:
        """Make the embedding's output require a gradient, so that adapters behind checkpoints train."""
        if self._input_grad_hook is None:
            self._input_grad_hook = self.model.embed_tokens.register_forward_hook(
                lambda module, arguments, output: output.requires_grad_(True)
            )

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        if self._input_grad_hook is not None:
            self._input_grad_hook.remove()
            self._input_grad_hook = None

    _input_grad_hook: Any = None
