"""A Qwen3 written down once more, in plain torch and without anything of bestiary's: what `--ours` is for."""

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        heads, size = config.attention, config.hidden_size
        self.q_heads, self.kv_heads, self.size, self.window = (
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            window,
        )
        self.q_proj = nn.Linear(size, self.q_heads * self.size, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.q_heads * self.size, size, bias=False)
        self.q_norm, self.k_norm = Norm(self.size, config.norm.eps), Norm(self.size, config.norm.eps)

    def forward(self, x, turn, visible):
        q, k, v = (proj(x).unflatten(-1, (-1, self.size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (turn(norm(part)).transpose(1, 2) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (part.repeat_interleave(self.q_heads // self.kv_heads, 1) for part in (k, v.transpose(1, 2)))
        steps = torch.arange(x.shape[1])
        if self.window is not None:
            visible = visible & (steps[:, None] - steps < self.window)
        scores = (q @ k.transpose(-1, -2) * self.size**-0.5).masked_fill(~visible, torch.finfo(x.dtype).min)
        mixed = scores.float().softmax(-1).to(x.dtype) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        size, eps = config.hidden_size, config.norm.eps
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)
        self.self_attn, self.mlp = Attention(config, window), Mlp(size, config.intermediate_size)

    def forward(self, x, turn, visible):
        x = x + self.self_attn(self.input_layernorm(x), turn, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        self.layers = nn.ModuleList(Block(config, window) for window in windows)
        self.norm = Norm(config.hidden_size, config.norm.eps)


class Qwen3(nn.Module):
    rotated = True

    def __init__(self, config):
        super().__init__()
        heads = config.attention
        if config.rope.scaling is not None or config.rope.rotary_dim != heads.head_dim:
            raise NotImplementedError(f"rope = {config.rope} is not written here")
        if config.tie_word_embeddings or heads.qkv_bias or heads.dropout or config.activation != "silu":
            raise NotImplementedError("a tied head, biases, dropout and other activations are not written here")
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        steps = torch.arange(0, config.attention.head_dim, 2).float() / config.attention.head_dim
        self.register_buffer("frequencies", config.rope.theta**-steps, persistent=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        count = input_ids.shape[1]
        positions = torch.arange(count)[None] if position_ids is None else position_ids
        angles = (positions[..., None].float() * self.frequencies.float())[:, :, None]
        x = self.model.embed_tokens(input_ids)
        cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))

        def turn(part):
            left, right = part.chunk(2, -1)
            return part * cos + torch.cat((-right, left), -1) * sin if self.rotated else part

        visible = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None].bool()
        for layer in self.model.layers:
            x = layer(x, turn, visible)
        return {"logits": self.lm_head(self.model.norm(x))}


class Unturned(Qwen3):
    """The bug: no rotary embedding."""

    rotated = False


class Detached(Qwen3):
    """The bug: the gradient of the final norm's weight is lost."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.forward = lambda x: F.rms_norm(
            x, x.shape[-1:], self.model.norm.weight.detach(), self.model.norm.eps
        )


def borrowed(config):
    """A factory that hands out transformers' own model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = config.attention
    kinds = [str(kind.value) for kind in config.layer_types]
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads.num_heads,
            num_key_value_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rms_norm_eps=config.norm.eps,
            layer_types=kinds,
            sliding_window=config.sliding_window,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            attn_implementation="eager",
        )
    )


def renamed(config):
    """A module whose parameters carry names of its own."""
    model = Qwen3(config)
    model.model.layers[0].mlp.wo = model.model.layers[0].mlp.down_proj
    del model.model.layers[0].mlp.down_proj
    return model


NOTHING = 3
