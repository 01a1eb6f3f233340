"""What `torch.utils.flop_counter.FlopCounterMode` counts of the operators of this package.

A mode sees an operator from outside only, so that each has a formula here, in the convention of
`bestiary.training.flops`: products of the model, 2 FLOPs a multiply-add, forward and for each gradient that is
computed; of attention the pairs that see each other, of experts the rows routed to them, of a head the positions with a
target. What an operator computes again in its backward pass is not counted; functions that are no operators (the head,
when nothing is traced) count product by product, padding and all. How many pairs, rows or positions there are is data:
of fake tensors, which have none, all that could be are counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bestiary.kernels.deferred import when_imported

Tensors = Sequence[Tensor | None]


def counted(*operators: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers a formula for operators of `torch.library.custom_op`; it is given what they are given."""
    packets = [operator._opoverload._overloadpacket for operator in operators]

    def remember(formula: Callable[..., int]) -> Callable[..., int]:
        when_counted(lambda counter: counter.register_flop_formula(packets, get_raw=True)(formula))
        return formula

    return remember


def when_counted(register: Callable[[Any], object]) -> None:
    """Calls `register` with torch's module of the counter once it is there; its import brings Triton's."""
    when_imported("torch.utils.flop_counter", register)


def has_data(*tensors: Tensor | None) -> bool:
    """Whether the numbers in all of them can be read."""
    from torch._subclasses.fake_tensor import FakeTensor

    return all(t is None or not (isinstance(t, FakeTensor) or t.is_meta) for t in tensors)


def head(hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, times: int) -> int:
    """`times` products of the positions that count with the whole vocabulary."""
    rows = int((target != ignore_index).sum()) if has_data(target) else target.numel()
    return times * 2 * rows * hidden.shape[-1] * weight.shape[0]


def projection(rows: int, weight: Tensor, lora_A: Tensor | None, lora_B: Tensor | None) -> int:
    """`rows` rows through one projection of experts: (E, out, in), adapters (E, r, in) and (E, out, r)."""
    adapters = [tensor for tensor in (lora_A, lora_B) if tensor is not None]
    return 2 * rows * sum(tensor.shape[-1] * tensor.shape[-2] for tensor in (weight, *adapters))


def projection_back(rows: int, tensors: Tensors, for_input: bool, needed: Sequence[bool]) -> int:
    """Gradients of one projection's input and of its weight, bias, lora_A and lora_B, those that are `needed`.

    Of an adapter x Aᵀ Bᵀ: dO B, for the input and for A, then the products with A and x; for B dO (x Aᵀ).
    """
    weight, _, lora_A, lora_B = tensors
    total = 0
    if weight is not None:
        total += (for_input + needed[0]) * projection(rows, weight, None, None)
    if lora_A is not None and lora_B is not None and weight is not None:
        of_A, of_B = 2 * rows * lora_A.shape[-1] * lora_A.shape[-2], 2 * rows * lora_B.shape[-1] * lora_B.shape[-2]
        total += (for_input + needed[2]) * of_A + (for_input or needed[2]) * of_B + needed[3] * of_B
    return total
