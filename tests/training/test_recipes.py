"""Recipes: ln 2 to the bit, references and teachers that stay; `test_recipes_ranks` has what changes no gradient."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from bestiary.models import LoRAConfig
from bestiary.models.config import HeadKind
from bestiary.models.errors import InvalidConfig
from bestiary.models.lora import adapters_off
from bestiary.training.control import Control
from bestiary.training.data.errors import SampleRefused
from bestiary.training.data.packing import fit
from bestiary.training.data.tokens import TeacherWords, Tokens
from bestiary.training.errors import InvalidRun
from bestiary.training.recipes.distill import Distill, likeliest
from bestiary.training.recipes.documents import FORWARD, scoring_pass
from bestiary.training.recipes.dpo import DPO
from bestiary.training.recipes.kto import KTO, mismatched
from bestiary.training.recipes.reference import AdaptersOff, Live, Stored
from bestiary.training.recipes.reward import Reward
from bestiary.training.recipes.sft import SFT
from bestiary.verify.weights import perturb

from ..models.tiny import FAMILIES, tiny, tokens
from .recipes_case import assert_same, pack, pairs, singles, step

ADAPTERS = LoRAConfig(r=2, alpha=4.0, targets=("*_proj",))


def other(family):
    """A model of the family with other weights."""
    model = tiny(family)
    perturb(model, seed=1)
    return model


def case(name, family):
    """Model, recipe and groups of documents; weights whose words are not decided, so that gradients are large."""
    scored = name.startswith("reward")
    model = tiny(family, head=HeadKind.SCORE, tie_word_embeddings=False) if scored else tiny(family)
    groups = pairs() if name in ("dpo", "reward") else singles()
    made = {
        "sft": lambda: SFT(),
        "sft dft": lambda: SFT("dft"),
        "dpo": lambda: DPO(Live(other(family)), "sigmoid", beta=0.02),
        "kto": lambda: KTO(Live(other(family)), beta=0.02, undesirable_weight=0.5),
        "reward": lambda: Reward(margin=0.3, centring=0.01),
        "reward squared": lambda: Reward("squared"),
        "distill": lambda: Distill(other(family), "jsd", beta=0.3, temperature=2.0),
        "distill top 5": lambda: Distill(other(family), "reverse_kl", top_k=5),
    }
    return model.train(), made[name](), groups


NAMES = ("sft", "sft dft", "dpo", "kto", "reward", "reward squared", "distill", "distill top 5")


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_of_padding_has_a_graph_and_no_gradient(name):
    model, recipe, groups = case(name, "qwen3")
    empty = recipe.batch(pack([], spare=9))
    if name == "kto":
        empty["z"] = 0.0
    assert recipe.count(empty) == 0
    found = recipe.loss(model, empty)
    assert float(found.total.detach()) == 0.0
    found.total.backward()
    graded = {n for n, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded == set(step(recipe, model, [pack(groups)])[1])
    model.zero_grad()
    recipe.loss(model, empty).total.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_policy_and_reference_agree_to_the_bit_at_the_first_step(dtype):
    """ln 2 a pair: live and stored with the same weights, adapters off where the adapters are fresh."""
    one = pack(pairs(2))
    wide = torch.promote_types(dtype, torch.float32)
    for family in FAMILIES:
        model = tiny(family, dtype).train()
        adapted = tiny(family, dtype, lora=ADAPTERS).train()
        for name, parameter in adapted.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.zero_()
        same = deepcopy(model)
        for policy, reference in ((model, Live(same)), (model, Stored.of(same, [one])), (adapted, AdaptersOff())):
            for loss in ("sigmoid", "sigmoid_norm", "robust"):
                recipe = DPO(reference, loss)
                total = recipe.loss(policy, recipe.batch(one)).total.detach()
                exact = torch.tensor(math.log(2), dtype=wide)
                if loss != "robust":
                    assert total == 2 * exact, (family, loss)
                torch.testing.assert_close(total, 2 * exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("adapters", [None, ADAPTERS], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_few_tokens_in_padded_rows_are_scored_as_they_train(dtype, autocast, adapters):
    """To the bit: by the policy without gradients, and by a frozen copy of it."""
    ids = tokens(4, 13)
    lengths = torch.tensor([[6], [7], [10], [13]])  # a sum over keys goes by fours: other sums with and without padding
    mask = (torch.arange(13) < lengths).long()
    for family in FAMILIES:
        model = tiny(family, dtype, lora=adapters).train()

        def log_probs(model):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                labels = ids.where(mask.bool(), -100)
                return model(ids, attention_mask=mask, shift_labels=labels).log_probs.detach()

        trained = log_probs(model)
        for other in (model, deepcopy(model).requires_grad_(False).eval()):
            with scoring_pass(other):
                assert torch.equal(log_probs(other), trained), family


@pytest.mark.slow
def test_adapters_off_is_a_frozen_copy_of_the_base():
    """And the stored sums of one, whatever pack they were computed in."""
    groups = pairs()
    for family in FAMILIES:
        model = tiny(family, lora=ADAPTERS).train()
        base = deepcopy(model)
        for name, parameter in base.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.zero_()
        off = step(DPO(AdaptersOff(), beta=0.02), model, [pack(groups)])
        for reference in (Live(base), Stored.of(base, [pack(groups[:3]), pack(groups[3:])])):
            loss, found = step(DPO(reference, beta=0.02), model, [pack(groups)])
            torch.testing.assert_close(loss, off[0], rtol=1e-9, atol=1e-9)
            assert_same(found, off[1])


def test_adapters_come_back_and_a_model_without_any_is_refused():
    model = tiny("qwen3_moe", lora=ADAPTERS)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    with adapters_off(model):
        assert not torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(InvalidConfig, match="without LoRA"), adapters_off(tiny("qwen3")):
        pass


@pytest.mark.parametrize("name", ["dpo", "kto", "distill"])
def test_no_gradient_reaches_the_other_model(name):
    model, recipe, groups = case(name, "qwen3")
    held = recipe.teacher if name == "distill" else recipe.reference.model
    before = deepcopy(held.state_dict())
    step(recipe, model, [pack(groups)])
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in held.parameters())
    assert all(torch.equal(value, before[key]) for key, value in held.state_dict().items())
    assert model.training


def test_stored_sums_travel_by_file_and_miss_nothing_silently(tmp_path):
    model, one = tiny("qwen3"), pack(pairs(2))
    made = Stored.of(model, [one])
    made.save(tmp_path / "sums.npz")
    assert Stored.load(tmp_path / "sums.npz").sums == made.sums
    with pytest.raises(InvalidRun, match=r"document 4 of a pack \(2 of 6\) has no stored reference"):
        DPO(made).batch(pack(pairs(3)))


def test_kl_of_kto_is_over_answers_to_other_prompts():
    """z = max(0, mean log-ratio of prompts with the next answer), computed apart, and one number for all batches."""
    model, recipe, groups = case("kto", "qwen3")
    for turned in (False, True):
        policy, reference = (recipe.reference.model, model) if turned else (model, recipe.reference.model)
        own = KTO(Live(deepcopy(reference)), beta=0.02)
        batches = [own.batch(pack(groups[:3])), own.batch(pack(groups[3:]))]

        own.prepare(policy, batches, Control())
        every = {turn for batch in batches for turn in batch["turns"]}
        assert len(every) == 8
        rows = [pair for row in mismatched(every, batches[0]["input_ids"].shape[1]) for pair in row]
        known = dict(every)
        assert len(rows) == 8
        assert all(known[prompt] != answer for prompt, answer in rows)
        ratios = []
        for prompt, answer in rows:
            ids = torch.frombuffer(bytearray(prompt + answer), dtype=torch.int32).long()[None]
            border = len(prompt) // 4
            with torch.no_grad():
                log_p = [
                    one(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[border - 1 :].sum()
                    for one in (policy, reference)
                ]
            ratios.append(log_p[0] - log_p[1])
        expected = max(0.0, float(torch.stack(ratios).mean()))
        assert batches[0]["z"] == batches[1]["z"] == pytest.approx(expected, rel=1e-9)


def test_distillation_is_the_divergence_of_the_logits():
    """Over the targets alone, in each direction; and through FSDP2, which frees what it gathers."""
    student, teacher, one = tiny("gemma3"), other("gemma3"), pack(singles(3))
    recipe = Distill(teacher, "forward_kl", temperature=1.5)
    batch = recipe.batch(one)
    given = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}
    ours, theirs = ((model(**given).logits / 1.5).log_softmax(-1).detach() for model in (student, teacher))
    counted = (batch["shift_labels"] != -100)[..., None]
    for loss, (p, q) in {"forward_kl": (theirs, ours), "reverse_kl": (ours, theirs)}.items():
        found = Distill(teacher, loss, temperature=1.5).loss(student, batch).total.detach()
        torch.testing.assert_close(found, (p.exp() * (p - q) * counted).sum(), rtol=1e-9, atol=1e-12)
    expected = step(recipe, student, [one])
    whole = Distill(teacher, "forward_kl", temperature=1.5, top_k=203)
    torch.testing.assert_close(step(whole, student, [one])[0], expected[0], rtol=1e-9, atol=1e-12)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for model in (student, teacher):
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], mesh=mesh)
            fully_shard(model, mesh=mesh)
        again = Distill(teacher, "forward_kl", temperature=1.5)
        for _ in range(2):
            loss, gradients = step(again, student, [one])
            torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=1e-12)
            assert_same({name: g.full_tensor() for name, g in gradients.items()}, expected[1])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", ["reverse_kl", "jsd"])
def test_a_teacher_s_words_from_data_train_as_the_teacher_does(loss, dtype):
    """Packed with others and alone, at another temperature; without the teacher in memory."""
    family, bound = "gemma3", 1e-12 if dtype is torch.float64 else 1e-6
    student, teacher, groups = tiny(family, dtype), tiny(family, dtype), singles(4)
    perturb(teacher, seed=1)
    live = Distill(teacher, loss, temperature=1.5, top_k=5)
    expected = step(live, student, [pack(groups)])
    told = [taught(live, *group) for group in groups]
    stored = Distill(None, loss, temperature=1.5)
    for packs in ([pack(told)], [pack(told[:1]), pack(told[1:], spare=0)]):
        value, gradients = step(stored, student, packs)
        torch.testing.assert_close(value, expected[0], rtol=bound, atol=bound)
        assert_same(gradients, expected[1], bound)
    with pytest.raises(InvalidRun, match=r"3 of \d+ trained tokens of a pack have no teacher's words"):
        stored.batch(pack([*told[1:], (replace(groups[0][0], labels=keep(groups[0][0].labels, 3)),)]))


def keep(labels, count):
    """The last `count` labels."""
    made = np.full_like(labels, -100)
    made[-count:] = labels[-count:]
    return made


def taught(recipe, one):
    """The document with its teacher's words beside it."""
    batch = recipe.batch(pack([(one,)], spare=0))
    head = recipe.teacher(**{name: batch[name] for name in FORWARD}, return_teacher=True).teacher
    found = likeliest(head, recipe.top_k, recipe.temperature, batch["shift_labels"].flatten() != -100)
    words, log_probs = (column.roll(1, 0).numpy() for column in (found.words.int(), found.log_prob.detach()))
    return (replace(one, teacher=TeacherWords(words, log_probs)),)


def test_pairs_bring_their_own_margins():
    """In place of the constant; a pack in which some have none is refused, and one of answers without labels too."""
    model = tiny("qwen3", head=HeadKind.SCORE, tie_word_embeddings=False)
    given = [
        tuple(replace(one, value=margin) for one in pair) for pair, margin in zip(pairs(2), (0.5, 2.0), strict=True)
    ]
    recipe = Reward(margin=7.0)
    batch = recipe.batch(pack(given))
    scores = model(**{name: batch[name] for name in FORWARD}).scores[:4, 0].view(2, 2)
    expected = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1] - torch.tensor([0.5, 2.0])).sum()
    torch.testing.assert_close(recipe.loss(model, batch).total, expected, rtol=1e-12, atol=0)
    with pytest.raises(SampleRefused, match="document 2 of 4 in a pack carries no number"):
        recipe.batch(pack([given[0], *pairs(1)]))
    with pytest.raises(SampleRefused, match="document 0 of 2"):
        KTO(AdaptersOff()).batch(pack(pairs(1)))


def test_a_pair_that_is_equal_after_truncation_is_left_out():
    """What sets the answers apart lies behind the cut (OpenRLHF#1311)."""
    better, worse = pairs(1)[0]
    ids = better.input_ids.copy()
    ids[-1] = (ids[-1] + 1) % 203
    twin = Tokens(ids, ids)
    assert fit((better, twin), 14, "truncate", "here") == []
    assert len(fit((better, worse), 14, "truncate", "here")) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(AdaptersOff(), "sigmod"), r"loss.name = 'sigmod'(.|\n)*did you mean sigmoid"),
        (lambda: DPO(AdaptersOff(), beta=0.0), "loss.beta = 0"),
        (lambda: DPO(AdaptersOff(), label_smoothing=0.1), "which sigmoid does not read"),
        (lambda: DPO(AdaptersOff(), "robust", label_smoothing=0.5), "label_smoothing = 0.5"),
        (lambda: KTO(AdaptersOff(), beta=-1.0), "loss.beta = -1"),
        (lambda: KTO(AdaptersOff(), desirable_weight=-1.0), "desirable_weight = -1"),
        (lambda: KTO(Stored({})), "with a stored reference"),
        (lambda: Reward("squared", margin=1.0), "margin = 1 with loss.name = squared"),
        (lambda: Reward(centring=-1.0), "centring = -1"),
        (lambda: Reward("pairwize"), "did you mean pairwise"),
        (lambda: Distill(tiny("qwen3"), "jsd", beta=1.0), "loss.beta = 1"),
        (lambda: Distill(tiny("qwen3"), temperature=0.0), "temperature = 0"),
        (lambda: Distill(tiny("qwen3"), top_k=0), "top_k = 0"),
        (lambda: Distill(None, top_k=4), "top_k = 4 and no loss.teacher"),
        (lambda: DPO(AdaptersOff()).batch(pack(singles(3))), "3 documents under dpo"),
        (lambda: Reward().batch(pack(singles(3))), "3 documents under reward"),
        (lambda: step(Reward(), tiny("qwen3"), [pack(pairs(1))]), "head = lm"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, message):
    with pytest.raises(InvalidRun, match=message):
        make()


def test_a_model_is_not_its_own_reference_or_teacher():
    model = tiny("qwen3")
    with pytest.raises(InvalidRun, match="the policy itself"):
        step(DPO(Live(model)), model, [pack(pairs(1))])
    with pytest.raises(InvalidRun, match="the student itself"):
        step(Distill(model), model, [pack(singles(1))])
