"""What the networks are: canonical decoder definitions in plain single-device PyTorch, without transformers."""

from bestiary.models.arcee import Arcee
from bestiary.models.auto import AutoDecoder
from bestiary.models.cache import Cache
from bestiary.models.cohere2 import Cohere2
from bestiary.models.config import DecoderConfig, LoRAConfig
from bestiary.models.decoder import Decoder
from bestiary.models.deepseek_v3 import DeepseekV3
from bestiary.models.ernie4_5 import Ernie45
from bestiary.models.exaone4 import Exaone4
from bestiary.models.gemma import Gemma
from bestiary.models.gemma2 import Gemma2
from bestiary.models.gemma3 import Gemma3
from bestiary.models.glm4 import Glm4
from bestiary.models.glm4_moe import Glm4MoE
from bestiary.models.gpt_oss import GptOss
from bestiary.models.granite import Granite
from bestiary.models.hunyuan_v1_dense import HunYuanDenseV1
from bestiary.models.llama import Llama
from bestiary.models.ministral import Ministral
from bestiary.models.mistral import Mistral
from bestiary.models.mixtral import Mixtral
from bestiary.models.olmo2 import Olmo2
from bestiary.models.olmo3 import Olmo3
from bestiary.models.olmoe import Olmoe
from bestiary.models.output import DecoderOutput
from bestiary.models.phi3 import Phi3
from bestiary.models.qwen2 import Qwen2
from bestiary.models.qwen2_moe import Qwen2MoE
from bestiary.models.qwen3 import Qwen3
from bestiary.models.qwen3_moe import Qwen3MoE
from bestiary.models.seed_oss import SeedOss
from bestiary.models.smollm3 import SmolLM3
from bestiary.models.surgery import replace_modules, resize_token_embeddings

__all__ = [
    "Arcee",
    "AutoDecoder",
    "Cache",
    "Cohere2",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "DeepseekV3",
    "Ernie45",
    "Exaone4",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm4",
    "Glm4MoE",
    "GptOss",
    "Granite",
    "HunYuanDenseV1",
    "Llama",
    "LoRAConfig",
    "Ministral",
    "Mistral",
    "Mixtral",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "Phi3",
    "Qwen2",
    "Qwen2MoE",
    "Qwen3",
    "Qwen3MoE",
    "SeedOss",
    "SmolLM3",
    "replace_modules",
    "resize_token_embeddings",
]
