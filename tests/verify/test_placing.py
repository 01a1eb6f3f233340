"""`--device`: what goes into a model lands on its device and what comes out is back; one that is not here says so.

`meta` stands for a device of its own: an operation between it and the CPU is an error, so a tensor that is forgotten
shows. It computes nothing, so nothing of a verdict is looked at here.
"""

import pytest
import torch

from bestiary.bridges import get_bridge
from bestiary.models import Cache
from bestiary.verify.cli import main
from bestiary.verify.placing import CPU, NoDevice, moved, placed, usable
from bestiary.verify.reference import Reference, ReferencePool
from bestiary.verify.run import BadUsage, run
from bestiary.verify.side import OurSide
from bestiary.verify.tiny import tiny_config
from tests.verify.families import FAMILIES, REFERENCES

META = torch.device("meta")
IDS = torch.arange(40).reshape(2, 20)
MASK = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)
POSITIONS = torch.arange(20)[None].expand(2, -1)
INPUTS = (
    {"attention_mask": MASK},
    {"attention_mask": MASK, "position_ids": POSITIONS},
    {"position_ids": POSITIONS},
    {},
)


def _reference(family):
    return Reference(REFERENCES[family], tiny_config(REFERENCES[family], "mha"), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_our_forward_reads_is_moved_to_the_device(family):
    reference = _reference(family)
    model = OurSide(get_bridge(family)).build(tiny_config(REFERENCES[family], "mha"), reference.state(), torch.float64)
    placed(model, META, back=META)
    for inputs in INPUTS:
        output = model(input_ids=IDS, **inputs)
        assert output["logits"].device == META
    embedded = model.get_submodule("model.embed_tokens")(IDS)
    cache = Cache(model.decoder_config)
    model(input_ids=IDS, past_key_values=cache, use_cache=True)
    for values in ({"inputs_embeds": embedded}, {"input_ids": IDS[:, :1], "past_key_values": cache}):
        assert model(**values)["logits"].device == META


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_everything_that_the_reference_reads_is_moved_to_the_device(family):
    """Without experts and with a mask: transformers looks at values elsewhere, and there are none on meta."""
    reference = _reference(family)
    placed(reference.model, META, back=META)
    with reference.running() as model:
        for inputs in INPUTS[:2]:
            assert model(input_ids=IDS, use_cache=False, **inputs)["logits"].device == META
            assert model(input_ids=IDS, labels=IDS, use_cache=False, **inputs)["loss"].device == META


def test_tensors_are_moved_wherever_they_stand_and_the_cpu_needs_no_hooks():
    assert moved(({"a": [torch.empty(1, device="meta")]}, "text", None), META)[0]["a"][0].device == META
    model = torch.nn.Module()
    placed(model, CPU)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line_with_what_to_do(name, capsys):
    assert main(["qwen3", "--device", name, "--quiet"]) == 7
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no CUDA device" in shown.err
    assert "run without --device, or" in shown.err


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x", "", "cpu:no"])
def test_no_device_for_the_levels_is_refused_by_name(name):
    with pytest.raises(NoDevice, match="--device"):
        usable(name)


def test_a_pool_of_references_belongs_to_one_device():
    with pytest.raises(BadUsage, match="a pool of references on meta"):
        run("qwen3", "V0", pool=ReferencePool(META))
