"""How weights and configs travel: Hugging Face checkpoints to canonical models and back."""

from bestiary.bridges.bridge import Bridge, CheckpointConfig
from bestiary.bridges.export import named_hf_tensors, save_decoder
from bestiary.bridges.fields import HFFields
from bestiary.bridges.loading import fill, fill_parameters, load_checkpoint, read_config
from bestiary.bridges.peft import save_adapter
from bestiary.bridges.peft_import import AdapterFile, read_adapter
from bestiary.bridges.plan import Naming, Plan, plan_export, plan_import
from bestiary.bridges.registry import AUTO, get_bridge, load_decoder, registered_bridges
from bestiary.bridges.score import FreshHeadWarning
from bestiary.bridges.storage import MemorySource, SafetensorsSource, TensorInfo

__all__ = [
    "AUTO",
    "AdapterFile",
    "Bridge",
    "CheckpointConfig",
    "FreshHeadWarning",
    "HFFields",
    "MemorySource",
    "Naming",
    "Plan",
    "SafetensorsSource",
    "TensorInfo",
    "fill",
    "fill_parameters",
    "get_bridge",
    "load_checkpoint",
    "load_decoder",
    "named_hf_tensors",
    "plan_export",
    "plan_import",
    "read_adapter",
    "read_config",
    "registered_bridges",
    "save_adapter",
    "save_decoder",
]
