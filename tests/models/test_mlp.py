"""The dense MLP runs its second half as one function, unless somebody else has to see what goes into down_proj."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bestiary.kernels.dispatch import force, record
from bestiary.models.layers.linear import Linear
from bestiary.models.layers.mlp import MLP

from .tiny import tiny


class Doubled(Linear):
    """A layer of somebody else's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


def replaced(mlp: MLP) -> None:
    down = mlp.down_proj
    mlp.down_proj = Doubled(down.in_features, down.out_features)
    mlp.down_proj.weight = down.weight
    mlp.double()


def overridden(mlp: MLP) -> None:
    forward = mlp.down_proj.forward
    object.__setattr__(mlp.down_proj, "forward", lambda x: 2.0 * forward(x))


CHANGES: dict[str, tuple[Callable[[MLP], object], float]] = {
    "forward hook": (lambda mlp: mlp.down_proj.register_forward_hook(lambda _m, _x, y: 2.0 * y), 2.0),
    "pre-hook": (lambda mlp: mlp.down_proj.register_forward_pre_hook(lambda _m, x: (2.0 * x[0],)), 2.0),
    "backward hook": (lambda mlp: mlp.down_proj.register_full_backward_hook(lambda _m, _i, _o: None), 1.0),
    "another class": (replaced, 2.0),
    "another forward": (overridden, 2.0),
    "parametrized": (
        lambda mlp: nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", nn.Identity()),
        1.0,
    ),
}


def mlp_and_input() -> tuple[MLP, Tensor]:
    mlp = tiny("gemma3").model.layers[0].mlp
    assert isinstance(mlp, MLP)
    size = mlp.gate_proj.in_features
    return mlp, torch.randn(2, 5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_bare_layer_joins_the_activation() -> None:
    """With gradients alone; the numbers are those of the two apart."""
    mlp, x = mlp_and_input()
    with record() as log:
        joined = mlp(x)
    assert ("gated_linear", "lean") in log
    with force(gated_linear="reference"):
        assert torch.equal(joined, mlp(x))
    with torch.no_grad(), record() as log:
        assert torch.equal(joined, mlp(x))
    assert ("gated_linear", "reference") in log


@pytest.mark.parametrize("name", CHANGES)
def test_whoever_changed_down_proj_is_called(name: str) -> None:
    """Hooks, subclasses and wrappers see the product of gate and up, and what they return counts."""
    mlp, x = mlp_and_input()
    plain = mlp(x)
    change, factor = CHANGES[name]
    change(mlp)
    with record() as log:
        changed = mlp(x)
    assert "gated_linear" not in {operation for operation, _ in log}
    torch.testing.assert_close(changed, factor * plain, rtol=1e-12, atol=1e-14)
