"""The four families as the verifier sees them."""

from bestiary.verify.reference import ReferencePool

FAMILIES = ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
REFERENCES = {
    "qwen3": "transformers:Qwen3ForCausalLM",
    "gemma3_text": "transformers:Gemma3ForCausalLM",
    "qwen3_moe": "transformers:Qwen3MoeForCausalLM",
    "gpt_oss": "transformers:GptOssForCausalLM",
}

POOL = ReferencePool()
"""What the references answered, for all tests of one process."""
