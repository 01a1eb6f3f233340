"""`bestiary models` and `bestiary models show`: figures that add up, names people know, shapes without weights."""

import json

import pytest

from bestiary.models import Decoder
from bestiary.tools.catalogue import NoSuchFamily, build, families, find, list_models, published_name
from bestiary.tools.cli import main
from bestiary.tools.model_tree import Node, lines, tree

ROWS = {row.name: row for row in list_models()}


@pytest.mark.parametrize(
    ("asked", "family", "size"),
    [
        ("gemma3-270m", "Gemma3", "270m"),
        ("Gemma-3-270M", "Gemma3", "270m"),
        ("gemma3_text", "Gemma3", "270m"),
        ("Qwen2.5-0.5B", "Qwen2", "2.5-0.5b"),
        ("qwen3", "Qwen3", "0.6b"),
        ("Qwen3-30B-A3B", "Qwen3MoE", "30b-a3b"),
        ("gpt-oss-120b", "GptOss", "120b"),
        ("gpt_oss", "GptOss", "20b"),
        ("phi-4", "Phi3", "phi-4"),
        ("glm4moe-4.5-air", "Glm4MoE", "4.5-air"),
    ],
)
def test_a_size_answers_to_its_published_name_and_a_family_with_its_smallest(
    asked: str, family: str, size: str
) -> None:
    assert find(asked) == (family, size)


def test_every_size_is_found_by_the_name_it_is_listed_under() -> None:
    for family, cls in families().items():
        for size in cls.sizes:
            assert find(published_name(family, size)) == (family, size)


@pytest.mark.parametrize("asked", ["gpt2", "gemma3-271m", ""])
def test_an_unknown_name_says_what_is_near(asked: str) -> None:
    with pytest.raises(NoSuchFamily, match="bestiary models") as caught:
        find(asked)
    assert ("gemma3-270m" in str(caught.value)) is asked.startswith("gemma3")


def test_figures_of_a_dense_model_follow_from_its_parameters() -> None:
    """2 FLOPs a parameter and token forward, three times that to train; attention adds, the embedding is a lookup."""
    row = ROWS["qwen3-8b"]
    products = row.parameters - row.vocab_size * row.hidden_size
    assert 1.0 < row.forward_flops / (2 * products) < 1.2
    assert 2.9 < row.training_flops / row.forward_flops < 3.1
    assert (row.active, row.weights_bytes) == (row.parameters, 2 * row.parameters)
    assert row.cache_bytes_per_token == 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, width, bytes


def test_active_parameters_are_those_the_name_promises() -> None:
    assert ROWS["qwen3-235b-a22b"].active == pytest.approx(22e9, rel=0.02)
    assert ROWS["gpt-oss-120b"].active == pytest.approx(5.1e9, rel=0.13)  # its makers leave the embedding out


def _parameters(node: Node) -> int:
    own = 0
    for shape in node.parameters.values():
        size = 1
        for length in shape:
            size *= length
        own += size
    return node.count * (own + sum(map(_parameters, node.children)))


@pytest.mark.parametrize("name", ["gemma3-270m", "gpt-oss-120b", "glm-4.5-air", "deepseek-v3-671b"])
def test_the_tree_holds_every_parameter_once_and_none_is_loaded(name: str) -> None:
    family, size = find(name)
    model = build(family, size)
    assert isinstance(model, Decoder)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert _parameters(tree(model)) == ROWS[name].parameters


def test_layers_that_differ_are_drawn_apart() -> None:
    shown = "\n".join(lines(tree(build("Gemma3", "270m"))))
    assert "window of 512 tokens" in shown.split("5, 11, 17")[0]
    assert "full attention" in shown.split("5, 11, 17")[1]
    assert "tied: model.embed_tokens.weight" in shown


def test_show_writes_json_wherever_the_option_stands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["models", "--json", "-", "show", "qwen3-0.6b"], ["models", "show", "qwen3-0.6b", "--json", "-"]):
        assert main(argv) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["schema"], told["model"]["parameters"]) == ("bestiary.models_show/1", 596_049_920)
        assert told["tree"]["children"][0]["name"] == "model"
    assert main(["models", "show", "gpt2"]) == 7


def test_every_family_shows_the_date_of_its_verdict() -> None:
    assert all(row.verified for row in ROWS.values())
