"""How an operator is made: of a schema, of what computes it, and of what stands for that where tensors are fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library: Any = torch.library  # which has no types
LIBRARY = library.Library("deep_gemm", "FRAGMENT")
TAGS = (
    torch.Tag.pt2_compliant_tag,
    # Inductor passes on the strides that it was shown, so scales that lie m-major stay so.
    torch.Tag.needs_exact_strides,
)

Kernel = Callable[..., Any]


def operator(
    schema: str, real: Kernel, fake: Kernel, tags: tuple[torch.Tag, ...] = (), *, has_gradients: bool = False
) -> None:
    """Make an operator of torch.ops.deep_gemm.

    `fake` takes what `real` takes, makes all checks that need neither addresses nor elements, and gives tensors of the
    same shapes, strides, types and devices. The result carries no gradient, unless `gradients` gives a formula.
    """
    name = schema.split("(", maxsplit=1)[0]
    LIBRARY.define(schema, tags=TAGS + tags)
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    if not has_gradients:
        LIBRARY.impl(name, library.fallthrough_kernel, "Autograd")
    library.register_fake(f"deep_gemm::{name}", fake, lib=LIBRARY)
    packet, _, overload = name.partition(".")
    made = getattr(getattr(torch.ops.deep_gemm, packet), overload or "default")
    if made._schema.is_mutable:
        LIBRARY.impl(name, _counting_versions(made), "ADInplaceOrView", with_keyset=True)


def gradients(name: str, backward: Kernel, keep: Kernel) -> None:
    """Give the formula for the gradients of an operator, and what forward keeps for it."""
    library.register_autograd(f"deep_gemm::{name}", backward, setup_context=keep, lib=LIBRARY)


def _counting_versions(made: torch._ops.OpOverload) -> Kernel:
    """Make a kernel that lets autograd know which tensors are written, and leaves the rest to the kernels below."""
    arguments = made._schema.arguments
    written = [(i, x.name) for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place, name in written:
            torch.autograd.graph.increment_version(args[place] if place < len(args) else kwargs[name])
        return made.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    return kernel
