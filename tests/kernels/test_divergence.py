"""Distillation losses and selected log-probabilities against all logits at once."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bestiary.kernels import divergence, divergence_terms, selected, vocab_tiles
from bestiary.kernels.dispatch import force
from bestiary.kernels.divergence import TeacherHead, TopK, linear_divergence
from bestiary.kernels.errors import InvalidArgument, LabelOutOfRange, UnsupportedDispatch
from bestiary.kernels.selected import linear_selected_log_prob

from .conftest import poisoned
from .naive_head import MAPS, Case, case, in_small_pieces, logits_of

TOKENS, VOCAB = 7, 203
DOUBLE = {"rtol": 1e-10, "atol": 1e-12}
KINDS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward_kl"},
    "reverse": {"kind": "reverse_kl"},
    "jsd": {"kind": "jsd"},
    "jsd near the teacher": {"kind": "jsd", "beta": 0.9},
}


@pytest.fixture(params=["chunked", "chunked in small pieces", "reference", "reference in small pieces"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    name, *pieces = request.param.split(" in ")
    if pieces:
        in_small_pieces(monkeypatch)
        for module in (divergence, selected):
            monkeypatch.setattr(module, "LOGITS_PER_CHUNK", 200)
    with force(divergence=name, selected_log_prob=name), poisoned():
        yield name


def teacher_of(tokens: int = TOKENS, vocab: int = VOCAB, seed: int = 5, **logit_map: float) -> TeacherHead:
    """Wider than the student, with a bias."""
    other = case(tokens, vocab, seed, size=20)
    return TeacherHead(other.hidden * 0.7, other.weight, other.bias, **logit_map)


def teacher_log_prob(teacher: TeacherHead, temperature: float) -> Tensor:
    options: dict[str, Any] = {"divisor": teacher.divisor, "softcap": teacher.softcap, "temperature": temperature}
    return logits_of(teacher.hidden, teacher.weight, teacher.bias, **options).log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def measured(s: Tensor, t: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """By definition."""
    if kind == "forward_kl":
        return kl(t, s)
    if kind == "reverse_kl":
        return kl(s, t)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def naive(student: Case, teacher: TeacherHead, kind: str, beta: float = 0.5, **logit_map: Any) -> Tensor:
    s = logits_of(student.hidden, student.weight, student.bias, **logit_map).log_softmax(-1)
    return measured(s, teacher_log_prob(teacher, logit_map.get("temperature", 1.0)), kind, beta)


def gradients(loss: Tensor, student: Case, **options: Any) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, (student.hidden, student.weight, student.bias), **options)]


def assert_same(ours: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, **{**DOUBLE, **tolerance})


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logit_map", MAPS)
def test_values_and_gradients(logit_map: str, kind: str, reduction: str) -> None:
    """Of every kind under every way of making logits; the teacher has a soft cap of its own."""
    student, teacher = case(TOKENS, VOCAB).leaves(), teacher_of(softcap=5.0, divisor=1.3)
    weights = torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)
    options = {**MAPS[logit_map], **KINDS[kind]}
    loss = linear_divergence(
        student.hidden,
        student.weight,
        teacher,
        bias=student.bias,
        reduction=reduction,
        token_weights=weights,
        **options,
    )
    values = weights * naive(student, teacher, **options)
    expected = {"mean": values.sum() / weights.sum(), "sum": values.sum(), "none": values}[reduction]
    upstream = torch.randn(loss.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_same(*(gradients(x, student, grad_outputs=upstream) for x in (loss, expected)))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logit_map", ["plain", "divisor, cap and temperature"])
def test_gradcheck(logit_map: str, kind: str, reduction: str) -> None:
    """Numerical derivatives, in float64."""
    student, teacher = case(4, 67).leaves(), teacher_of(4, 67)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {**MAPS[logit_map], **KINDS[kind], "reduction": reduction}
        return linear_divergence(hidden, weight, teacher, bias=bias, **options)

    assert torch.autograd.gradcheck(run, (student.hidden, student.weight, student.bias), fast_mode=True)


@given(st.integers(0, 5), st.integers(1, 130), st.integers(0, 2**16), st.sampled_from(sorted(KINDS)))
def test_any_size(tokens: int, vocab: int, seed: int, kind: str) -> None:
    """No token and one, one word and more than a tile."""
    student, teacher = case(tokens, vocab, seed).leaves(), teacher_of(tokens, vocab, seed + 1)
    expected = gradients(naive(student, teacher, **KINDS[kind]).sum(), student)
    for name in ("chunked", "reference"):
        with force(divergence=name):
            loss = linear_divergence(
                student.hidden, student.weight, teacher, bias=student.bias, reduction="sum", **KINDS[kind]
            )
            assert_same(gradients(loss, student), expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(kind: str) -> None:
    student = case(TOKENS, VOCAB).leaves()
    teacher = TeacherHead(student.hidden, student.weight, student.bias)
    loss = linear_divergence(student.hidden, student.weight, teacher, bias=student.bias, **KINDS[kind])
    assert_same(gradients(loss, student), [torch.zeros_like(loss), *(torch.zeros_like(student[i]) for i in (0, 1, 3))])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counted", [0, 3, 7])
def test_masked_tokens_are_never_read(counted: int, kind: str) -> None:
    """NaN there reaches nothing; where no token counts, the loss is exactly 0 with a graph."""
    student, teacher = case(TOKENS, VOCAB), teacher_of()
    mask = torch.arange(TOKENS) < counted
    dirty = student._replace(hidden=student.hidden.masked_fill(~mask[:, None], torch.nan)).leaves()
    other = teacher._replace(hidden=teacher.hidden.masked_fill(~mask[:, None], torch.nan))
    loss = linear_divergence(dirty.hidden, dirty.weight, other, mask=mask, **KINDS[kind])
    of_hidden, of_weight = torch.autograd.grad(loss, (dirty.hidden, dirty.weight))
    clean = student._replace(hidden=student.hidden[:counted], bias=torch.zeros(VOCAB)).leaves()
    expected = naive(clean, teacher._replace(hidden=teacher.hidden[:counted]), **KINDS[kind]).sum() / max(counted, 1)
    clean_hidden, clean_weight = torch.autograd.grad(expected, (clean.hidden, clean.weight))
    assert_same([loss.detach(), of_hidden[:counted], of_weight], [expected.detach(), clean_hidden, clean_weight])
    assert of_hidden[counted:].abs().sum() == 0
    if counted == 0:
        assert loss == 0


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_words_that_cannot_come_on_either_side(kind: str) -> None:
    """Logits of −∞ in both count for nothing; in one of them as the definition has it."""
    student, teacher = case(TOKENS, 130), teacher_of(TOKENS, 130)
    both = torch.arange(130) < 70
    biases = [bias.masked_fill(both, -torch.inf) for bias in (student.bias, teacher.bias)]
    banned = student._replace(bias=biases[0]).leaves()
    loss = linear_divergence(
        banned.hidden, banned.weight, teacher._replace(bias=biases[1]), bias=banned.bias, **KINDS[kind]
    )
    rest = Case(student.hidden, student.weight[70:], student.target, student.bias[70:]).leaves()
    expected = naive(rest, teacher._replace(weight=teacher.weight[70:], bias=teacher.bias[70:]), **KINDS[kind]).mean()
    ours, theirs = gradients(loss, banned), gradients(expected, rest)
    assert_same([ours[0], ours[1], ours[2][70:], ours[3][70:]], theirs)
    assert ours[2][:70].abs().max() == 0
    one_sided = linear_divergence(
        student.hidden, student.weight, teacher._replace(bias=biases[1]), bias=student.bias, **KINDS[kind]
    )
    assert (one_sided == torch.inf) == (kind == "reverse"), "the teacher never says what the student does"
    if kind != "reverse":
        silent = biases[1].masked_fill(both, -1e4)
        almost = naive(student, teacher._replace(bias=silent), **KINDS[kind]).mean()
        torch.testing.assert_close(one_sided, almost, **DOUBLE)


@pytest.mark.parametrize("kind", KINDS)
def test_small_divergences_keep_digits_in_fp32(kind: str) -> None:
    """Student and teacher differ by a thousandth: rounding of the logits does not drown what is left."""
    student = case(64, VOCAB)
    teacher = student.hidden + 1e-3 * torch.randn(
        64, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    narrow = [tensor.float() for tensor in (student.hidden, student.weight, teacher)]
    wide = Case(narrow[0].double(), narrow[1].double(), student.target, torch.zeros(VOCAB, dtype=torch.float64))
    truth = naive(wide, TeacherHead(narrow[2].double(), narrow[1].double()), **KINDS[kind])
    assert truth.max() < 1e-4
    ours = linear_divergence(narrow[0], narrow[1], TeacherHead(narrow[2], narrow[1]), reduction="none", **KINDS[kind])
    error = ((ours.double() - truth).abs() / truth).max()
    s, t = (logits_of(h, narrow[1]).log_softmax(-1) for h in (narrow[0], narrow[2]))
    plain = ((measured(s, t, **KINDS[kind]).double() - truth).abs() / truth).max()
    assert error < 1e-3
    assert error < 0.1 * plain


@pytest.mark.usefixtures("implementation")
def test_calls_on_a_kept_graph_and_scaled_losses() -> None:
    """Each backward call gives its own gradients."""
    student, teacher = case(TOKENS, VOCAB).leaves(), teacher_of()
    loss = linear_divergence(student.hidden, student.weight, teacher, bias=student.bias)
    expected = gradients(naive(student, teacher, kind="forward_kl").mean(), student)[1:]
    for scale in (1.0, 0.25, 1.0):
        upstream = torch.tensor(scale, dtype=torch.float64)
        ours = gradients(loss, student, grad_outputs=upstream, retain_graph=True)[1:]
        assert_same(ours, [scale * gradient for gradient in expected])


@pytest.mark.usefixtures("implementation")
def test_num_items_and_micro_batches() -> None:
    """Parts divided by the tokens of all add up to the whole."""
    student, teacher = case(TOKENS, VOCAB), teacher_of()
    whole = linear_divergence(student.hidden, student.weight, teacher)
    parts = [
        linear_divergence(
            student.hidden[rows], student.weight, teacher._replace(hidden=teacher.hidden[rows]), num_items=TOKENS
        )
        for rows in (slice(0, 2), slice(2, 7))
    ]
    torch.testing.assert_close(sum(parts), whole, **DOUBLE)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs_give_fp32_results(dtype: torch.dtype) -> None:
    student, teacher = case(TOKENS, VOCAB), teacher_of()
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (student.hidden, student.weight))
    narrow = TeacherHead(teacher.hidden.to(dtype), teacher.weight.to(dtype))
    loss = linear_divergence(hidden, weight, narrow)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    wide = Case(
        hidden.detach().double(), weight.detach().double(), student.target, torch.zeros(VOCAB).double()
    ).leaves()
    expected = naive(wide, TeacherHead(narrow.hidden.double(), narrow.weight.double()), kind="forward_kl").mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
    bound = 0.51 * torch.finfo(dtype).eps * wide.weight.grad.abs() + 2e-6
    assert ((weight.grad.double() - wide.weight.grad).abs() <= bound).all()


def test_logits_are_never_held_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is inputs; the frozen side of the student costs nothing."""
    in_small_pieces(monkeypatch)
    student, teacher = case(64, 256).leaves(), teacher_of(64, 256)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = linear_divergence(student.hidden, student.weight.detach(), teacher)
    assert {tuple(tensor.shape) for tensor in saved} == {(64, 12), (256, 12)}
    assert loss.grad_fn.held.weight is None
    assert loss.grad_fn.held.hidden.shape == (64, 12)


def test_terms_are_never_negative() -> None:
    """Word by word, near and far from equality: that is what keeps their sum exact."""
    generator = torch.Generator().manual_seed(0)
    s = (torch.randn(8, 500, generator=generator) * 4).log_softmax(-1)
    for scale in (1e-3, 1.0, 30.0):
        t = (s + scale * torch.randn(8, 500, generator=generator)).log_softmax(-1)
        for options in KINDS.values():
            terms = divergence_terms.Measure(options["kind"], options.get("beta", 0.5)).terms(s, t)
            assert terms.min() >= -1e-9


# ---------------------------------------------------------------------- a teacher's top k


def top_k_of(teacher: TeacherHead, k: int, tail: Any = "bucket", temperature: float = 1.0) -> TopK:
    best = teacher_log_prob(teacher, temperature).topk(k, dim=-1)
    return TopK(best.indices, best.values, tail)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("k", [1, 5, 60])
def test_top_k_is_the_divergence_over_the_words_named(k: int, logit_map: str, kind: str, tail: str) -> None:
    """And, in a bucket, one word for all the others; under every way of making the student's logits."""
    student, teacher = case(TOKENS, VOCAB).leaves(), teacher_of()
    temperature = MAPS[logit_map].get("temperature", 1.0)
    top = top_k_of(teacher, k, tail, temperature)
    s = logits_of(student.hidden, student.weight, student.bias, **MAPS[logit_map]).log_softmax(-1)
    t = teacher_log_prob(teacher, temperature)
    if tail == "bucket":
        named = torch.zeros(TOKENS, VOCAB).bool().scatter(1, top.words, True)
        columns = [
            torch.cat((c.gather(1, top.words), c.masked_fill(named, -torch.inf).logsumexp(1, keepdim=True)), 1)
            for c in (s, t)
        ]
    else:
        columns = [c.gather(1, top.words).log_softmax(1) for c in (s, t)]
    expected = measured(*columns, **KINDS[kind]).mean()
    options = {**KINDS[kind], **MAPS[logit_map]}
    loss = linear_divergence(student.hidden, student.weight, top, bias=student.bias, **options)
    # What k words leave to the teacher's others is a difference from 1: of 1e-8, half of the digits are left.
    tolerance = {"rtol": 1e-7, "atol": 1e-10} if (k, tail) == (60, "bucket") else DOUBLE
    assert_same(gradients(loss, student), gradients(expected, student), **tolerance)
    if tail == "bucket":
        assert loss <= naive(student, teacher, **options).mean()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_all_words_named_is_the_full_divergence(kind: str) -> None:
    """Nothing is left for the bucket."""
    student, teacher = case(TOKENS, 67).leaves(), teacher_of(TOKENS, 67)
    loss = linear_divergence(student.hidden, student.weight, top_k_of(teacher, 67), bias=student.bias, **KINDS[kind])
    expected = naive(student, teacher, **KINDS[kind]).mean()
    assert_same(gradients(loss, student), gradients(expected, student))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_name_fewer_words(kind: str) -> None:
    """−1 stands for no word, wherever it stands."""
    student, teacher = case(TOKENS, VOCAB).leaves(), teacher_of()
    top = top_k_of(teacher, 3)
    padded = TopK(
        torch.cat((torch.full((TOKENS, 2), -1), top.words), 1), torch.cat((torch.zeros(TOKENS, 2), top.log_prob), 1)
    )
    losses = [
        gradients(linear_divergence(student.hidden, student.weight, t, bias=student.bias, **KINDS[kind]), student)
        for t in (padded, top)
    ]
    assert_same(*losses)


# ---------------------------------------------------------------------- selected log-probabilities


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("logit_map", MAPS)
@pytest.mark.parametrize("k", [0, 1, 4, 67])
def test_selected_log_probabilities(k: int, logit_map: str) -> None:
    """Of the words and of all the others, with gradients, among them rows with fewer words."""
    student = case(TOKENS, 67).leaves()
    words = torch.rand(TOKENS, 67, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :k].clone()
    words[2, : k // 2] = -1
    out = linear_selected_log_prob(student.hidden, student.weight, words, bias=student.bias, **MAPS[logit_map])
    log_p = logits_of(student.hidden, student.weight, student.bias, **MAPS[logit_map]).log_softmax(-1)
    taken = log_p.gather(1, words.clamp(min=0))
    here = words >= 0
    assert (out.log_prob[~here] == -torch.inf).all()
    torch.testing.assert_close(out.log_prob[here], taken[here], **DOUBLE)
    named = torch.zeros(TOKENS, 68).bool().scatter(1, words.where(here, 67), True)[:, :67]
    some = ~named.all(1)
    rest = log_p[some].masked_fill(named[some], -torch.inf).logsumexp(1)
    torch.testing.assert_close(out.log_rest[some], rest, **DOUBLE)
    assert (out.log_rest[~some] == -torch.inf).all()
    weights = torch.arange(1.0, TOKENS * k + 1, dtype=torch.float64).view(TOKENS, k)
    ours = (weights[here] * out.log_prob[here]).sum() + 3 * out.log_rest[some].sum()
    assert_same(gradients(ours, student), gradients((weights[here] * taken[here]).sum() + 3 * rest.sum(), student))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("logit_map", MAPS)
def test_selected_log_probabilities_gradcheck(logit_map: str) -> None:
    student = case(4, 67).leaves()
    words = torch.tensor([[3, 66], [0, 1], [64, 2], [5, -1]])

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out = linear_selected_log_prob(hidden, weight, words, bias=bias, **MAPS[logit_map])
        return out.log_prob.masked_fill(words < 0, 0.0), out.log_rest

    assert torch.autograd.gradcheck(run, (student.hidden, student.weight, student.bias), fast_mode=True)


@given(st.integers(0, 5), st.integers(1, 130), st.integers(0, 6), st.integers(0, 2**16))
def test_any_number_of_words_of_any_vocabulary(tokens: int, vocab: int, k: int, seed: int) -> None:
    """No token and one, no word named and all of them; both implementations."""
    student = case(tokens, vocab, seed).leaves()
    words = torch.rand(tokens, vocab, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :k]
    log_p = logits_of(student.hidden, student.weight, student.bias).log_softmax(-1)
    named = torch.zeros(tokens, vocab).bool().scatter(1, words, True)
    rest = log_p.masked_fill(named, -torch.inf).logsumexp(1)
    expected = gradients(log_p.gather(1, words).sum() + rest.nan_to_num(neginf=0.0).sum(), student)
    for name in ("chunked", "reference"):
        with force(selected_log_prob=name):
            out = linear_selected_log_prob(student.hidden, student.weight, words, bias=student.bias)
        assert out.log_prob.shape == words.shape
        torch.testing.assert_close(out.log_rest, rest, **DOUBLE)
        total = out.log_prob.sum() + out.log_rest.nan_to_num(neginf=0.0).sum()
        assert_same(gradients(total, student), expected)


@pytest.mark.usefixtures("implementation")
def test_selected_words_that_cannot_come() -> None:
    """Logits of −∞, named or not: no NaN; a rest that cannot come has no probability."""
    student, words = case(TOKENS, 130), torch.tensor([[3, 66], [100, 129]] + [[1, 2]] * (TOKENS - 2))
    banned = torch.arange(130) < 70
    one, rest = student._replace(bias=student.bias.masked_fill(banned, -torch.inf)).leaves(), words - 70
    out = linear_selected_log_prob(one.hidden, one.weight, words, bias=one.bias)
    assert (out.log_prob[0] == -torch.inf).all()
    assert out.log_rest[0].abs() < 1e-14, "all of the probability"
    two = Case(student.hidden, student.weight[70:], student.target, student.bias[70:]).leaves()
    log_p = logits_of(two.hidden, two.weight, two.bias)[1].log_softmax(-1)
    expected = log_p[rest[1]].sum() + log_p.clone().index_fill(0, rest[1], -torch.inf).logsumexp(0)
    ours = gradients(out.log_prob[1].sum() + out.log_rest[1], one)
    theirs = gradients(expected, two)
    assert_same([ours[0], ours[1], ours[2][70:], ours[3][70:]], theirs)
    assert not ours[2][:70].any()
    assert not ours[3][:70].any()


def test_one_selected_word_is_the_log_prob_core() -> None:
    """And a rest of almost nothing keeps its digits in fp32."""
    student = case(TOKENS, VOCAB, ignored=0.0)
    hidden = student.weight[student.target].float()
    out = linear_selected_log_prob(hidden * 5, student.weight.float(), student.target[:, None])
    wide = logits_of(hidden.double() * 5, student.weight.float().double())
    others = (wide - wide.gather(1, student.target[:, None])).exp().scatter(1, student.target[:, None], 0.0).sum(1)
    truth = others.log() - others.log1p()
    assert truth.min() < -17, "less than fp32 can subtract from 1"
    torch.testing.assert_close(out.log_rest.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.log_prob[:, 0].double(), -others.log1p(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "kl"}, "kind = 'kl'"),
        ({"kind": "jsd", "beta": 1.0}, r"beta = 1.0 is outside \(0, 1\)"),
        ({"hidden": torch.zeros(7)}, r"hidden is \(7,\)"),
        ({"teacher": TeacherHead(torch.zeros(6, 20), torch.zeros(203, 20))}, r"the teacher's \(6, 20\)"),
        ({"teacher": TeacherHead(torch.zeros(7, 20), torch.zeros(200, 20))}, "a student of 203 words"),
        ({"teacher": TopK(torch.zeros(7, 3).long(), torch.zeros(7, 2))}, r"TopK of words \(7, 3\), log_prob \(7, 2\)"),
        ({"teacher": TopK(torch.zeros(7, 1).long(), torch.zeros(7, 1), "drop")}, "tail 'drop'"),  # type: ignore[arg-type]
        ({"teacher": TopK(torch.full((7, 1), -1), torch.zeros(7, 1), "renormalise")}, "a token has no words"),
        ({"mask": torch.ones(7)}, "mask is torch.float32"),
        ({"mask": torch.ones(6).bool()}, r"mask is \(6,\)"),
        ({"reduction": "sum", "num_items": 3}, "num_items = 3"),
        ({"reduction": "batchmean"}, "reduction = 'batchmean'"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    student = case(TOKENS, VOCAB)
    given = {"hidden": student.hidden, "weight": student.weight, "teacher": teacher_of(), **change}
    with pytest.raises(InvalidArgument, match=named) as caught:
        linear_divergence(**given)
    assert caught.value.remedy


def test_words_are_checked() -> None:
    student = case(2, 67)
    with pytest.raises(LabelOutOfRange, match="label 67 at flat position 3"):
        linear_selected_log_prob(student.hidden, student.weight, torch.tensor([[1, 2], [3, 67]]))
    with pytest.raises(InvalidArgument, match="row 1 of words names 3 twice"):
        linear_selected_log_prob(student.hidden, student.weight, torch.tensor([[-1, -1], [3, 3]]))
    with pytest.raises(InvalidArgument, match=r"words \(2,\)"):
        linear_selected_log_prob(student.hidden, student.weight, torch.tensor([1, 2]))


def test_second_derivatives_come_from_the_reference() -> None:
    student, teacher = case(3, 67).leaves(), teacher_of(3, 67)
    words = torch.tensor([[3], [0], [64]])

    def kl_of(hidden: Tensor) -> Tensor:
        return linear_divergence(hidden, student.weight.detach(), teacher)

    def chosen(hidden: Tensor) -> Tensor:
        return linear_selected_log_prob(hidden, student.weight.detach(), words).log_prob.sum()

    for function in (kl_of, chosen):
        with force(divergence="reference", selected_log_prob="reference"):
            assert torch.autograd.gradgradcheck(function, (student.hidden,), fast_mode=True)
        with pytest.raises(UnsupportedDispatch, match="second-order"):
            torch.autograd.grad(function(student.hidden), student.hidden, create_graph=True)


def test_chunks_of_two_held_logits_are_half_as_long() -> None:
    """256 MiB for both sides."""
    assert vocab_tiles.row_chunks(2048, 640, 262144, torch.float32, held=2)[0] == slice(0, 128)
