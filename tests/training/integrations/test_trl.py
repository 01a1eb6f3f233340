"""TRL's SFT, DPO and reward trainers: ours moves as transformers' model does, resumes bit for bit, and is exported."""

import math
import shutil

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from bestiary.models import AutoDecoder, LoRAConfig
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations import trl_dpo, trl_reward, trl_sft
from bestiary.training.integrations.trl_dpo import DecoderDPOTrainer
from bestiary.training.integrations.trl_reward import DecoderRewardTrainer
from bestiary.training.integrations.trl_sft import DecoderSFTTrainer

from .pairs import assert_moved_alike, outcome, settings
from .tiny_checkpoint import FAMILIES_HERE, tokenizer, words, write_checkpoint, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:.*holds no score head")
LORA = LoRAConfig(r=3, alpha=6, targets=("q_proj", "down_proj"))
PAIRS = [
    {
        "prompt": words(3 + n % 4, n),
        "chosen": " " + words(2 + n % 5, 100 + n),
        "rejected": " " + words(2 + n % 3, 200 + n),
    }
    for n in range(8)
]
ANSWERS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(place / family, family) for family in FAMILIES_HERE}


def theirs_of(folder, kind=AutoModelForCausalLM):
    return kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")


def adapted(folder, place):
    """Ours with adapters, and PEFT's around transformers' model with the same."""
    ours = AutoDecoder.from_pretrained(folder, dtype=torch.float64, lora=LORA)
    ours.save_pretrained(place / "adapter")
    theirs = PeftModel.from_pretrained(
        theirs_of(folder), place / "adapter", is_trainable=True, autocast_adapter_dtype=False
    )
    return ours, theirs


def as_ours(theirs):
    """PEFT's names in our spelling."""
    names = {name: name.removeprefix("base_model.model.").replace(".default.weight", "") for name in theirs.moved}
    return type(theirs)(theirs.logged, {names[name]: moved for name, moved in theirs.moved.items()})


# ---------------------------------------------------------------------- SFT


def sft(make, model, out, accumulate, **options):
    args = SFTConfig(**settings(out, accumulate) | options)
    rows = Dataset.from_list(ANSWERS)
    return outcome(make, model, args, train_dataset=rows, processing_class=tokenizer())


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_sft_updates_are_those_of_transformers_model(folders, tmp_path, family, accumulate):
    """Losses on completions, the router's loss of a MoE model in it; entropy and accuracy in the log."""
    ours = sft(
        DecoderSFTTrainer, AutoDecoder.from_pretrained(folders[family], dtype=torch.float64), tmp_path, accumulate
    )
    theirs = sft(SFTTrainer, theirs_of(folders[family]), tmp_path, accumulate)
    logged = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    assert_moved_alike(ours, theirs, 1e-5, logged=logged)


def test_sft_of_our_adapters_is_that_of_pefts(folders, tmp_path):
    """Built in against wrapped around."""
    mine, other = adapted(folders["gemma3"], tmp_path)
    ours, theirs = sft(DecoderSFTTrainer, mine, tmp_path, 2), sft(SFTTrainer, other, tmp_path, 2)
    assert_moved_alike(ours, as_ours(theirs), 1e-5)


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_sft_packed_is_sft_unpacked(folders, tmp_path, family):
    """The same documents in packed rows without padding: the same update (the router's loss, a mean, left out)."""
    moved = []
    for packing in (False, True):
        model = AutoDecoder.from_pretrained(folders[family], dtype=torch.float64)
        options = {"max_steps": 1, "per_device_train_batch_size": len(ANSWERS), "router_aux_loss_coef": 0.0}
        made = sft(DecoderSFTTrainer, model, tmp_path, 1, **options, packing=packing, max_length=48)
        moved.append(made.moved)
    for name, unpacked in moved[0].items():
        assert (moved[1][name] - unpacked).norm() <= 1e-9 * unpacked.norm(), name


def test_without_our_head_trl_stops(folders, tmp_path):
    """It would score by its own kernel; it does not get as far as a wrong loss."""
    model = AutoDecoder.from_pretrained(folders["gemma3"])
    with pytest.raises(TypeError, match=r"Backbone\.forward\(\) got an unexpected keyword argument"):
        sft(SFTTrainer, model, tmp_path, 1)


# ---------------------------------------------------------------------- DPO


def dpo(make, model, out, accumulate, **named):
    options = named.pop("options", {})
    args = DPOConfig(**settings(out, accumulate) | options)
    rows = Dataset.from_list(PAIRS)
    return outcome(make, model, args, train_dataset=rows, processing_class=tokenizer(), **named)


@pytest.mark.parametrize(("family", "accumulate"), [("gemma3", 1), ("gemma3", 4), ("qwen3_moe", 2)])
def test_dpo_updates_are_those_of_transformers_model(folders, tmp_path, family, accumulate):
    """Policy and reference both; the first loss is ln 2."""
    model = AutoDecoder.from_pretrained(folders[family], dtype=torch.float64)
    ours = dpo(DecoderDPOTrainer, model, tmp_path, accumulate)
    reference = theirs_of(folders[family])
    theirs = dpo(DPOTrainer, theirs_of(folders[family]), tmp_path, accumulate, ref_model=reference)
    assert_moved_alike(ours, theirs, 1e-5, logged=("loss", "rewards/margins", "logits/chosen", "mean_token_accuracy"))
    if family == "gemma3":  # without a router's loss
        assert ours.logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-8)  # logged in float32


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_in_bfloat16_the_reference_computes_as_the_policy_does(folders, tmp_path, lora):
    """The first loss is ln 2 under autocast too, of weights that are no longer the checkpoint's."""
    model = AutoDecoder.from_pretrained(folders["gemma3"], dtype=torch.float32, lora=lora)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    ours = dpo(DecoderDPOTrainer, model, tmp_path, 1, options={"bf16": True})
    assert ours.logged[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("precomputed", [False, True])
def test_dpo_of_our_adapters_is_that_of_pefts(folders, tmp_path, precomputed):
    """The reference is the model without adapters on both sides, in every step or beforehand."""
    mine, other = adapted(folders["gemma3"], tmp_path)
    options = {"precompute_ref_log_probs": precomputed}
    ours = dpo(DecoderDPOTrainer, mine, tmp_path, 2, options=options)
    assert_moved_alike(ours, as_ours(dpo(DPOTrainer, other, tmp_path, 2, options=options)), 1e-5)


@pytest.mark.parametrize(
    ("options", "said"), [({"use_weighting": True}, "use_weighting"), ({"sync_ref_model": True}, "sync_ref_model")]
)
def test_dpo_options_that_would_be_wrong_are_refused(folders, tmp_path, options, said):
    """Weights need a sum that the head does not compute; adapters cannot be copied into their own reference."""
    model = AutoDecoder.from_pretrained(folders["gemma3"], lora=LORA)
    with pytest.raises(InvalidRun, match=said):
        dpo(DecoderDPOTrainer, model, tmp_path, 1, options=options)


# ---------------------------------------------------------------------- reward


@pytest.mark.parametrize(("family", "accumulate"), [("gemma3", 1), ("gemma3", 4), ("qwen3_moe", 2)])
def test_reward_updates_are_those_of_transformers_model(folders, tmp_path, family, accumulate):
    """Our score head against ForSequenceClassification, with margins."""
    torch.manual_seed(0)
    ours = AutoDecoder.from_pretrained(folders[family], dtype=torch.float64, head="score")
    ours.save_pretrained(tmp_path / "scored")
    theirs = theirs_of(tmp_path / "scored", AutoModelForSequenceClassification)
    rows = Dataset.from_list([row | {"margin": 0.1 * number} for number, row in enumerate(PAIRS)])
    made = [
        outcome(
            make,
            model,
            RewardConfig(**settings(tmp_path, accumulate)),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
        for make, model in ((DecoderRewardTrainer, ours), (RewardTrainer, theirs))
    ]
    assert_moved_alike(*made, 1e-5, logged=("loss", "grad_norm", "margin", "mean_reward", "accuracy"))


# ---------------------------------------------------------------------- the scripts


@pytest.mark.parametrize(
    ("script", "family", "extra"),
    [
        (trl_sft, "qwen3_moe", ("--packing",)),
        (trl_sft, "gemma3", ("--lora", "3")),
        (trl_dpo, "gemma3", ()),
        (trl_reward, "qwen3_moe", ()),
        (trl_reward, "gemma3", ("--lora", "3")),
    ],
)
def test_the_scripts_resume_bit_for_bit_and_export(folders, tmp_path, script, family, extra):
    """From `checkpoint-2` of 4 steps of AdamW; the end is the same file, and transformers or PEFT reads it."""
    data = write_rows(tmp_path / "rows.jsonl", ANSWERS if script is trl_sft else PAIRS)
    given = [str(folders[family]), str(data), "--steps", "4", "--save-every", "2", "--batch", "2", "--lr", "1e-2"]
    given += ["--max-length", "32", *extra, "--out"]
    whole = script.main([*given, str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again = script.main([*given, str(tmp_path / "again"), "--resume"])
    adapters = "--lora" in extra
    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    assert (whole / name).read_bytes() == (again / name).read_bytes()
    assert (whole / name).read_bytes() != (tmp_path / "whole" / "checkpoint-2" / name).read_bytes()

    kind, options, ids = AutoModelForCausalLM, {}, torch.arange(3, 20)[None]
    if script is trl_reward:
        kind, options = AutoModelForSequenceClassification, {"num_labels": 1}
    theirs = kind.from_pretrained(folders[family] if adapters else whole, **options)
    theirs = PeftModel.from_pretrained(theirs, whole) if adapters else theirs
    ours = AutoDecoder.from_pretrained(whole)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits.to(ours.dtype), rtol=1e-4, atol=1e-5)
