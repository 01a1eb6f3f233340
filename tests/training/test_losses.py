"""Every loss against TRL's own code where the definitions agree, and against its formula where TRL has none."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.gkd import GKDTrainer

from bestiary.kernels.divergence import TeacherHead, linear_divergence
from bestiary.training.losses import dft, nll, pairwise, squared
from bestiary.training.losses_preference import PAIRED, UNPAIRED, Pairs, kl_estimate

BETA, PAIRS, LENGTH = 0.3, 5, 9


def trainer(**more) -> SimpleNamespace:
    """What TRL's loss code asks of the trainer it belongs to."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    metrics = defaultdict(lambda: defaultdict(list))
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        beta=BETA,
        **more,
    )


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers(rows: int) -> tuple[Tensor, Tensor]:
    """A mask of completions (rows, LENGTH), of unequal lengths, and log-probabilities (rows, LENGTH − 1) in them."""
    mask = torch.zeros(rows, LENGTH, dtype=torch.int64)
    for row in range(rows):
        mask[row, 2 : 4 + row % 6] = 1
    return mask, -drawn(rows, LENGTH - 1, seed=1).abs() * mask[:, 1:]


def outputs(log_probs: Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        log_probs=log_probs, entropy=log_probs, mean_logits=log_probs, is_top1=log_probs > 0, aux_loss=None
    )


@pytest.mark.parametrize("name", PAIRED)
def test_losses_of_pairs_are_those_of_trl(name: str) -> None:
    mask, log_probs = answers(2 * PAIRS)
    log_probs.requires_grad_(True)
    reference = log_probs.detach().sum(1) + drawn(2 * PAIRS, seed=2)
    theirs = trainer(
        precompute_ref_logps=True,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        label_smoothing=0.1,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LENGTH, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": reference[:PAIRS],
        "ref_rejected_logps": reference[PAIRS:],
    }
    expected = DPOTrainer._compute_loss(theirs, lambda **_: outputs(log_probs), inputs, False)
    ratios, tokens = log_probs.sum(1) - reference, mask.sum(1)
    pairs = Pairs(ratios[:PAIRS], ratios[PAIRS:], tokens[:PAIRS], tokens[PAIRS:])
    values = PAIRED[name](pairs, BETA)
    assert values.shape == (PAIRS,)
    torch.testing.assert_close(values.mean(), expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(values.mean(), log_probs, retain_graph=True)
    (theirs_gradient,) = torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(gradient, theirs_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", UNPAIRED)
def test_losses_of_labelled_answers_are_those_of_trl(name: str, sign: float) -> None:
    """With both weights, and a KL estimate above and below 0."""
    mask, log_probs = answers(PAIRS)
    wanted = torch.tensor([True, False, False, True, True])
    reference, kl = log_probs.sum(1) + drawn(PAIRS, seed=3), sign * drawn(PAIRS, seed=4).abs()
    theirs = trainer(
        precompute_ref_logps=True,
        calculate_KL=name == "kto",
        loss_type=name,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: kl,
    )
    inputs = {
        "input_ids": torch.zeros(PAIRS, LENGTH, dtype=torch.int64),
        "attention_mask": mask,
        "completion_mask": mask,
        "label": wanted,
        "ref_logps": reference,
        "ref_KL_logps": torch.zeros(PAIRS, dtype=torch.float64),
    }
    expected = KTOTrainer._compute_loss(theirs, lambda **_: outputs(log_probs), inputs, False)
    z = kl_estimate(float(kl.sum()), PAIRS) if name == "kto" else 0.0
    weights = torch.where(wanted, reference.new_tensor(1.3), reference.new_tensor(0.7))
    values = weights * UNPAIRED[name](log_probs.sum(1) - reference, wanted, BETA, z)
    torch.testing.assert_close(values.mean(), expected.double(), rtol=1e-12, atol=0)
    assert (z > 0) == (name == "kto" and sign > 0)


def test_reward_losses_are_those_of_trl() -> None:
    scores, margin = drawn(2 * PAIRS, 1, seed=5), drawn(PAIRS, seed=6)
    theirs = trainer(args=SimpleNamespace(center_rewards_coefficient=0.02))
    given = {"margin": margin, "attention_mask": torch.ones(1)}
    expected = RewardTrainer.compute_loss(theirs, lambda **_: SimpleNamespace(logits=scores), given)
    found = pairwise(scores[:PAIRS, 0], scores[PAIRS:, 0], margin, 0.02)
    torch.testing.assert_close(found.mean(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(squared(scores[:PAIRS, 0], margin), (scores[:PAIRS, 0] - margin) ** 2)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
def test_divergences_are_those_of_trl(kind: str, beta: float) -> None:
    """Temperature on both sides, no factor of its square, and the teacher's share called beta."""
    hidden, weight, others, head = (drawn(*shape, seed=7 + i) for i, shape in enumerate([(6, 8), (30, 8)] * 2))
    expected = GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T)[None], (others @ head.T)[None], beta=beta, temperature=1.7, reduction="sum"
    )
    options = {"beta": beta} if kind == "jsd" else {}
    found = linear_divergence(
        hidden, weight, TeacherHead(others, head), kind=kind, temperature=1.7, reduction="sum", **options
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_the_weight_of_dft_has_no_gradient() -> None:
    """−Σ p log p with slope −p in log p; ignored tokens count for nothing."""
    log_probs = torch.tensor([[-0.5, 0.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss = dft(log_probs * torch.tensor([[1.0, 0.0, 1.0]]))
    loss.backward()
    p = torch.tensor([[-0.5, -2.0]], dtype=torch.float64).exp()
    torch.testing.assert_close(loss.detach(), 0.5 * p[0, 0] + 2.0 * p[0, 1])
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-p[0, 0], 0.0, -p[0, 1]]]))
    assert float(nll(log_probs.detach())) == 2.5
