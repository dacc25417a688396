"""Hooks into an engine for tests, benchmarks and the tuner: times of ops, routing, captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyno._generate import greedy_after
from dyno._token_array import token_array
from dyno.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dyno.engine import Engine, Rows

__all__ = ["Diagnostics"]


class Diagnostics:
    """The diagnostic methods of an engine, available as `engine.diagnostics`.

    They use the sequences and settings of the engine, and raise the same errors as its methods.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def logits(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        pinned_routing: NDArray[np.int32],
        reset: bool = True,
        rows: Rows = "all",
        slot: int = 0,
    ) -> NDArray[np.float32]:
        """Logits as in `Engine.logits`, but with given experts instead of the choice of the router.

        Args:
            tokens: As in `Engine.logits`.
            pinned_routing: Experts by MoE layer and token, int32 [MoE layers, n_tokens, used].
            reset: As in `Engine.logits`.
            rows: As in `Engine.logits`.
            slot: As in `Engine.logits`.

        Raises:
            PlanError: As in `Engine.logits`; or the routing has the wrong shape or an unknown expert; or the
            model has no experts.
        """
        decoded = self._engine._decode({slot: tokens}, reset=reset, rows=rows, pinned_routing=pinned_routing)
        return decoded[0][slot]

    def logits_with_routing(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        *,
        reset: bool = True,
        rows: Rows = "all",
        pinned_routing: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Logits, together with the experts that were used.

        Returns:
            Logits as in `Engine.logits`, and int32 [MoE layers, n_tokens, experts used] in the order of the
            layers.

        Raises:
            PlanError: As in `logits`, or the model has no experts.
        """
        result, routing = self._engine._decode(
            {0: tokens}, reset=reset, rows=rows, pinned_routing=pinned_routing, capture_routing=True
        )
        if routing is None:
            raise PlanError(f"[engine] {self._engine.path} has no experts, so there is no routing to capture")
        return result[0], routing

    def expected_cost(
        self,
        tokens: int,
        *,
        depth: int = 0,
        logit_rows: int = 1,
        measured: Sequence[tuple[str, str, int, float]] = (),
    ) -> list[dict[str, Any]]:
        """Expected bytes and seconds of a u-batch of one sequence, by device and layer.

        Args:
            tokens: Number of tokens in the u-batch.
            depth: Number of positions before it.
            logit_rows: Number of rows that need logits.
            measured: Seconds of a launch by (device, op key, rows). They replace the values that follow from
            the rates of the device.

        Returns:
            Dicts with `device`, `layer` (None outside of layers), `launches`, `weights_bytes`, `bytes`,
            `flops`, `seconds`, `transfer_bytes` and `transfer_seconds` (both for data that it receives,
            including copies of weights).
        """
        return list(self._cost(tokens, depth, logit_rows, measured)["parts"])

    def expected_seconds(
        self,
        tokens: int,
        *,
        depth: int = 0,
        logit_rows: int = 1,
        measured: Sequence[tuple[str, str, int, float]] = (),
    ) -> float:
        """Expected total seconds of a u-batch.

        The total is less than the sum over the parts of `expected_cost` if devices run in parallel, or if
        copies of weights cross while a device computes. The arguments are the same.
        """
        return float(self._cost(tokens, depth, logit_rows, measured)["seconds"])

    def _cost(
        self, tokens: int, depth: int, logit_rows: int, measured: Sequence[tuple[str, str, int, float]]
    ) -> dict[str, Any]:
        session = self._engine._open()
        return session.cost(
            tokens, depth, logit_rows, rates=self._engine._rates or {}, measured=list(measured)
        )

    def lose_device(self, name: str, after_segments: int = 0) -> None:
        """Simulate the loss of a virtual device, like the loss of a GPU that falls off its bus.

        Args:
            name: `cpu:N`.
            after_segments: Number of segments that it still runs. If this ends within a prompt, the computed
            u-batches do not count.

        Raises:
            PlanError: The engine has no such virtual device.
        """
        self._engine._open().lose_device(name, after_segments)

    @property
    def draws_on_device(self) -> bool:
        """Whether `generate` draws tokens on the device (GPUs), so that no logits come to the host."""
        return self._engine._open().draws_on_device

    def greedy_after(
        self, tokens: Sequence[int] | NDArray[np.integer[Any]], slot: int = 0
    ) -> NDArray[np.int32]:
        """The most probable token after each of `tokens`, which are appended one by one as `generate` does.

        Returns:
            int32 [n_tokens].

        Raises:
            PlanError: As in `Engine.logits`.
        """
        array = token_array(tokens)
        engine = self._engine
        with engine._lock:
            session = engine._open()
            engine._check_batch(session, [(slot, array)], False)
            tokens_after = greedy_after(session, array, slot)
            engine._tell_failed_captures(session)
            return tokens_after

    def time_ops(
        self,
        tokens: Sequence[int] | NDArray[np.integer[Any]],
        slot: int = 0,
        *,
        in_graph: bool = False,
    ) -> list[dict[str, Any]]:
        """Append tokens as `Engine.logits` does, and time each launch.

        Args:
            tokens: As in `Engine.logits`.
            slot: As in `Engine.logits`.
            in_graph: Time how much each launch adds to a replay of the captured graph. Launches overlap
                there, and the times add up to the time of the graph. Off: each launch is timed alone.

        Returns:
            Dicts with `family`, `key`, `count` (nodes of the op list) and `seconds` of all launches together.

        Raises:
            PlanError: As in `Engine.logits`; or `in_graph` is on and no graph of this batch is captured: on
                a CPU, for more than one token, or with `cuda_graphs` off.
        """
        array = token_array(tokens)
        engine = self._engine
        with engine._lock:
            session = engine._open()
            engine._check_batch(session, [(slot, array)], False)
            return session.time_ops([(slot, array)], rows="last", in_graph=in_graph)

    def weights_by_node(self) -> list[dict[int, int]]:
        """Bytes of the weights on the CPU by NUMA node, for each copy of the weights.

        Weights that are read directly from mapped pages of the file do not count.
        """
        return self._engine._open().weights_by_node()

    def captures(self) -> list[dict[str, Any]]:
        """The CUDA graphs of repeated work since the last change of settings; empty on the CPU.

        Returns:
            Dicts with `work` (`draw`: a step of `generate`; `decode`), its `tokens`, `sequences` and `rows`
            of logits, the largest `depth` of a sequence in positions that it is for, whether it is
            `captured`, the number of `uses` before that, `failures`, `next_attempt` (the use at which the
            capture is tried, None once captured) and the `reason` why the last attempt
            failed. Work that is not captured runs launch by launch, with the same results but slower.
        """
        return self._engine._open().captures()
