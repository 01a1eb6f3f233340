"""What external trainers ask of a wrapped model: the names of `bestiary.models.protocol`, answered by transformers."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from bestiary.models.errors import InvalidConfig
from bestiary.models.protocol import TrainerProtocol, check_checkpointing


class HFSurface:
    """Mixin of `HFDecoder`; see each member. `hf` is the wrapped transformers model."""

    hf: Any

    base_model_prefix: ClassVar[str] = "base_model"
    main_input_name: ClassVar[str] = "input_ids"
    loss_type: ClassVar[str] = "ForCausalLM"
    accepts_loss_kwargs: ClassVar[bool] = True
    _keys_to_ignore_on_save: ClassVar[None] = None
    _is_stateful: ClassVar[bool] = False
    ignored_arguments: ClassVar[frozenset[str]] = TrainerProtocol.ignored_arguments

    name_or_path: str = ""
    revision: str | None = None
    model_tags: list[str] | None = None

    @property
    def config(self) -> Any:
        """The wrapped model's config; what is written on it is exported."""
        return self.hf.config

    @config.setter
    def config(self, value: Any) -> None:
        self.hf.config = value

    @property
    def generation_config(self) -> Any:
        """The wrapped model's generation config."""
        return self.hf.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.hf.generation_config = value

    @property
    def base_model(self) -> nn.Module:
        """The wrapped model without its head."""
        return cast(nn.Module, self.hf.base_model)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return cast(nn.Module, self.hf.get_input_embeddings())

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return cast(nn.Module, self.hf.get_output_embeddings())

    @property
    def head(self) -> nn.Module:
        """The same: a wrapped model has no score head."""
        return self.get_output_embeddings()

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Make head and embedding one Parameter where the config ties them (arguments of trainers are ignored)."""
        self.hf.tie_weights()

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        return {f"hf.{name}": f"hf.{source}" for name, source in self.hf.all_tied_weights_keys.items()}

    @property
    def _no_split_modules(self) -> list[str]:
        return sorted(self.hf._no_split_modules or [])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base weights."""
        return cast(Tensor, self.get_input_embeddings().weight).dtype

    @property
    def device(self) -> torch.device:
        """Device of the base weights."""
        return cast(Tensor, self.get_input_embeddings().weight).device

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Elements of the distinct parameters; a tied head counts once."""
        embedding = self.get_input_embeddings().weight
        return sum(
            parameter.numel()
            for parameter in cast(nn.Module, self).parameters()
            if (parameter.requires_grad or not only_trainable) and not (exclude_embeddings and parameter is embedding)
        )

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Tags for a model card, written by trainers."""
        known = self.model_tags or []
        self.model_tags = known + [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag not in known]

    @property
    def supports_gradient_checkpointing(self) -> bool:
        """Whether transformers offers it for this model."""
        return bool(self.hf.supports_gradient_checkpointing)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass (by transformers: only in training mode)."""
        return bool(self.hf.is_gradient_checkpointing)

    def activation_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        *,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Recompute every block in the backward pass; other requests are refused, as by `TrainerProtocol`'s."""
        check_checkpointing(gradient_checkpointing_kwargs or activation_checkpointing_kwargs, every_n_layers, offload)
        if every_n_layers != 1:
            raise InvalidConfig(
                f"every_n_layers = {every_n_layers}, which not every version of transformers offers.",
                remedy="every_n_layers=1",
            )
        if not self.supports_gradient_checkpointing:
            raise InvalidConfig(
                f"gradient checkpointing: transformers has none for {type(self.hf).__name__}.", remedy="leave it off"
            )
        self.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    gradient_checkpointing_enable = activation_checkpointing_enable

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations again."""
        self.hf.gradient_checkpointing_disable()

    def enable_input_require_grads(self) -> None:
        """Make the embedding's output require a gradient, so that adapters behind checkpoints train."""
        if self._input_grad_hook is None:
            self._input_grad_hook = self.get_input_embeddings().register_forward_hook(
                lambda module, arguments, output: output.requires_grad_(True)
            )

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        if self._input_grad_hook is not None:
            self._input_grad_hook.remove()
            self._input_grad_hook = None

    _input_grad_hook: Any = None

    def can_generate(self) -> bool:
        """Whether transformers generates with this model."""
        return bool(self.hf.can_generate())

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Arguments of the next forward call, by the wrapped model."""
        return cast(dict[str, Any], self.hf.prepare_inputs_for_generation(input_ids, **kwargs))
