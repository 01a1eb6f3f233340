"""A file of reinforcement learning: defaults that run, errors that name key, value and remedy."""

import json

import pytest
import yaml

from bestiary.training.errors import InvalidRun
from bestiary.training.rl.config import load_grpo_config

SMALL = {
    "model": {"src": "Qwen/Qwen3-0.6B"},
    "data": {"tokenizer": {"src": "Qwen/Qwen3-0.6B"}, "sources": [{"name": "a", "files": "a.jsonl", "kind": "prompt"}]},
    "rewards": {"functions": [{"name": "right", "function": "my_rewards:right"}]},
    "loop": {"steps": 10},
    "out": "runs/a",
}


def loaded(folder, *changes, content=SMALL):
    (folder / "run.json").write_text(json.dumps(content))
    return load_grpo_config(folder / "run.json", changes)


def test_what_a_run_saves_of_itself_is_the_same_run(tmp_path):
    config = loaded(
        tmp_path, "algorithm.name=dapo", "algorithm.options.clip_high=0.3", "algorithm.correction.kind=mis", "lora.r=4"
    )
    assert config.objective().objective.clip_high == 0.3
    assert config.gradient.correction.kind == "mis"
    assert config.reference is None
    assert config.lr == 2e-4
    assert loaded(tmp_path, content=yaml.safe_load(config.yaml())) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rollouts.top_p=0.9", r"rollouts.*top_p is refused: under a filter"),
        ("rollouts.max_tokens=4096", r"rollouts\.max_tokens = 4096 leaves no room for a prompt in data\.pack_length"),
        ("rollouts.engine=sglang", r"rollouts\.engine = 'sglang': .*'vllm'"),
        ("rollouts.dtype=bfloat16", r"dtype is of vllm, and engine = embedded"),
        ("rollouts.temperature=0", r"rollouts\.temperature = 0: .*greater than 0"),
        ("data.overflow=truncate", r"data\.overflow = truncate: a part of a prompt is no prompt; error or drop"),
        ("data.streams=2", r"data\.streams = 2: prompts have one; loop\.prompts says how many"),
        ("parallel.context=2", r"parallel\.context = 2 with the recipe grpo"),
        ("data.sources.0.kind=text", r"a is of kind text, which has no prompt; one of chat, completion"),
        ("rewards.functions=[]", r"rewards\.functions is empty and there is no environment"),
        ("rewards.functions.0.model=x", r"right has function and model: one judge, one name"),
        ("rewards.functions.0.function=null", r"rewards.functions is empty and there is no environment: nobody judges"),
        ("rewards.functions.0.token=T", r"right has a token and no endpoint that it is for"),
        ("algorithm.name=gpro", r"algorithm: .*gpro.*"),
        ("algorithm.options.cliphigh=1", r"algorithm: .*cliphigh"),
        ("algorithm.options.clip_low=2", r"algorithm: clip_low = 2"),
        ("algorithm.correction={kind: icepop, high: 5}", r"correction\.low = 0 of icepop"),
        ("algorithm.reference=adapters_off", r"algorithm\.reference = adapters_off and nothing asks for one"),
        ("algorithm.refill=2", r"algorithm\.refill = 2 and grpo trains on equal groups too"),
        ("environment={tools: {functions: [a:b]}, apart: true}", r"options and apart are of name; leave them out"),
        ("loop.updates=9", r"updates = 9 of 8 prompts: some would have none"),
        ("loop.steps=null", r"neither loop\.steps nor data\.epochs"),
        ("loop.stalenes=1", r"loop\.stalenes is no known key(.|\n)*did you mean staleness"),
        ("placement={policy: 3, nodes: 2}", r"placement: 3 places on 2 nodes, as many on each"),
        ("placement={together: [reward]}", r"placement\.together\.0 = 'reward': .*'rollout' or 'reference'"),
        ("recipe=sft", r"recipe = 'sft' and the command is grpo"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, change, said):
    with pytest.raises(InvalidRun, match=said):
        loaded(tmp_path, change)


def test_another_precision_of_the_engine_needs_a_correction(tmp_path):
    wide = ("rollouts.engine=vllm", "rollouts.dtype=bfloat16", "precision.parameters=float32")
    with pytest.raises(InvalidRun, match=r"rollouts\.dtype = bfloat16 and the policy computes in float32"):
        loaded(tmp_path, *wide)
    assert loaded(tmp_path, *wide, "algorithm.correction.kind=tis").rollouts.dtype == "bfloat16"


def test_the_reference_is_the_model_before_training(tmp_path):
    assert loaded(tmp_path, "algorithm.options.kl_coef=0.1").reference == "Qwen/Qwen3-0.6B"
    assert loaded(tmp_path, "algorithm.options.kl_coef=0.1").beside == ("Qwen/Qwen3-0.6B",)
    adapted = loaded(tmp_path, "algorithm.options.kl_coef=0.1", "lora.r=4")
    assert (adapted.reference, adapted.beside) == ("adapters_off", ())
    with pytest.raises(InvalidRun, match="adapters_off and the run has no section lora"):
        loaded(tmp_path, "algorithm.options.kl_coef=0.1", "algorithm.reference=adapters_off")


def test_the_constant_of_dr_grpo_is_the_longest_answer(tmp_path):
    config = loaded(tmp_path, "algorithm.name=dr_grpo", "rollouts.max_tokens=77")
    assert config.objective().objective.divisor == 77
    with pytest.raises(InvalidRun, match="max_tokens is missing"):
        loaded(tmp_path, "algorithm.name=dr_grpo", "environment.name=mine:World")
    given = ("algorithm.name=dr_grpo", "environment.name=mine:World", "algorithm.options.max_tokens=300")
    assert loaded(tmp_path, *given).objective().objective.divisor == 300


def test_an_environment_gives_rewards_of_its_own(tmp_path):
    free = loaded(tmp_path, "environment.name=mine:World", "rewards.functions=[]")
    assert free.weights is None
    named = loaded(tmp_path, "environment.name=mine:World", "rewards.functions=[{name: ndcg, weight: 2}]")
    assert named.weights == {"ndcg": 2.0}


def test_what_shares_the_places_of_the_policy_is_not_counted_twice(tmp_path):
    assert loaded(tmp_path).placement is None
    apart = loaded(tmp_path, "placement={policy: 2, rollout: 3, environment: 1}").placement
    assert (apart.places, apart.processes) == (2, 2 + 3 + 1 + 1 + 1)
    shared = loaded(tmp_path, "placement={policy: 2, rollout: 3, together: [rollout, reference]}").placement
    assert (shared.places, shared.processes) == (3, 3 * 3 + 1)


def test_the_head_of_vllm_is_as_wide_as_the_policys(tmp_path):
    wide = loaded(tmp_path, "rollouts.engine=vllm", "rollouts.options={enforce_eager: false}").rollouts.of_vllm
    assert wide == {"enforce_eager": False, "hf_overrides": {"head_dtype": "float32"}}
    assert loaded(tmp_path, "rollouts.engine=vllm", "rollouts.fp32_head=false").rollouts.of_vllm == {}
