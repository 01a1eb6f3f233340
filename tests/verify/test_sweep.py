"""The sweep sees every field of a config, and running Hugging Face says which of them matter."""

import pytest

from bestiary.bridges import get_bridge
from bestiary.verify.inputs import Inputs, tokens
from bestiary.verify.reference import hf_config
from bestiary.verify.sweep import Kind, classify, must_refuse, variants
from bestiary.verify.tiny import tiny_config
from tests.verify.families import FAMILIES, POOL, REFERENCES

INPUTS = Inputs(tokens(190, 2, 72, 1)).with_labels()


def _kind(family: str, field: str, value: object = None) -> Kind:
    reference = REFERENCES[family]
    found = variants(reference, tiny_config(reference, "base"))
    variant = next(v for v in found if v.field == field and value in (None, v.value))
    return classify(lambda raw: POOL.get(reference, raw, 0), variant, INPUTS)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_config_is_varied(family):
    raw = tiny_config(REFERENCES[family], "base")
    config = hf_config(REFERENCES[family], raw)
    varied = {variant.field for variant in variants(REFERENCES[family], raw)}
    names = {config.attribute_map.get(name, name) for name in varied}
    listed = set(config.to_dict()) - {"model_type", "rope_parameters"}
    assert listed <= names
    assert any(name.startswith("rope_parameters") for name in varied)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_differs_from_what_it_is_compared_with(family):
    raw = tiny_config(REFERENCES[family], "base")
    found = variants(REFERENCES[family], raw)
    assert all(variant.raw != variant.against for variant in found)
    assert len({variant.id for variant in found}) >= len(found) - 1


@pytest.mark.parametrize(
    ("family", "field", "value", "kind"),
    [
        ("qwen3", "sliding_window", 9, Kind.LIVE),
        ("qwen3", "max_window_layers", None, Kind.LIVE),
        ("qwen3", "tie_word_embeddings", None, Kind.LIVE),
        ("qwen3", "attention_bias", None, Kind.SHAPE),
        ("qwen3", "attention_dropout", None, Kind.TRAIN),
        ("qwen3", "initializer_range", None, Kind.DEAD),
        ("qwen3", "hidden_act", "relu2", Kind.LIVE),
        ("qwen3", "rope_parameters.rope_type", "proportional", Kind.LIVE),
        ("gemma3_text", "use_bidirectional_attention", None, Kind.LIVE),
        ("gemma3_text", "use_bidirectional_attention+sliding_window", 13, Kind.LIVE),
        ("qwen3", "per_layer_config", None, Kind.REJECTED),
        ("gemma3_text", "attn_logit_softcapping", None, Kind.DEAD),
        ("gemma3_text", "final_logit_softcapping", 5.0, Kind.LIVE),
        ("gemma3_text", "tie_word_embeddings", None, Kind.LIVE),
        ("gemma3_text", "rope_parameters.full_attention[linear].factor", None, Kind.LIVE),
        ("qwen3_moe", "router_aux_loss_coef", None, Kind.LIVE),
        ("qwen3_moe", "norm_topk_prob", None, Kind.LIVE),
        ("qwen3_moe", "num_experts", None, Kind.SHAPE),
        ("gpt_oss", "hidden_act", "gelu", Kind.DEAD),
        ("gpt_oss", "swiglu_limit", None, Kind.LIVE),
        ("gpt_oss", "swiglu_alpha", None, Kind.LIVE),
        ("gpt_oss", "rope_parameters[yarn].truncate", None, Kind.LIVE),
    ],
)
def test_a_field_is_classified_by_what_it_does(family, field, value, kind):
    assert _kind(family, field, value) is kind


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_scaled_rope_acts_at_the_probe(family):
    """Configs under which a key is dead could not tell a bridge that ignores it; `alpha` is HunYuan's alone."""
    reference = REFERENCES[family]
    keys = [v for v in variants(reference, tiny_config(reference, "base")) if "[" in v.field]
    quiet = [
        variant.id
        for variant in keys
        if classify(lambda raw: POOL.get(reference, raw, 0), variant, INPUTS)[0] is Kind.DEAD
        and not variant.field.endswith(
            ("[default].partial_rotary_factor", ".short_factor", "_attention[yarn].truncate", "[dynamic].alpha")
        )
    ]
    assert quiet == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_implements_is_refused_by_its_name(family):
    bridge = get_bridge(family)
    raw = tiny_config(REFERENCES[family], "base")
    assert bridge.parse(raw).decoder is not None
    for variant in must_refuse(REFERENCES[family], raw):
        with pytest.raises(Exception, match=r"frobnic|spiral|layer_types") as error:
            bridge.parse(variant.raw)
        assert error.value.exit_code == 4, variant.id
