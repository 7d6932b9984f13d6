"""The steps child with one of the model's fixes taken out: what a check must find. The first argument names the fix.

`hash`: n-grams are hashed in array order. `halo`: the Engram convolution reads array order. `halo_kernel`: the same, from a kernel that
is not zero. `kernel`: nothing is broken, the kernel alone is not zero.
"""

from __future__ import annotations

import sys
from typing import Any

from service.steps import child

KERNEL = 0.25


def break_hash() -> None:
    from service.models import hashing

    hashing.to_time_order = lambda x, **_: x  # type: ignore[assignment]
    hashing.to_array_order = lambda x, **_: x  # type: ignore[assignment]


def break_halo() -> None:
    from service.models import engram
    from service.models.order import Order

    exchange = engram.chunks_with_history

    def in_array_order(x: Any, *, halo: int, order: Order) -> Any:
        del order
        return exchange(x, halo=halo, order=Order.NATURAL)

    engram.chunks_with_history = in_array_order


def start_with_a_kernel() -> None:
    import jax

    from service.steps import run

    made = run.init_state

    def with_kernel(*args: Any) -> Any:
        state = made(*args)

        def fill(path: Any, leaf: Any) -> Any:
            return leaf + KERNEL if "short_conv" in jax.tree_util.keystr(path) and "kernel" in jax.tree_util.keystr(path) else leaf

        return {**state, "params": jax.tree.map_with_path(fill, state["params"])}

    run.init_state = with_kernel


FIXES = {
    "hash": (break_hash,),
    "halo": (break_halo,),
    "halo_kernel": (break_halo, start_with_a_kernel),
    "kernel": (start_with_a_kernel,),
}


def main(fix: str) -> None:
    # The lifeline must stand before JAX is loaded; the patches wait until the run is imported.
    import service.steps.interface as interface

    validate = interface.StepsRequest.model_validate

    def patched(data: Any) -> Any:
        for apply in FIXES[fix]:
            apply()
        return validate(data)

    interface.StepsRequest.model_validate = patched  # type: ignore[method-assign]
    child.main()


if __name__ == "__main__":
    main(sys.argv[1])
