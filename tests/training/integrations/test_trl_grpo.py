"""TRL's GRPOTrainer: updates as transformers' model makes them; vLLM gets hub tensors, and refuses anything else."""

import shutil

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from bestiary.models import AutoDecoder, LoRAConfig
from bestiary.training.errors import InvalidRun
from bestiary.training.integrations import trl_grpo
from bestiary.training.integrations.trl_grpo import DecoderGRPOTrainer, reward_of

from .pairs import assert_moved_alike, outcome, settings
from .tiny_checkpoint import FAMILIES_HERE, tokenizer, words, write_checkpoint, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
LORA = LoRAConfig(r=3, alpha=6, targets=("q_proj", "down_proj"))
ROWS = [{"prompt": words(3 + n % 4, n), "answer": f"w{n}"} for n in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(place / family, family) for family in FAMILIES_HERE}


class Written:
    """Completions that do not come from the model, so that both sides learn from the same ones."""

    def _generate_single_turn(self, prompt_ids, *arguments, **named):
        step = self.state.global_step
        made = [[(31 * n + 17 * k + step) % 190 + 5 for k in range(3 + n % 3)] for n in range(len(prompt_ids))]
        return made, None


class Ours(Written, DecoderGRPOTrainer):
    pass


class Theirs(Written, GRPOTrainer):
    pass


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def grpo(make, model, out, accumulate, **options):
    options = {"model_init_kwargs": {"experts_implementation": "eager"}} | options  # of transformers' reference
    options = {"beta": 0.2, "num_generations": 2, "temperature": 0.7, "max_completion_length": 8} | options
    args = GRPOConfig(**settings(out, accumulate) | options)
    left = tokenizer()
    left.padding_side = "left"
    rows = Dataset.from_list(ROWS)
    return outcome(make, model, args, train_dataset=rows, processing_class=left, reward_funcs=reward)


@pytest.mark.parametrize(("family", "accumulate"), [("gemma3", 1), ("gemma3", 2), ("qwen3_moe", 4)])
def test_updates_are_those_of_transformers_model(folders, tmp_path, family, accumulate):
    """With a reference, a temperature and prompts padded on the left."""
    model = AutoDecoder.from_pretrained(folders[family], dtype=torch.float64)
    ours = grpo(Ours, model, tmp_path, accumulate)
    theirs = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float64, experts_implementation="eager")
    assert_moved_alike(
        ours, grpo(Theirs, theirs, tmp_path, accumulate), 1e-5, logged=("loss", "kl", "entropy", "reward")
    )


def test_our_adapters_are_trained_as_pefts_are(folders, tmp_path):
    """The reference is the model without them."""
    ours = AutoDecoder.from_pretrained(folders["gemma3"], dtype=torch.float64, lora=LORA)
    ours.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folders["gemma3"], dtype=torch.float64)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    expected = grpo(Theirs, theirs, tmp_path, 2)
    names = {name: name.removeprefix("base_model.model.").replace(".default.weight", "") for name in expected.moved}
    moved = {names[name]: change for name, change in expected.moved.items()}
    assert_moved_alike(
        grpo(Ours, ours, tmp_path, 2), type(expected)(expected.logged, moved), 1e-5, logged=("loss", "kl")
    )


def test_a_synced_reference_is_ours(folders, tmp_path):
    """The callback copies into the model that scores, not into transformers' model that it replaced."""
    made = []

    def make(**named):
        made.append(Ours(**named))
        return made[0]

    model = AutoDecoder.from_pretrained(folders["gemma3"])
    grpo(make, model, tmp_path, 2, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
    assert type(made[0].ref_model) is type(model)
    for ours, copied in zip(model.parameters(), made[0].ref_model.parameters(), strict=True):
        assert torch.equal(ours, copied)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"cast_lm_head_to_fp32": True}, "cast_lm_head"), ({"sync_ref_model": True}, "sync_ref_model")],
)
def test_options_that_would_be_wrong_are_refused(folders, tmp_path, options, said):
    """One rewrites the head, the other copies adapters into their own reference."""
    model = AutoDecoder.from_pretrained(folders["gemma3"], lora=LORA)
    with pytest.raises(InvalidRun, match=said):
        grpo(Ours, model, tmp_path, 1, **options)


def test_a_reward_that_cannot_be_imported_is_refused():
    """By the name that was given."""
    for name in ("no_such_module:f", "math:no_such_function", "math"):
        with pytest.raises(InvalidRun, match=f"reward = '{name}'"):
            reward_of(name)
    assert reward_of("math:fsum")([0.5]) == 0.5


def test_the_script_resumes_bit_for_bit_and_exports(folders, tmp_path):
    """From `checkpoint-2` of 4 steps, its own completions sampled again by the random states that Trainer keeps."""
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    given = [str(folders["gemma3"]), str(data), "--steps", "4", "--save-every", "2", "--batch", "4", "--lr", "1e-2"]
    given += ["--group", "2", "--max-new-tokens", "4", "--reward", f"{__name__}:reward", "--out"]
    whole = trl_grpo.main([*given, str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    again = trl_grpo.main([*given, str(tmp_path / "again"), "--resume"])
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    start = load_file(folders["gemma3"] / "model.safetensors")
    end = load_file(whole / "model.safetensors")
    assert any(not torch.equal(end[name], start[name]) for name in start)
    ids = torch.arange(3, 20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(whole)
    torch.testing.assert_close(AutoDecoder.from_pretrained(whole)(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
