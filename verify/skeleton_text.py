"""An `Analysis` as text for people, and as the bridge and the model file that a port starts from.

Whatever the config class or the keys settle is written out; every other decision stands in the bridge as
`undecided(name, question)`, an error that names it, so that a skeleton can be run and never passes by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bestiary.verify.skeleton import SETTLED, Analysis, FieldRow
from bestiary.verify.sweep import Kind

# Parameters of the canonical decoder that a family may have under the same name, as rules write them.
NATIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model.embed_tokens.weight", ()),
    ("model.layers.*.{}_layernorm.weight", ("input", "post_attention", "pre_feedforward", "post_feedforward")),
    ("model.layers.*.self_attn.{}_proj.weight", ("q", "k", "v", "o")),
    ("model.layers.*.self_attn.{}_proj.bias", ("q", "k", "v", "o")),
    ("model.layers.*.self_attn.{}_norm.weight", ("q", "k")),
    ("model.layers.*.self_attn.sinks", ()),
    ("model.layers.*.mlp.{}_proj.weight", ("gate", "up", "down")),
    ("model.layers.*.mlp.{}_proj.bias", ("gate", "up", "down")),
    ("model.layers.*.mlp.gate.weight", ()),
    ("model.layers.*.mlp.gate.e_score_correction_bias", ()),
    ("model.layers.*.mlp.experts.{}_proj", ("gate_up", "down")),
    ("model.norm.weight", ()),
)
HEAD = "lm_head.weight"

# How a field with a usual home is read: {d} is the class's default.
_READ: dict[str, tuple[str, str]] = {
    "vocab_size": ("vocab_size", 'hf.positive("vocab_size", {d})'),
    "hidden_size": ("hidden_size", "hidden"),
    "intermediate_size": ("intermediate_size", 'hf.positive("intermediate_size", {d})'),
    "num_hidden_layers": ("num_hidden_layers", "layers"),
}
_NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def text(analysis: Analysis) -> str:
    """Field table, key patterns, nearest family: what `verify-bridge new` prints before the skeleton."""
    lines = [f"{analysis.model_type}: {analysis.reference} ({analysis.config_class})", ""]
    lines += [f"{'field':<28}{'default':<22}{'kind':<10}ours"]
    for row in analysis.fields:
        home = row.ours or ("settled" if row.name in SETTLED else "?")
        lines.append(f"{row.name:<28}{_cut(row.default, 20):<22}{row.kind:<10}{home}")
    lines += ["", f"{'key pattern':<58}{'shape':<22}count"]
    lines += [f"{key.pattern:<58}{', '.join(key.shape):<22}{key.count}" for key in analysis.keys]
    return "\n".join([*lines, "", *nearest_lines(analysis)]) + "\n"


def nearest_lines(analysis: Analysis) -> list[str]:
    """The nearest family and in what it differs, one line each."""
    near = analysis.nearest
    if near is None:
        return ["nearest family: none is registered"]
    told = {
        "keys only here": near.keys_only_here,
        "keys only there": near.keys_only_there,
        "fields only here": near.fields_only_here,
        "fields only there": near.fields_only_there,
    }
    lines = [f"nearest family: {near.family} ({near.similarity:.0%} of keys and fields in common)"]
    return lines + [f"  {name:<18}{', '.join(values)}" for name, values in told.items() if values]


def _cut(value: str, width: int) -> str:
    return value if len(value) <= width else value[: width - 1] + "…"


def rules(analysis: Analysis) -> tuple[list[str], list[str]]:
    """Rules for the keys that our decoder has under the same name, and the patterns that are left over."""
    left = [key.pattern for key in analysis.keys]
    lines = []
    for pattern, choices in NATIVE:
        names = {pattern.format(choice): choice for choice in choices} if choices else {pattern: ""}
        present = [name for name in names if name in left]
        left = [name for name in left if name not in present]
        if len(present) > 1:
            joined = "{" + ",".join(names[name] for name in present) + "}"
            lines.append(f'rename("{pattern.format(joined)}")')
        else:
            lines += [f'rename("{name}")' for name in present]
    if HEAD in left:
        left.remove(HEAD)
        lines.append(f'tie("{HEAD}", to="model.embed_tokens.weight")')
    return lines, left


def _ask(decision: str, question: str) -> str:
    return f'undecided("{decision}", "{question}")'


def _row(analysis: Analysis, name: str) -> FieldRow | None:
    return next((row for row in analysis.fields if row.name == name), None)


def _attention(analysis: Analysis, near: str) -> Iterator[str]:
    bias = _row(analysis, "attention_bias")
    yield "num_heads=heads,"
    if _row(analysis, "num_key_value_heads") is None:
        yield "num_kv_heads=heads,"
    else:
        yield 'num_kv_heads=hf.positive_optional("num_key_value_heads", int) or heads,'
    yield "head_dim=head_dim,"
    yield f"scale={_ask('attention.scale', f'what is q·k multiplied by? {near}')},"
    yield f"qkv_bias={'bias' if bias else _ask('attention.qkv_bias', 'do q, k and v have a bias?')},"
    yield f"out_bias={_ask('attention.out_bias', 'does o_proj have a bias?')},"
    if any(key.pattern.endswith("q_norm.weight") for key in analysis.keys):
        yield f"qk_norm={_ask('attention.qk_norm', 'QKNorm over a head or all of them, before or after RoPE?')},"
    if _row(analysis, "attention_dropout"):
        yield "dropout=hf.attention_dropout(),"


def _arguments(analysis: Analysis, near: str) -> Iterator[str]:
    """Lines of the call of DecoderConfig."""
    for name, (argument, expression) in _READ.items():
        row = _row(analysis, name)
        yield f"{argument}={expression.format(d=row.default) if row else _ask(argument, 'where is it stated?')},"
    yield "attention=Attention("
    yield from (f"    {line}" for line in _attention(analysis, near))
    yield "),"
    eps = _row(analysis, "rms_norm_eps")
    if eps:
        cast = _ask("norm.cast", "NormCast: is the weight multiplied before or after the cast back?")
        yield f'norm=Norm(eps=hf.positive_float("rms_norm_eps", {eps.default}), cast={cast}),'
    else:
        yield f"norm={_ask('norm', 'Norm: which norm, which eps, placed where?')},"
    yield f"rope={_ask('rope', 'hf.rope(theta=…, rotary_dim=head_dim, max_positions=context): theta, layout?')},"
    if _row(analysis, "layer_types") or _row(analysis, "sliding_window"):
        yield f"layer_types={_ask('layer_types', 'hf.layer_types(layers, …): which layer slides by default?')},"
        yield f"sliding_window={_ask('sliding_window', 'tokens that a sliding layer sees, or None')},"
    act = next((row for row in analysis.fields if row.name in ("hidden_act", "hidden_activation")), None)
    if act:
        yield f'activation=hf.activation("{act.name}", Activation({act.default})),'
    else:
        yield f"activation={_ask('activation', 'Activation of the gate?')},"
    if _row(analysis, "mlp_bias"):
        yield 'mlp_bias=hf.take("mlp_bias", bool, False),'
    if any(".experts." in key.pattern for key in analysis.keys):
        yield f"moe={_ask('moe', 'MoE(…): experts, router, shared expert; dense_layers and router losses beside it')},"
    tie = _row(analysis, "tie_word_embeddings")
    yield f'tie_word_embeddings=hf.take("tie_word_embeddings", bool, {tie.default if tie else "False"}),'
    yield "padding_idx=hf.padding_idx(),"
    yield "max_position_embeddings=context,"
    yield "initializer_range=hf.initializer_range(),"


def _reads(analysis: Analysis) -> Iterator[str]:
    """Lines before the call: numbers used twice, inert fields, and fields that nobody has placed yet."""
    variables = dict(zip(_NUMBERS, ("hidden", "layers", "heads", "context"), strict=True))
    for name, variable in variables.items():
        row = _row(analysis, name)
        yield f'{variable} = hf.positive("{name}", {row.default if row else 1})'
    dim = _row(analysis, "head_dim")
    if dim is None:
        yield "head_dim = hidden // heads"
    elif dim.default == "None":
        yield 'head_dim = hf.positive_optional("head_dim", int) or hidden // heads'
    else:
        yield f'head_dim = hf.positive("head_dim", {dim.default})'
    bias = _row(analysis, "attention_bias")
    if bias:
        yield f'bias = hf.take("attention_bias", bool, {bias.default})'
    for row in analysis.fields:
        if row.kind in (Kind.DEAD, Kind.REJECTED) and not row.ours and row.name not in SETTLED:
            yield f'hf.inert("{row.name}", why="the sweep moves nothing of Hugging Face\'s")'
    for row in analysis.homeless:
        question = f"default {row.default}, {row.kind}: what does it do?".replace('"', "'")
        yield _ask(f"field {row.name}", question)


def _tuple(name: str, items: Sequence[str], *, quoted: bool) -> list[str]:
    if not items:
        return [f"{name}: tuple[str, ...] = ()"]
    return [f"{name} = (", *(f'    "{item}",' if quoted else f"    {item}," for item in items), ")"]


def bridge_source(analysis: Analysis, model_module: str) -> str:
    """The bridge file; `model_module` is the import path of the model file."""
    known, left = rules(analysis)
    near = f"nearest family: {analysis.nearest.family}" if analysis.nearest else "no family is near"
    open_keys = [_ask("rules", f"{len(left)} key patterns have no rule: {left[0]} …")] if left else []
    body = [
        f'"""{analysis.name} between the Hub and bestiary."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "from bestiary.bridges.bridge import Bridge",
        "from bestiary.bridges.fields import HFFields, usual_fields",
        "from bestiary.bridges.rope import rope_to_hf",
        "from bestiary.bridges.rules import rename, tie",
        "from bestiary.bridges.undecided import undecided",
        "from bestiary.models.config import Activation, Attention, DecoderConfig, Norm",
        f"from {model_module} import {analysis.name}",
        "",
        *_tuple("RULES", known, quoted=False),
        "",
        "",
        "def config_from_hf(hf: HFFields) -> DecoderConfig:",
        f'    """{analysis.config_class}, the class\'s defaults written out."""',
        *(f"    {line}" for line in [*open_keys, *_reads(analysis)]),
        "    return DecoderConfig(",
        f'        model_type="{analysis.model_type}",',
        *(f"        {line}" for line in _arguments(analysis, near)),
        "    )",
        "",
        "",
        "def config_to_hf(config: DecoderConfig) -> dict[str, Any]:",
        f'    """The fields of {analysis.config_class} that describe `config`."""',
        "    return usual_fields(config) | {",
        f'        "model_type": "{analysis.model_type}",',
        '        "rope_parameters": rope_to_hf(config.rope),',
        f"        **{_ask('config_to_hf', 'which further fields does config_from_hf read?')},",
        "    }",
        "",
        "",
        "# fmt: off",
        *_tuple("KILL_LIST", analysis.kill_list, quoted=True),
        "# fmt: on",
        "",
        "BRIDGE = Bridge(",
        f'    model_type="{analysis.model_type}",',
        f'    reference="{analysis.reference}",',
        f"    decoder={analysis.name},",
        "    config_from_hf=config_from_hf,",
        "    config_to_hf=config_to_hf,",
        "    rules=RULES,",
        "    kill_list=KILL_LIST,",
        ")",
    ]
    return "\n".join(body) + "\n"


def model_source(analysis: Analysis) -> str:
    """The model file: the family's class, no sizes yet."""
    reference = analysis.reference.rpartition(":")[2]
    return f'''"""{analysis.name}, after transformers' {reference}."""

from typing import ClassVar

from bestiary.models.config import DecoderConfig
from bestiary.models.decoder import Decoder


class {analysis.name}(Decoder):
    """{analysis.name} decoder; its block is described by the config that the bridge makes."""

    sizes: ClassVar[dict[str, DecoderConfig]] = {{}}
'''
