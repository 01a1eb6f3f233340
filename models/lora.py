"""Which modules carry a LoRA adapter: decided from names, before construction."""

from fnmatch import fnmatchcase

from bestiary.models.config import DecoderConfig, LoRAConfig


def matches(name: str, pattern: str) -> bool:
    """Whether a module name is meant by a target pattern: the whole name, or its end after a dot, as a glob."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def adapter(config: DecoderConfig, name: str) -> LoRAConfig | None:
    """The LoRA of module `name`, or None if no target pattern means it."""
    lora = config.lora
    return lora if lora is not None and any(matches(name, target) for target in lora.targets) else None
