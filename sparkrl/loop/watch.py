"""Ends a run whose trainer and server have drifted apart."""

from __future__ import annotations

from sparkrl.config.schema import Config
from sparkrl.errors import AgreementError


class AgreementWatch:
    """Counts steps in a row whose k3 is above `telemetry.k3_limit`; a resumed run counts anew."""

    def __init__(self, config: Config) -> None:
        self._limit = config.telemetry.k3_limit
        self._patience = config.loop.k3_patience
        self._above: list[float] = []

    @property
    def exhausted(self) -> bool:
        """Whether the run has to stop after this step."""
        return 0 < self._patience <= len(self._above)

    def see(self, k3: float) -> None:
        """Note one step's k3, nats; one that is not a number counts as above the limit."""
        self._above = [] if k3 <= self._limit else [*self._above, k3]

    def check(self, step: int) -> None:
        """
        Args:
            step: steps made so far; their checkpoint has been saved.
        Raises:
            AgreementError: as many steps in a row as `loop.k3_patience` allows were above the limit.
        """
        if not self.exhausted:
            return
        values = ", ".join(f"{k3:.1e}" for k3 in self._above[-5:])
        raise AgreementError(
            f"stopped after step {step}: k3 between trainer and server was above `telemetry.k3_limit` "
            f"({self._limit:g}) for {len(self._above)} steps in a row (`loop.k3_patience`), last: {values}\n"
            "The trainer's gradient is then that of another policy than the one that was sampled. Step "
            f"{step} is saved.",
            hint="see `agree/route_agreement` and `agree/dlogp_max`; is `trainer.replay` on, do server and trainer "
            "hold the same weights? Then `loop.resume`, or raise the limit",
        )
